"""A model pipelined over a mesh: the object that trains, whoever asks for it, the command line or a script.

`pipeline` checks a request and builds a `Pipeline`; the engine that runs it is made here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from ppctl.config import Mpmd as MpmdSettings
from ppctl.config import Reference as ReferenceSettings
from ppctl.config import Spmd as SpmdSettings
from ppctl.errors import ConfigError
from ppctl.executors.layout import Layout
from ppctl.executors.mesh import AXES
from ppctl.executors.mpmd.tasks import Model
from ppctl.executors.reference import reference
from ppctl.executors.spmd.memory import spmd_bytes
from ppctl.executors.spmd.program import Options, spmd
from ppctl.executors.stage.flops import RelativeCosts, relative_costs
from ppctl.executors.stage.traced_network import TracedNetwork, stack_of
from ppctl.model.network import Network
from ppctl.model.stack import Stack, init
from ppctl.schedule.costs import Costs, task_costs
from ppctl.schedule.families.registry import build
from ppctl.schedule.ir import Schedule, Task
from ppctl.schedule.partition.partition import Partition, explicit, uniform
from ppctl.schedule.remat import Remat
from ppctl.schedule.simulate import simulate
from ppctl.schedule.ticks import Ticks, forward_only, ticks
from ppctl.schedule.validate import validate
from ppctl.training import optim
from ppctl.training.engines import Engine, Footprint
from ppctl.training.engines.mpmd import Mpmd
from ppctl.training.engines.one_program import OneProgram
from ppctl.training.engines.post_validation import PostValidated
from ppctl.training.engines.programs import StepPrograms
from ppctl.training.engines.states import States
from ppctl.training.train_step import init_state

Tree = Any
EXECUTORS = {each.name: each for each in (SpmdSettings, MpmdSettings, ReferenceSettings)}


@dataclass(frozen=True)
class Execution:
    """How a schedule is run; nothing of it changes what is computed.

    remat: none | layer | full, what the backward recomputes. unroll: layers of a device that are unrolled up to this
    many, scanned above. idle (spmd): skip | compute, what a rank without a task does in a tick. gather (spmd): step |
    tick, how often parameters are gathered over fsdp. post_validation (mpmd): a rank updates before the global norm is
    known, and again if that was wrong.
    """

    executor: str = SpmdSettings.name
    remat: Remat = Remat.NONE
    unroll: int = SpmdSettings.unroll
    idle: str = SpmdSettings.idle
    gather: str = SpmdSettings.gather
    post_validation: bool = MpmdSettings.post_validation

    @property
    def is_pipelined(self) -> bool:
        return EXECUTORS[self.executor].IS_PIPELINED

    @property
    def in_ticks(self) -> bool:
        """Whether ranks run in lockstep, and a rank keeps all its stages padded to the largest."""
        return EXECUTORS[self.executor].IN_TICKS

    @property
    def dispatches_tasks(self) -> bool:
        """Whether each task is a program of its own that the host dispatches."""
        return EXECUTORS[self.executor].DISPATCHES_TASKS


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
    def num_parameters(self) -> int:
        return sum(a.size for a in jax.tree.leaves(self.states.natural["params"]))

    @cached_property
    def relative_costs(self) -> RelativeCosts:
        """What each layer, the embedding and the head cost, in layers, by FLOPs."""
        return relative_costs(self.stack, self.batch_shapes, recompute=self.execution.remat.recomputes)

    # training

    def init(self, seed: int | None = None) -> Tree:
        """Return the initial state: a function of the model and the seed alone, whatever the layout."""
        return self.engine.new_state(seed)

    def step(self, state: Tree, batch: Mapping[str, Any]) -> tuple[Tree, dict[str, jax.Array]]:
        """Return (next state, {"loss", "grad_norm"}), with "lr" where an lr_schedule was given.

        Compiled at the first call, unless `compile` did it. The state's memory is taken: use the returned one.
        """
        if "step" not in self._compiled:
            self.compile()
        return self.engine.step(state, self.put(batch))

    def loss(self, state: Tree, batch: Mapping[str, Any]) -> jax.Array:
        """Return the mean loss of a batch, by forwards alone."""
        if "loss" not in self._compiled:
            self.compile(evaluate=True)
        return self.engine.loss(state, self.put(batch))

    def loss_and_grads(self, state: Tree, batch: Mapping[str, Any]) -> tuple[jax.Array, Tree]:
        """Return (mean loss, gradients in natural order) of a batch; the state stays."""
        return self.engine.loss_and_grads(state, self.put(batch))

    def compile(self, *, evaluate: bool = False) -> Footprint:
        """Compile the train step, and with `evaluate` what `loss` runs; return what the step takes beside its state."""
        footprint = self.engine.compile(evaluate=evaluate)
        self._compiled.update({"step", "loss"} if evaluate else {"step"})
        return footprint

    @cached_property
    def _compiled(self) -> set[str]:
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
        return self.engine.put({name: np.asarray(batch[name])[mine] for name in self.batch_shapes})

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

        costs: seconds of tasks; None: equal stages with F = I = W, and what remat recomputes. None without a pipeline.
        """
        if not self.execution.is_pipelined:
            return None
        costs = task_costs(self.execution.remat) if costs is None else costs
        if self.ticks is not None:
            return self.ticks.bubble_fraction(costs)
        return simulate(self.schedule, costs).bubble_fraction


def pipeline(
    stack: Stack | Network,
    *,
    mesh: Mesh,
    schedule: str | Schedule | Ticks = "1f1b",
    num_microbatches: int | None = None,
    batch: Tree,
    optimizer: optax.GradientTransformation,
    executor: str = Execution.executor,
    remat: str = SpmdSettings.remat,
    partition: str | Sequence[int] = "uniform",
    dtype: Any = jnp.float32,
    clip_norm: float | None = None,
    lr_schedule: optax.Schedule | None = None,
    seed: int = 0,
    num_layers: int | None = None,
    layers: str = "marks",
    unroll: int = Execution.unroll,
    idle: str = Execution.idle,
    gather: str = Execution.gather,
    post_validation: bool = Execution.post_validation,
    **knobs: float,
) -> Pipeline:
    """Return a model pipelined over a mesh.

    Args:
        stack: A `Stack`, a built-in model (`ppctl.transformer`, `ppctl.mlp`), or a `Network`, any function of a batch,
            which is cut into `num_layers` layers at its marks (layers="marks") or by clustering (layers="auto").
        mesh: Axes dp, pp and fsdp, as `ppctl.mesh` makes it.
        schedule: The name of a family, with its knobs (num_chunks=2, ...) as further arguments; or a `Schedule` of
            one's own, validated here; or `Ticks`, a schedule lowered before.
        num_microbatches: Of a step; needed with a name, otherwise that of the schedule.
        batch: {"inputs", "targets"}: a global batch, or its shapes and dtypes.
        optimizer: Of optax. Clipping by the global norm goes into `clip_norm`, which is exact for every layout.
        executor: spmd (one XLA program) | mpmd (a program for each stage and kind of task) | reference (no pipeline).
        remat, unroll, idle, gather, post_validation: See `Execution`.
        partition: uniform | balanced (by FLOPs) | the number of layers of each stage.
        dtype: Of compute. Parameters have the model's.
        lr_schedule: Learning rate of a step, for the metrics.
        seed: Of `init` where it is given none.

    Raises:
        ConfigError, ScheduleError: The request is impossible, with values, equation and remedy; before any compiling.
    """
    execution = Execution(executor, Remat.of(remat), unroll, idle, gather, post_validation)
    _check_execution(execution, mesh)
    shapes = _shapes_of(batch)
    lowered = schedule if isinstance(schedule, Ticks) else None
    plan = _schedule_of(schedule, mesh.shape["pp"], num_microbatches, knobs)
    _check_batch_size(shapes, plan.num_microbatches, mesh)
    dtype = jnp.dtype(dtype)
    if isinstance(stack, Network):
        stack = _traced(stack, shapes, num_layers, layers, dtype)
    elif num_layers not in (None, stack.num_layers):
        raise ConfigError(f"num_layers={num_layers}, but the stack has {stack.num_layers} layers. Leave it out.")
    if execution.in_ticks and lowered is None:
        lowered = ticks(plan, task_costs(execution.remat), execution.remat)
    costs = lambda: relative_costs(stack, shapes, recompute=execution.remat.recomputes)  # noqa: E731
    layout = Layout(mesh, _partition_of(partition, stack.num_layers, plan, costs), plan.rank_of)
    optimizer = optim.clipped(optimizer, clip_norm)
    states = States(layout, lambda seed: init_state(init(stack, seed), optimizer), seed)
    optim.check_separable(optimizer, states.natural["params"], by_rank=execution.dispatches_tasks)
    model = _model(stack, states, shapes, plan.num_microbatches, execution, dtype)
    if execution.is_pipelined:
        _check_split(stack, plan, layout.partition, model)
    make = _mpmd if execution.dispatches_tasks else _one_program
    engine = make(model, states, plan, lowered, shapes, optimizer, lr_schedule, execution, clip_norm)
    return Pipeline(stack, plan, lowered, states, optimizer, dtype, shapes, execution, engine, model, lr_schedule)


# --- what a request must be ------------------------------------------------------------------------------------------


def _check_execution(execution: Execution, mesh: Mesh) -> None:
    choices = {
        "executor": tuple(EXECUTORS),
        "idle": SpmdSettings.IDLE,
        "gather": SpmdSettings.GATHER,
    }
    for name, allowed in choices.items():
        if getattr(execution, name) not in allowed:
            raise ConfigError(f"{name}={getattr(execution, name)} is not one of {', '.join(allowed)}.")
    of_spmd = [f"{name}={value}" for name, value in (("idle", execution.idle), ("gather", execution.gather))]
    ignored = [each for each in of_spmd if each not in ("idle=skip", "gather=step") and not execution.in_ticks]
    if execution.post_validation and not execution.dispatches_tasks:
        ignored.append("post_validation=True")
    if ignored:
        raise ConfigError(f"{', '.join(ignored)} does not apply to executor={execution.executor}. Leave it out.")
    if tuple(mesh.axis_names) != AXES:
        raise ConfigError(f"The mesh has axes {mesh.axis_names}, not {AXES}. Make it with ppctl.mesh(dp=, pp=, fsdp=).")
    if not execution.is_pipelined and mesh.size > 1:
        raise ConfigError(
            f"executor=reference is the un-pipelined model on one device, but the mesh has {mesh.size}. Use "
            "ppctl.mesh(), executor=spmd or executor=mpmd."
        )


def _shapes_of(batch: Tree) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and dtypes of a global batch."""
    if not isinstance(batch, Mapping) or not {"inputs", "targets"} <= set(batch):
        found = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise ConfigError(f'batch is {found}; it must be {{"inputs": [batch, ...], "targets": [batch, ...]}}.')
    shapes = {name: jax.ShapeDtypeStruct(batch[name].shape, batch[name].dtype) for name in ("inputs", "targets")}
    sizes = {name: a.shape[:1] for name, a in shapes.items()}
    if sizes["inputs"] != sizes["targets"] or not sizes["inputs"]:
        raise ConfigError(
            f"inputs {shapes['inputs'].shape} and targets {shapes['targets'].shape} differ in batch size."
        )
    return shapes


def check_batch(batch: Mapping[str, Any], shapes: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raise ConfigError where a batch has other names or shapes than these."""
    found = {name: tuple(np.shape(batch[name])) for name in shapes if name in batch}
    expected = {name: a.shape for name, a in shapes.items()}
    if found != expected:
        raise ConfigError(f"The batch has shapes {found}, but the pipeline was made for {expected}.")


def _schedule_of(
    schedule: str | Schedule | Ticks, num_ranks: int, num_microbatches: int | None, knobs: Mapping[str, float]
) -> Schedule:
    if isinstance(schedule, str):
        if num_microbatches is None:
            raise ConfigError(f"schedule={schedule} needs num_microbatches, such as {2 * num_ranks}.")
        return build(schedule, num_ranks, num_microbatches, **knobs)
    plan = schedule.schedule if isinstance(schedule, Ticks) else validate(schedule)
    if knobs:
        raise ConfigError(
            f"{', '.join(knobs)}: knobs of a named schedule, but {plan.name} is made already. Leave it out."
        )
    if num_microbatches not in (None, plan.num_microbatches):
        raise ConfigError(
            f"num_microbatches={num_microbatches}, but the schedule has {plan.num_microbatches}. Leave it out."
        )
    if plan.num_ranks != num_ranks:
        raise ConfigError(
            f"The mesh has pp={num_ranks}, but the schedule has {plan.num_ranks} ranks. Use pp={plan.num_ranks}."
        )
    return plan


def _check_batch_size(shapes: Mapping[str, jax.ShapeDtypeStruct], num_microbatches: int, mesh: Mesh) -> None:
    size, dp, fsdp = shapes["inputs"].shape[0], mesh.shape["dp"], mesh.shape["fsdp"]
    multiple = num_microbatches * dp * fsdp
    if size % multiple:
        raise ConfigError(
            f"batch size {size} is not a multiple of num_microbatches*dp*fsdp = {num_microbatches}*{dp}*{fsdp} = "
            f"{multiple}. Use {-(-size // multiple) * multiple}, or fewer microbatches."
        )


def _traced(
    network: Network, shapes: Mapping[str, jax.ShapeDtypeStruct], num_layers: int | None, layers: str, dtype: jnp.dtype
) -> Stack:
    if num_layers is None:
        raise ConfigError("A Network needs num_layers: one more than its stage_boundary marks, or any (layers=auto).")
    if layers not in ("marks", "auto"):
        raise ConfigError(f"layers={layers} is not one of marks, auto.")
    inputs = jax.ShapeDtypeStruct((2, *shapes["inputs"].shape[1:]), shapes["inputs"].dtype)
    wide = jnp.promote_types(dtype, jnp.float32)  # of parameters
    return stack_of(TracedNetwork(network, num_layers, auto=layers == "auto", inputs=inputs, dtype=wide, compute=dtype))


def _partition_of(
    partition: str | Sequence[int], num_layers: int, schedule: Schedule, costs: Callable[[], RelativeCosts]
) -> Partition:
    if partition == "uniform":
        return uniform(num_layers, schedule.num_stages)
    if partition == "balanced":
        return costs().balanced(schedule.rank_of)
    if isinstance(partition, str):
        raise ConfigError(f"partition={partition} is not one of uniform, balanced, or the layers of each stage.")
    return explicit(num_layers, schedule.num_stages, partition)


def _check_split(stack: Stack, schedule: Schedule, partition: Partition, model: Model) -> None:
    """Raise ConfigError for the first stage whose backward the schedule splits, where the layer's cannot be."""
    stages = sorted({task.stage for rank in schedule.ranks for task in rank if task.kind == "I"})
    for s in stages:
        held = partition[s]
        if not held:
            continue
        try:
            for l in held:
                _ = model.stage.layers[0 if stack.are_alike else l].split
        except ConfigError as error:
            which = f"layer {held[0]}" if len(held) == 1 else f"layers {held[0]}-{held[-1]}"
            raise ConfigError(f"stage {s} ({which}): {error}") from error
        if stack.are_alike:
            return  # all stages run the same layer


# --- engines ---------------------------------------------------------------------------------------------------------


def _model(
    stack: Stack, states: States, shapes: Tree, num_microbatches: int, execution: Execution, dtype: jnp.dtype
) -> Model:
    """Return the model as the tasks of one device see it."""
    params, mesh = states.natural["params"], states.layout.mesh
    layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), params["layers"])
    size = shapes["inputs"].shape[0] // (mesh.shape["dp"] * mesh.shape["fsdp"] * num_microbatches)
    microbatch = jax.tree.map(lambda a: jax.ShapeDtypeStruct((size, *a.shape[1:]), a.dtype), shapes)
    return Model(stack, params["ends"], layer, microbatch, num_microbatches, execution.remat, execution.unroll, dtype)


def _one_program(
    model: Model,
    states: States,
    schedule: Schedule,
    lowered: Ticks | None,
    shapes: Tree,
    optimizer: optax.GradientTransformation,
    lr_schedule: optax.Schedule | None,
    execution: Execution,
    clip_norm: float | None,
) -> OneProgram:
    """Return the engine of executor=spmd, and of executor=reference."""
    del clip_norm  # the optimizer does it
    stack, dtype, layout = model.stack, model.dtype, states.layout
    if lowered is None:
        of = partial(
            reference,
            stack,
            num_microbatches=schedule.num_microbatches,
            remat=execution.remat,
            unroll=execution.unroll,
            dtype=dtype,
        )
        gradients, loss = (_on_staged(of(with_grads=flag), layout) for flag in (True, False))
        return OneProgram(states, shapes, gradients, loss, optimizer, lr_schedule)
    options = Options(
        remat=execution.remat,
        skip_idle=execution.idle != "compute",
        gather_each_tick=execution.gather == "tick",
        unroll=execution.unroll,
        dtype=dtype,
    )
    evaluation = ticks(forward_only(schedule), task_costs(execution.remat), execution.remat)
    gradients, loss = spmd(stack, layout, lowered, options), spmd(stack, layout, evaluation, options)
    held = spmd_bytes(model, layout, lowered)
    return OneProgram(states, shapes, gradients, loss, optimizer, lr_schedule, held)


def _mpmd(
    model: Model,
    states: States,
    schedule: Schedule,
    lowered: Ticks | None,
    shapes: Tree,
    optimizer: optax.GradientTransformation,
    lr_schedule: optax.Schedule | None,
    execution: Execution,
    clip_norm: float | None,
) -> Mpmd | PostValidated:
    """Return the engine of executor=mpmd. The host dispatches tasks in the order in which the simulator starts them."""
    assert lowered is None, "ranks run freely"
    training, evaluation = (
        (each, dispatch_order(each, execution.remat)) for each in (schedule, forward_only(schedule))
    )
    engine = Mpmd(states, shapes, model, (training, evaluation), optimizer, lr_schedule)
    if not execution.post_validation:
        return engine
    return PostValidated(engine, partial(optim.needs_no_clipping, max_norm=clip_norm))


def dispatch_order(schedule: Schedule, remat: Remat) -> list[Task]:
    """Return the tasks by their start on free-running ranks; a task comes after those that it reads from."""
    start_s = simulate(schedule, task_costs(remat)).start_s  # in an order that ranks can run: ties keep it
    return sorted(start_s, key=start_s.__getitem__)


def _on_staged(loss_and_grads: Callable, layout: Layout) -> Callable:
    """Return the reference, which knows layers in natural order only, on staged parameters."""

    def function(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        loss, grads = loss_and_grads(layout.to_natural(params), batch)
        return loss, None if grads is None else layout.to_staged(grads)

    return function
