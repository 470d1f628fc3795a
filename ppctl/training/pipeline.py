"""A model pipelined over a mesh: the object that trains, whoever asks for it, the command line or a script.

`pipeline` checks a request and builds a `Pipeline`; the engine that runs it is made here and nowhere else.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from ppctl.errors import ConfigError
from ppctl.executors.layout import Layout
from ppctl.executors.mpmd.tasks import Model
from ppctl.executors.stage.flops import RelativeCosts, relative_costs
from ppctl.executors.xla_flags import flags_for
from ppctl.model.network import Network
from ppctl.model.parallel import StageAxes
from ppctl.model.stack import Stack, init
from ppctl.model.trainable import checked_flags, trained_part, trained_share
from ppctl.reports.terminal import size_text
from ppctl.schedule.costs import Costs, task_costs
from ppctl.schedule.families.registry import BASELINE
from ppctl.schedule.ir import Schedule
from ppctl.schedule.partition.partition import Partition
from ppctl.schedule.remat import Remat
from ppctl.schedule.simulate import simulate
from ppctl.schedule.ticks import Ticks, ticks
from ppctl.training import optim
from ppctl.training.engines import Engine, Footprint
from ppctl.training.engines.make import make_engine, model_of
from ppctl.training.engines.programs import StepPrograms
from ppctl.training.engines.states import States
from ppctl.training.execution import Execution, check_execution, check_lowering
from ppctl.training.mixing import MOST_BYTES, few_examples, refuse_mixing
from ppctl.training.request import (
    check_batch,
    check_batch_size,
    check_split,
    divided_stack,
    divided_vocabulary,
    in_arguments,
    partition_for,
    schedule_for,
    shapes_of,
    shards_over_tp,
    traced_stack,
    with_vocabulary_of,
)
from ppctl.training.train_step import init_state

Tree = Any


@dataclass(frozen=True)
class Pipeline:
    """A model, its optimizer and a schedule on a mesh. Made by `pipeline`.

    A state is a pytree of sharded arrays that Orbax saves; `step` takes its memory. A batch is {"inputs", "targets"}:
    arrays [batch, ...] of the shapes that the pipeline was made for, on the host or placed by `put`.
    """

    stack: Stack
    schedule: Schedule
    ticks: Ticks | None  # of executor=spmd
    states: States
    optimizer: optax.GradientTransformation
    dtype: jnp.dtype  # of compute
    batch_shapes: Tree  # shapes and dtypes of a global batch
    execution: Execution
    engine: Engine
    model: Model  # as the tasks of one device see it
    lr_schedule: optax.Schedule | None = None
    examples: Tree = None  # a few of the batch that it was made with

    # what it is

    @property
    def mesh(self) -> Mesh:
        return self.states.layout.mesh

    @property
    def layout(self) -> Layout:
        return self.states.layout

    @property
    def partition(self) -> Partition:
        """The layers of each stage."""
        return self.states.layout.partition

    @property
    def batch_size(self) -> int:
        return self.batch_shapes["inputs"].shape[0]

    @cached_property
    def task_costs(self) -> Costs:
        """Relative costs of tasks: F = I = W = 1, what remat recomputes, W of what is trained; of parts by FLOPs."""
        costs = task_costs(self.execution.remat, self.trained_share)
        return self._relative_costs.with_parts(costs) if self.schedule.divides_vocabulary else costs

    @cached_property
    def trained_share(self) -> float:
        """The share of the layers' weights that is trained, 0..1."""
        return trained_share(self.states.natural["params"]["layers"], self.stack.trains("layers"))

    @cached_property
    def num_parameters(self) -> int:
        return sum(a.size for a in jax.tree.leaves(self.states.natural["params"]))

    @cached_property
    def num_trained(self) -> int:
        """The number of parameters that are trained."""
        return sum(a.size for a in jax.tree.leaves(trained_part(self.states.natural["params"], self.stack.trainable)))

    @cached_property
    def relative_costs(self) -> RelativeCosts:
        """The cost of each layer, of the embedding and of the head, in layers, by FLOPs; 0 of what no stage has."""
        costs = self._relative_costs
        return costs.without_ends if self.schedule.divides_vocabulary else costs

    @cached_property
    def _relative_costs(self) -> RelativeCosts:
        recompute = self.execution.remat.recomputes
        return relative_costs(self.stack, self.batch_shapes, self.dtype, recompute=recompute)

    # training

    def init(self, seed: int | None = None) -> Tree:
        """Return the initial state: a function of the model and the seed alone, whatever the layout."""
        self._try_examples()
        return self.engine.new_state(seed)

    def step(self, state: Tree, batch: Mapping[str, Any]) -> tuple[Tree, dict[str, jax.Array]]:
        """Return (next state, {"loss", "grad_norm"}), with "lr" where an lr_schedule was given.

        Compiled at the first call, unless `compile` did it. The state's memory is reused: go on with the returned one.
        """
        if "step" not in self._done:
            self.compile()
        return self.engine.step(state, self.put(batch))

    def loss(self, state: Tree, batch: Mapping[str, Any]) -> jax.Array:
        """Return the mean loss of a batch, by forwards alone."""
        if "loss" not in self._done:
            self.compile(evaluate=True)
        return self.engine.loss(state, self.put(batch))[0]

    def loss_and_grads(self, state: Tree, batch: Mapping[str, Any]) -> tuple[jax.Array, Tree]:
        """Return (mean loss, gradients in natural order) of a batch; the state stays."""
        return self.engine.loss_and_grads(state, self.put(batch))

    def compile(self, *, evaluate: bool = False) -> Footprint:
        """Compile the train step, and with `evaluate` what `loss` runs; return the memory of the step."""
        self._try_examples()
        footprint = self.engine.compile(evaluate=evaluate)
        self._done.update({"step", "loss"} if evaluate else {"step"})
        return footprint

    def check_examples(self, name: str, examples: Mapping[str, Any]) -> str | None:
        """Return why the model could not be tried for mixing the examples of a batch, or None.

        None, untried, where the model states it, or where all of a batch is computed together. name: of the model, for
        people; examples: a few of a batch.

        Raises:
            ConfigError: The model mixes them, so that microbatches would train another function.
        """
        self._done.add("examples")
        shape = self.mesh.shape
        if self.stack.mixes_examples is not None or self.schedule.num_microbatches * shape["dp"] * shape["fsdp"] == 1:
            return None
        size = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(self.states.natural["params"]))
        if size > MOST_BYTES:
            return (
                f"{name} was not tried for mixing the examples of a batch: its parameters take {size_text(size)}, and "
                f"one device is given at most {size_text(MOST_BYTES)} for it."
            )
        return refuse_mixing(name, self.stack, few_examples(examples, self.batch_shapes), self.dtype)

    def _try_examples(self) -> None:
        if "examples" in self._done:
            return
        with in_arguments():
            note = self.check_examples("The model", self.examples)
        if note is not None:
            warnings.warn(note, stacklevel=3)

    @cached_property
    def _done(self) -> set[str]:
        """The work that is done already: the model tried on "examples", a "step" and a "loss" compiled."""
        return set()

    def put(self, batch: Mapping[str, Any]) -> Tree:
        """Return a global batch where a step wants it. What was put already stays.

        Raises:
            ConfigError: The batch has other names or shapes than the pipeline was made for.
        """
        if all(isinstance(a, jax.Array) and len(a.sharding.device_set) > 1 for a in batch.values()) and batch:
            return dict(batch)
        check_batch(batch, self.batch_shapes)
        mine = list(self.engine.examples)
        return self.engine.put({name: np.asarray(batch[name], a.dtype)[mine] for name, a in self.batch_shapes.items()})

    def to_natural(self, state: Tree) -> Tree:
        """Return a state in natural order: layers [L, ...] in model order, as checkpoints hold it on any layout."""
        return self.engine.to_natural(state)

    def from_natural(self, state: Tree) -> Tree:
        """Return the pipeline's state of one in natural order."""
        return self.engine.from_natural(state)

    # what it takes

    def memory(self) -> tuple[Mapping[str, int], ...]:
        """Return for each rank the bytes of one device by part: exact from shapes, "temporaries" once compiled."""
        return self.engine.memory()

    def programs(self) -> StepPrograms:
        """Return the programs of a step, traced: their jaxpr, StableHLO, HLO, collectives; and transfers of mpmd."""
        return self.engine.programs()

    def bubble(self, costs: Costs | None = None) -> float | None:
        """Return the idle share of all ranks that the schedule predicts for this executor, 0..1.

        costs: seconds of tasks; None: `task_costs`, in equal stages. None without a pipeline.
        """
        if not self.execution.is_pipelined:
            return None
        costs = self.task_costs if costs is None else costs
        if self.ticks is not None:
            return self.ticks.bubble_fraction(costs)
        return simulate(self.schedule, costs).bubble_fraction


def pipeline(
    stack: Stack | Network,
    *,
    mesh: Mesh,
    schedule: str | Schedule | Ticks = BASELINE,
    num_microbatches: int | None = None,
    batch: Tree,
    optimizer: optax.GradientTransformation,
    executor: str = "spmd",
    remat: str = "none",
    partition: str | Sequence[int] = "uniform",
    dtype: Any = jnp.float32,
    clip_norm: float | None = None,
    lr_schedule: optax.Schedule | None = None,
    seed: int = 0,
    num_layers: int | None = None,
    layers: str = "marks",
    unroll: int = 16,
    idle: str = "skip",
    gather: str = "step",
    post_validation: bool = False,
    xla_flags: str | Sequence[str] = "auto",
    sequence_parallel: bool = True,
    context: str = "gather",
    vocab: str = "whole",
    **knobs: float,
) -> Pipeline:
    """Return a model pipelined over a mesh.

    Args:
        stack: A `Stack`, a built-in model (`ppctl.transformer`, `ppctl.mlp`), or a `Network`, any function of a batch,
            which is cut into `num_layers` layers at its marks (layers="marks") or by clustering (layers="auto").
        mesh: Axes dp, pp, fsdp, tp and cp, as `ppctl.mesh` makes it.
        schedule: The name of a family, with its knobs (num_chunks=2, ...) as further arguments; or a `Schedule` of
            one's own, validated here; or `Ticks`, a schedule lowered before.
        num_microbatches: Of a step; needed with a name, otherwise that of the schedule.
        batch: {"inputs", "targets"}: a global batch, or its shapes and dtypes.
        optimizer: Of optax, and one that treats each parameter by itself.
        clip_norm: Clip gradients by the global norm of the whole model; None: no clipping.
        executor: spmd (one XLA program; the default) | mpmd (a program for each stage and kind of task) | reference (no
            pipeline).
        remat: What the backward recomputes: none (default) | layer | full. `Ticks` must have been lowered for it.
        unroll: Layers of a device that are unrolled up to this many (default 16), scanned above.
        idle: What a rank without a task does in a tick of spmd: skip (default) | compute.
        gather: When layers are gathered over fsdp: once a step (default) | tick (of spmd) | layer: each before its use.
        post_validation: In mpmd a rank updates before the global norm is known, and again if that was wrong.
        sequence_parallel: Devices along tp divide the rows of activations between layers (default), or all hold all.
        vocab: Embedding and head: whole (default), on the first and the last stage, or parallel: a part of each on
            every rank, divided by the vocabulary. A `Schedule` or `Ticks` say it themselves.
        context: How attention gets keys and values of devices along cp: gather (default) | ring.
        xla_flags: Options of XLA's compiler: auto (those that suit the devices; the default) | none | texts NAME=VALUE.
        partition: uniform | balanced (by FLOPs) | the number of layers of each stage.
        dtype: Of compute. Parameters have the model's.
        lr_schedule: optax's learning rate of a step, for the metrics.
        seed: Of `init` where it is given none.

    Raises:
        ConfigError, ScheduleError: The request is impossible, with values, equation and remedy; before any compiling.
    """
    flags = flags_for(xla_flags, mesh.devices.flat[0])
    axes = StageAxes(mesh.shape.get("tp", 1), mesh.shape.get("cp", 1), sequence_parallel, context)
    execution = Execution(executor, Remat.of(remat), unroll, idle, gather, post_validation, flags, axes)
    check_execution(execution, mesh)
    shapes = shapes_of(batch)
    lowered = schedule if isinstance(schedule, Ticks) else None
    if lowered is not None:
        check_lowering(lowered, execution)
    plan = schedule_for(schedule, mesh.shape["pp"], num_microbatches, knobs)
    dtype = jnp.dtype(dtype)
    if isinstance(stack, Network):
        stack = traced_stack(stack, shapes, num_layers, layers, dtype)
    elif num_layers not in (None, stack.num_layers):
        raise ConfigError(f"num_layers={num_layers}, but the stack has {stack.num_layers} layers. Leave it out.")
    initial = jax.eval_shape(lambda: init(stack, 0))
    checked_flags(initial, stack.trainable)
    costs = cache(lambda: relative_costs(stack, shapes, dtype, recompute=execution.remat.recomputes))
    of_tasks = task_costs(execution.remat, trained_share(initial["layers"], stack.trains("layers")))
    if vocab != "whole" or plan.divides_vocabulary:
        of_tasks = costs().with_parts(of_tasks)
    if vocab != "whole":
        plan = divided_vocabulary(plan, vocab, schedule, execution, of_tasks)
    axes = with_vocabulary_of(plan, execution)
    execution = replace(execution, axes=axes)
    check_batch_size(shapes, plan.num_microbatches, mesh)
    if execution.in_ticks and lowered is None:
        lowered = ticks(plan, of_tasks, execution.remat)
    of_stages = (lambda: costs().without_ends) if plan.divides_vocabulary else costs
    with in_arguments():
        divided = divided_stack(stack, axes, shapes) if execution.is_pipelined else stack
        shards, auto = shards_over_tp(stack, divided, axes)
        if auto and execution.gathers_by_layer and mesh.shape["fsdp"] > 1:
            raise ConfigError(
                f"gather=layer with fsdp={mesh.shape['fsdp']} and tp={axes.tp}: layers are gathered one by "
                "one where the model divides itself over tp (Stack.divided), not where XLA does (Stack.sharding). Use "
                "gather=step."
            )
    layout = Layout(mesh, partition_for(partition, stack.num_layers, plan, of_stages), plan.rank_of, shards, auto)
    optimizer = optim.clipped(optimizer, clip_norm)
    states = States(layout, lambda seed: init_state(init(stack, seed), optimizer, stack.trainable), seed)
    trained = trained_part(states.natural["params"], stack.trainable)
    optim.check_separable(optimizer, trained, by_rank=execution.dispatches_tasks)
    model = model_of(divided, states, shapes, plan.num_microbatches, execution, dtype, axes)
    if execution.is_pipelined:
        check_split(stack, plan, layout.partition, model)
    how = shapes, optimizer, lr_schedule, execution, clip_norm, of_tasks
    engine = make_engine(stack, model, states, plan, lowered, *how)
    examples = few_examples(batch, shapes)
    return Pipeline(
        stack, plan, lowered, states, optimizer, dtype, shapes, execution, engine, model, lr_schedule, examples
    )
