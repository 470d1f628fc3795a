"""A model pipelined over a mesh: the object that trains, for the command line and scripts.

`pipeline` checks a request and builds a `Pipeline`; the engine that runs it is made here and
nowhere else.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from ppctl.config import Reference
from ppctl.errors import ConfigError
from ppctl.executors.model_shapes import Model, tree_bytes
from ppctl.executors.parameter_layout import Layout
from ppctl.executors.stage.jaxpr_flops import RelativeCosts, relative_costs
from ppctl.model.network import Network
from ppctl.model.stack import Stack, init
from ppctl.model.trainable_parameters import checked_flags, trained_part, trained_share
from ppctl.reports.terminal_output import size_text
from ppctl.schedule.costs import Costs, task_costs
from ppctl.schedule.families.registry import BASELINE
from ppctl.schedule.ir import Schedule
from ppctl.schedule.mesh_axes import DATA_AXES, MeshSizes
from ppctl.schedule.partition.partition import Partition
from ppctl.schedule.simulator import simulate
from ppctl.schedule.tick_lowering import Ticks, ticks
from ppctl.training.pipeline import optimizers as optim
from ppctl.training.pipeline import pipeline_request as request
from ppctl.training.pipeline.call_checks import (
    StateChecks,
    check_natural,
    check_parts,
    checked_numbers,
    floating,
    on_host,
    whole_number,
)
from ppctl.training.pipeline.engines.engine_protocol import Engine, Footprint
from ppctl.training.pipeline.engines.make_engine import make_engine, model_of
from ppctl.training.pipeline.engines.step_programs import StepPrograms
from ppctl.training.pipeline.engines.train_states import States, shardings_of
from ppctl.training.pipeline.execution import Execution, check_lowering, execution_of, in_arguments
from ppctl.training.pipeline.layer_optimizers import LayerOptimizer
from ppctl.training.pipeline.mixing import MOST_BYTES, few_examples, refuse_mixing
from ppctl.training.pipeline.optimizers import init_state

Tree = Any


@dataclass(frozen=True)
class Pipeline:
    """A model, its optimizer and a schedule on a mesh. Made by `pipeline`.

    A state is a pytree of sharded arrays that Orbax saves; `step` takes its memory. A batch is
    {"inputs", "targets"}: arrays [batch, ...] of the shapes that the pipeline was made for, on the
    host or placed by `put`.
    """

    stack: Stack
    schedule: Schedule
    ticks: Ticks | None  # the schedule in ticks; None unless executor=spmd
    execution: Execution
    task_costs: Costs  # relative; F = I = W = 1, plus recomputation, W of the trained share
    costs_of_layers: Callable[[], RelativeCosts]
    states: States
    optimizer: LayerOptimizer
    dtype: jnp.dtype  # of compute
    batch_shapes: Tree  # shapes and dtypes of a global batch
    engine: Engine
    model: Model  # as the tasks of one device see it
    lr_schedule: optax.Schedule | None = None
    examples: Tree = None  # a few of the batch that it was made with

    # its parts

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

    @property
    def relative_costs(self) -> RelativeCosts:
        """The costs of layers, embedding and head in layers, by FLOPs; 0 for parts on all ranks."""
        return self.costs_of_layers()

    @cached_property
    def num_parameters(self) -> int:
        return sum(a.size for a in jax.tree.leaves(self.states.natural["params"]))

    @cached_property
    def num_trained(self) -> int:
        """The number of parameters that are trained."""
        trained = trained_part(self.states.natural["params"], self.stack.trainable)
        return sum(a.size for a in jax.tree.leaves(trained))

    @property
    def attached_losses(self) -> tuple[str, ...]:
        """The names of the losses that layers attach, among the metrics of a step."""
        return self.model.inputs.losses

    # training

    def init(self, seed: int | None = None) -> Tree:
        """Return the initial state, a function of model and seed, independent of the layout."""
        number = None if seed is None else whole_number("seed", seed, 0)
        self._try_examples()
        return self._state_checks.remember(self.engine.new_state(number))

    def step(self, state: Tree, batch: Mapping[str, Any]) -> tuple[Tree, dict[str, jax.Array]]:
        """Return (next state, metrics) of one train step.

        metrics: "loss", "grad_norm" (before clipping), "lr" where an lr_schedule was given, and the
        losses that layers attach, by name.

        Compiled at the first call, unless `compile` did it. The state's memory is reused.
        """
        placed = self._placed(state, batch)
        if "step" not in self._done:
            self.compile()
        state, metrics = self.engine.step(state, placed)
        return self._state_checks.remember(state), metrics

    def loss(self, state: Tree, batch: Mapping[str, Any]) -> jax.Array:
        """Return the mean loss of a batch, by forwards only."""
        placed = self._placed(state, batch)
        if "loss" not in self._done:
            self.compile(evaluate=True)
        return self.engine.loss(state, placed)[0]

    def loss_and_grads(self, state: Tree, batch: Mapping[str, Any]) -> tuple[jax.Array, Tree]:
        """Return (mean loss, gradients in natural order) of a batch; the state stays."""
        return self.engine.loss_and_grads(state, self._placed(state, batch))

    def _placed(self, state: Tree, batch: Mapping[str, Any]) -> Tree:
        """Return a batch on the devices of its step, after checks of both."""
        self._state_checks.check(state)
        return self.put(batch)

    @cached_property
    def _state_checks(self) -> StateChecks:
        return StateChecks(self.engine.state_shapes, (self.partition, self.layout.rank_of))

    def compile(self, *, evaluate: bool = False) -> Footprint:
        """Compile the train step, with `evaluate` also `loss`; return the step's memory."""
        self._try_examples()
        footprint = self.engine.compile(evaluate=evaluate)
        self._done.update({"step", "loss"} if evaluate else {"step"})
        return footprint

    def check_examples(self, name: str, examples: Mapping[str, Any]) -> str | None:
        """Return why the model could not be tried for mixing the examples of a batch, or None.

        Untried if the model states that it mixes or not, or the batch is computed as a whole.
        name: of the model, for messages; examples: a few of a batch.

        ConfigError: the model mixes them, so that microbatches would train another function.
        """
        self._done.add("examples")
        num_parts = self.schedule.num_microbatches * MeshSizes.of(self.mesh.shape).along(DATA_AXES)
        if self.stack.mixes_examples is not None or num_parts == 1:
            return None
        size = tree_bytes(self.states.natural["params"])
        if size > MOST_BYTES:
            return (
                f"{name} was not tried for mixing the examples of a batch: its parameters take "
                f"{size_text(size)}, more than the {size_text(MOST_BYTES)} of one device for it."
            )
        few = few_examples(examples, self.batch_shapes)
        return refuse_mixing(name, self.stack, few, self.dtype)

    def _try_examples(self) -> None:
        if "examples" in self._done:
            return
        with in_arguments():
            note = self.check_examples("The model", self.examples)
        if note is not None:
            warnings.warn(note, stacklevel=3)

    @cached_property
    def _done(self) -> set[str]:
        """The names of what is tried or compiled already: "examples", "step", "loss"."""
        return set()

    def put(self, batch: Mapping[str, Any]) -> Tree:
        """Return a global batch on the devices of its step, unless it is there already.

        ConfigError: the batch has other names or shapes than the pipeline was made for.
        """
        shardings = self.engine.batch_shardings
        sharding_of = lambda a: a.sharding if isinstance(a, jax.Array) else None  # noqa: E731
        if isinstance(batch, Mapping) and all(
            key in batch and sharding_of(batch[key]) == each for key, each in shardings.items()
        ):
            return {key: batch[key] for key in shardings}
        arrays, rows = on_host(batch, self.batch_shapes, self.stack), list(self.engine.examples)
        return self.engine.put({name: a[rows] for name, a in arrays.items()})

    def to_natural(self, state: Tree) -> Tree:
        """Return a state in natural order, as in checkpoints: layers [L, ...] in model order."""
        self._state_checks.check(state)
        return self.engine.to_natural(state)

    def from_natural(self, state: Tree) -> Tree:
        """Return the pipeline's state of one in natural order."""
        check_natural(state, self.states.natural)
        state = jax.device_put(state, shardings_of(self.states.natural))
        return self._state_checks.remember(self.engine.from_natural(state))

    # its memory and time

    def memory(self) -> tuple[Mapping[str, int], ...]:
        """Return each rank's bytes a device by part: by shapes; "temporaries" once compiled."""
        return self.engine.memory()

    def programs(self) -> StepPrograms:
        """Return the traced programs of a step (jaxpr, StableHLO, HLO, collectives, transfers)."""
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
    model: Stack | Network,
    mesh: Mesh,
    schedule: request.AnySchedule = BASELINE,
    optimizer: optax.GradientTransformation | None = None,
    *,
    batch: Tree,
    num_microbatches: int | None = None,
    executor: str | Reference = "spmd",
    partition: str | Sequence[int] = "uniform",
    vocab: str = "whole",
    dtype: Any = jnp.float32,
    clip_norm: float | None = None,
    lr_schedule: optax.Schedule | None = None,
    seed: int = 0,
    num_layers: int | None = None,
    layers: str = "marks",
    **options: Any,
) -> Pipeline:
    """Return a model pipelined over a mesh; ConfigError or ScheduleError before any compiling.

    Args:
        model: A `Stack`, or a `Network`, cut into `num_layers` layers: layers="marks" | "auto".
        mesh: As `ppctl.mesh` makes it.
        schedule: The name of a family, `ppctl.family(...)`, a `Schedule`, or `Ticks`.
        num_microbatches: Of a step; required with a name, otherwise the schedule's.
        batch: {"inputs", "targets"}: a global batch, or its shapes and dtypes.
        optimizer: Of optax, for each parameter by itself; sees the author's tree, layer by layer.
        executor: spmd | mpmd | reference, or a value: `ppctl.spmd(...)`.
        partition: uniform | balanced (by FLOPs) | the number of layers of each stage.
        vocab: whole (embedding and head on first and last stage) | parallel (on all ranks).
        dtype: Of compute; parameters have the model's.
        clip_norm: Clip gradients by the global norm of the whole model; None: no clipping.
        lr_schedule, seed: The learning rate of a step, for the metrics; the default of `init`.
        options: Settings of the executor (remat, gather, ...) and of the schedule (num_chunks=2).
    """
    optimizer = check_parts(model, mesh, optimizer)
    # 1. the request: executor, batch, schedule, model
    seed, dtype = whole_number("seed", seed, 0), floating("dtype", dtype)
    clip_norm, num_microbatches = checked_numbers(clip_norm, num_microbatches)
    execution, knobs = execution_of(executor, mesh, options)
    shapes = request.shapes_of(batch)
    plan = request.schedule_for(schedule, mesh, num_microbatches, knobs, shapes)
    stack = request.layered_stack(model, batch, num_layers, layers, dtype)
    # 2. the order of tasks by their relative costs; layers on stages, stages on devices
    work = _work(stack, shapes, dtype, schedule, plan, vocab, execution)
    plan, lowered, execution, costs, costs_of_layers = work
    layers_of = request.partition_for(partition, stack.num_layers, plan, costs_of_layers)
    divided, shards, auto = request.divided(stack, execution, mesh, shapes)
    layout = Layout(mesh, layers_of, plan.rank_of, shards, auto)
    # 3. the state, and the engine that runs its steps
    on_layers = _on_layers(stack, layout, optim.clipped(optimizer, clip_norm), execution)
    states = States(layout, _initial(stack, on_layers), seed)
    shown = model_of(divided, states, shapes, plan.num_microbatches, execution, dtype)
    if execution.is_pipelined:
        request.check_split(stack, plan, layers_of, shown)
    how = on_layers, lr_schedule, execution, clip_norm, costs
    engine = make_engine(stack, shown, states, plan, lowered, shapes, *how)
    parts = states, on_layers, dtype, shapes, engine, shown, lr_schedule
    return Pipeline(stack, *work, *parts, few_examples(batch, shapes))


def _initial(stack: Stack, optimizer: LayerOptimizer) -> Callable[[int], Tree]:
    """Return the initial state by seed, in natural order."""
    return lambda seed: init_state(init(stack, seed), optimizer, stack.trainable)


def _on_layers(
    stack: Stack,
    layout: Layout,
    optimizer: optax.GradientTransformation,
    execution: Execution,
) -> LayerOptimizer:
    """Return the optimizer of the stack's trained parameters."""
    params = trained_part(jax.eval_shape(lambda: init(stack, 0)), stack.trainable)
    on_layers = LayerOptimizer(optimizer, params, layout)
    over_ranks = ["pp" in shard.axes for shard in layout.shards.values()]
    if execution.dispatches_tasks and any(over_ranks) and not on_layers.is_elementwise:
        raise ConfigError(
            "vocab=parallel divides embedding and head over the ranks, and with executor=mpmd each "
            "rank updates its part, but the optimizer needs whole parameters (norms, factors or "
            "products of them). Use vocab=whole, or executor=spmd."
        )
    return on_layers


def _work(
    stack: Stack,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    dtype: jnp.dtype,
    requested: request.AnySchedule,
    plan: Schedule,
    vocab: str,
    execution: Execution,
) -> tuple[Schedule, Ticks | None, Execution, Costs, Callable[[], RelativeCosts]]:
    """Return the schedule, with vocab=parallel on all ranks, and the next fields of `Pipeline`."""
    initial, recompute = jax.eval_shape(lambda: init(stack, 0)), execution.remat.recomputes
    checked_flags(initial, stack.trainable)
    relative = cache(lambda: relative_costs(stack, shapes, dtype, recompute=recompute))
    costs = task_costs(execution.remat, trained_share(initial["layers"], stack.trains("layers")))
    if vocab != "whole" or plan.divides_vocabulary:
        costs = relative().with_parts(costs)
    if vocab != "whole":
        plan = request.divided_vocabulary(plan, vocab, requested, execution, costs)
    execution = replace(execution, axes=request.with_vocabulary_of(plan, execution))
    lowered = requested if isinstance(requested, Ticks) else None
    if lowered is not None:
        check_lowering(lowered, execution)
    elif execution.in_ticks:
        lowered = ticks(plan, costs, execution.remat)
    of_stages = (lambda: relative().without_embed_head) if plan.divides_vocabulary else relative
    return plan, lowered, execution, costs, of_stages
