"""One rank's tasks of a step on one device, with stand-ins for received values."""

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ppctl.errors import ConfigError
from ppctl.executors.compiler_options import temp_bytes
from ppctl.executors.model_shapes import Model
from ppctl.executors.mpmd.dispatch_plan import Key, PlanEntry, ProgramId, last_uses
from ppctl.executors.mpmd.plan_values import value_kind
from ppctl.executors.mpmd.program_library import ProgramLibrary
from ppctl.executors.mpmd.rank_programs import RankRole, prepare_rank
from ppctl.executors.outer_layers import computed, keep
from ppctl.executors.spmd.spmd_program import rank_arrays, spmd_of_rank
from ppctl.executors.stage.jaxpr_tools import bind_eqn, called_program, interpret, retraced
from ppctl.executors.stage.layer_programs import zeros_like
from ppctl.model.parallel import StageAxes
from ppctl.model.trainable_parameters import trained_part
from ppctl.planner.rehearsal.timed_runs import Timing, median, random_like, timed
from ppctl.training.pipeline.job import TrainingJob
from ppctl.training.pipeline.optimizers import apply_gradients, global_norm

Tree = Any
# by primitive, the parameters that hold jaxprs
BODIES = {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}


class Replicas:
    """Devices that all run the same program at the same time, each on separate values."""

    def __init__(self, devices: Sequence[Any]):
        self.number = len(devices)
        self.mesh = Mesh(np.array(devices), ("replica",))
        self.sharding = NamedSharding(self.mesh, P())

    def put(self, tree: Tree) -> Tree:
        """Return the values, copied to each device."""
        return jax.device_put(tree, self.sharding)

    def lowered(
        self, function: Callable[..., Tree], args: Sequence[Tree], donated: Sequence[int] = ()
    ) -> jax.stages.Lowered:
        """Return the function lowered for each device; args: values or shapes."""
        each = jax.shard_map(function, mesh=self.mesh, in_specs=P(), out_specs=P(), check_vma=False)
        return jax.jit(each, in_shardings=self.sharding, donate_argnums=donated).lower(*args)

    def timed(self, call: Callable[[], Tree], runs: int) -> Timing:
        """Return the median time of `runs` calls on all devices after a first one, CPU a device."""
        wall_s, cpu_s = median([timed(call)[1] for _ in range(runs + 1)][1:])
        return Timing(wall_s, cpu_s / self.number)


class RankPart(NamedTuple):
    """A rank's role, its tasks in order, and the entry that prepares its weights (for shapes)."""

    role: RankRole
    prepare: PlanEntry
    entries: Sequence[PlanEntry]


@dataclass(frozen=True)
class RankTimes:
    """The seconds of a rank's part of a step, and the temporary memory of its tasks.

    Simulated devices share cores, so ranks that run together are slower than one that runs by
    itself. So a rank is timed twice: on one device, and on several (`Replicas`) at the same time.
    CPU seconds are those of one device.
    """

    alone: Timing  # time of all tasks in order, or of all ticks, on one device
    at_once: Timing  # time of the same program on all replicas at the same time
    replicas: int  # number of replicas
    update: Timing  # time of gradient norm and optimizer, on all replicas at the same time
    task_s: dict[tuple[int, str], float]  # seconds by (stage, kind); a step's tasks sum to `alone`
    temp_bytes: int  # temporary bytes of the largest task

    @property
    def capacity(self) -> float:
        """Return the number of such ranks that the cores run at the same time at full speed."""
        return max(1.0, self.replicas * self.alone.wall_s / self.at_once.wall_s)

    def cpu_s(self, at_once: float) -> float:
        """Return the CPU seconds of the rank's tasks while on average `at_once` ranks run.

        Waiting threads of XLA take CPU seconds too, and the running ranks share these. So a rank
        takes a + b / at_once; a and b follow from the two timings.
        """
        if self.replicas == 1:
            return self.alone.cpu_s
        b = (self.alone.cpu_s - self.at_once.cpu_s) / (1 - 1 / self.replicas)
        return self.alone.cpu_s - b * (1 - 1 / at_once)


class RankOnDevice:
    """A rank's tasks, compiled for replicas, and their initial values.

    batch: a device's share of a batch, see `examples_of_device`.
    """

    def __init__(self, job: TrainingJob, part: RankPart, batch: Mapping[str, Any], on: Replicas):
        # 1. tasks, and the shapes of their initial values
        pipe, (role, prepare, entries) = job.pipe, part
        stack = pipe.model.stack.without_keys()  # random numbers are not timed
        self.model = replace(pipe.model, stack=stack, layer_specs=None)  # layers already gathered
        self.on, self.entries = on, entries
        self.library = ProgramLibrary(self.model, {})
        self.options = dict(job.pipe.execution.xla_flags)
        read = (key for entry in entries for key in entry.reads)
        given = {key for key in read if value_kind(key[0]).form in ("batch", "number")}
        self.freed = last_uses(entries, keep={*prepare.writes, *given})
        shapes = self._shapes(role, prepare, batch)

        # 2. programs and values
        stand_ins = self._shapes_arriving.items()
        self.arriving = {name: on.put(random_like(shape)) for name, shape in stand_ins}
        self.programs = self._compiled(shapes)
        examples = {key: on.put(batch[key[0]]) for key in shapes if key[0] in batch}
        self.values = {key: self._filled(key, a) for key, a in shapes.items()} | examples

    def times(self, runs: int) -> tuple[Timing, dict[tuple[int, str], float]]:
        """Return the median time of all tasks over `runs` runs, and the seconds by (stage, kind).

        Tasks are timed singly in one more run, and scaled so that they sum to the median.
        """
        by_task: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
        before_s = 0.0  # seconds of joins of vocabulary parts, counted in the next task

        def watched(entry: PlanEntry, call: Callable[..., Sequence], values: Sequence) -> Sequence:
            nonlocal before_s
            began = time.perf_counter()
            written = jax.block_until_ready(call(*values))
            before_s += time.perf_counter() - began
            if entry.task is not None:
                by_task[entry.task.stage, entry.task.kind].append(before_s)
                before_s = 0.0
            return written

        tasks = self.on.timed(self._run, runs)
        self._run(watched)
        alone = {which: statistics.median(seconds) for which, seconds in by_task.items()}
        longer = tasks.wall_s / sum(alone[which] * len(by_task[which]) for which in alone)
        return tasks, {which: s * longer for which, s in alone.items()}

    @property
    def temp_bytes(self) -> int:
        """Return the temporary bytes of the largest task."""
        return max(map(temp_bytes, self.programs.values()))

    def _run(self, watched: Callable[..., Sequence] | None = None) -> None:
        values = dict(self.values)
        for entry, drop in zip(self.entries, self.freed, strict=True):
            program = self.programs[_id(entry)]
            stand_ins = (self.arriving.get(key[0], self.arriving["x"]) for key in entry.reads)
            pairs = zip(entry.reads, stand_ins, strict=True)
            read = [values[key] if key in values else _arrived(a) for key, a in pairs]
            written = program(*read) if watched is None else watched(entry, program, read)
            del read
            values.update(zip(entry.writes, written, strict=True))
            for key in drop:
                values.pop(key, None)
        self.values = jax.block_until_ready({key: values[key] for key in self.values})

    @cached_property
    def _shapes_arriving(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of received values: activations or gradients ("x"), and log sums."""
        model, parts = self.model, self.model.parts
        if parts is None:
            return {"x": model.x}
        args = computed(model.embed_head, model.dtype), model.x, jax.ShapeDtypeStruct((), jnp.int32)
        sums, _ = model.traced(lambda: jax.eval_shape(parts.log_sums, *args))
        return {"x": model.x, "log_sums": sums, "all_log_sums": sums}

    def _shapes(
        self, here: RankRole, prepare: PlanEntry, batch: Mapping[str, Any]
    ) -> dict[Key, Tree]:
        """Return the shapes of the initial values of a rank's tasks."""
        model, program = self.model, _id(prepare)
        embed_head = keep(model.embed_head, model.outer.used_by(here.has_first, here.has_head))
        params = {"embed_head": embed_head, "layers": staged_layers(model, here)}
        made = partial(prepare_rank, model, here, program, jax.tree.map(lambda _: P(), params))
        written = model.traced(lambda: jax.eval_shape(made, params))
        given: dict[Key, Tree] = dict(zip(prepare.writes, written, strict=True))
        for key in {key for entry in self.entries for key in entry.reads}:
            if key[0] in batch:
                given[key] = jax.ShapeDtypeStruct(batch[key[0]].shape, batch[key[0]].dtype)
            elif value_kind(key[0]).form == "number":
                given[key] = jax.ShapeDtypeStruct((), jnp.int32)
        return given

    def _filled(self, key: Key, shape: Tree) -> Tree:
        if value_kind(key[0]).form == "number":
            return self.on.put(jnp.int32(key[-1]))
        return self.on.put((random_like if key[0] in ("w", "embed_head") else zeros_like)(shape))

    def _compiled(self, given: dict[Key, Tree]) -> dict[ProgramId, jax.stages.Compiled]:
        # 1. lower in order: later tasks read the shapes of earlier results
        shapes, lowered = dict(given), dict[ProgramId, jax.stages.Lowered]()
        written, arriving = dict[ProgramId, Tree](), self._shapes_arriving
        for entry in self.entries:
            program = _id(entry)
            if program not in lowered:
                donated = self.library.donated(program)
                function = alone(self.library.function(program), self.model.axes)
                donate = [i for i, name in enumerate(program.reads) if name in donated]
                reads = [shapes.get(k, arriving.get(k[0], arriving["x"])) for k in entry.reads]
                lowered[program] = self.on.lowered(function, reads, donate)
                written[program] = jax.tree.map(
                    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), lowered[program].out_info
                )
            shapes.update(zip(entry.writes, written[program], strict=True))

        # 2. compile in threads
        def compiled(program: ProgramId) -> jax.stages.Compiled:
            return lowered[program].compile(self.options)

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return dict(zip(lowered, threads.map(compiled, lowered), strict=True))


def time_update(job: TrainingJob, part: RankPart, runs: int, on: Replicas) -> Timing:
    """Return the median time of the optimizer's update of a device's share of the state."""
    optimizer, of_rank = job.pipe.optimizer, {"layer_in_slot": part.role.layer_in_slot}

    def update(state: Tree, grads: Tree) -> tuple[Tree, Tree]:
        norm = global_norm(grads)
        return apply_gradients(optimizer, state, grads, norm, **of_rank), grads

    shapes = job.pipe.engine.share(part.prepare.rank)
    trained = trained_part(shapes["params"], job.pipe.stack.options.trainable)
    values = on.put((zeros_like(shapes), zeros_like(trained)))
    program = on.lowered(update, values, (0, 1)).compile(dict(job.pipe.execution.xla_flags))

    def run() -> None:
        nonlocal values
        values = jax.block_until_ready(program(*values))

    return on.timed(run, runs)


def time_in_ticks(
    job: TrainingJob, part: RankPart, batch: Mapping[str, Any], runs: int, on: Replicas
) -> Timing:
    """Return the median time of the rank's ticks."""
    pipe, model = job.pipe, replace(job.pipe.model, layer_specs=None)  # layers already gathered
    assert pipe.ticks is not None, "executor=spmd runs in ticks"
    layers = staged_layers(model, part.role)
    params = random_like({"embed_head": model.embed_head, "layers": layers})
    of_rank = rank_arrays(pipe.layout, pipe.ticks, part.prepare.rank)
    arguments = on.put((params, dict(batch), *of_rank))
    function = alone(spmd_of_rank(model, pipe.layout, pipe.ticks), model.axes)
    program = on.lowered(function, arguments).compile(dict(pipe.execution.xla_flags))
    return on.timed(lambda: program(*arguments), runs)


def staged_layers(model: Model, here: RankRole) -> Tree:
    """Return the shapes of a rank's layers: [stages of the rank, 1, layer slots, ...]."""
    leading = len(here.stages), 1, here.num_layer_slots
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((*leading, *a.shape), a.dtype), model.layer)


def _id(entry: PlanEntry) -> ProgramId:
    assert entry.program is not None, "a move has no program"
    return entry.program


_arrived = jax.jit(jnp.copy)  # a copy of an array, as a transfer would write it


# One device of a divided stage, with stand-ins for the values that it receives from the others.
# A stand-in is made from local values, with the size and dtype of the received value: a gather
# writes as many bytes, a reduce-scatter adds as many. Sends do not run; callers predict their time.


def alone(function: Callable[..., Any], axes: StageAxes) -> Callable[..., Any]:
    """Return `function` of one device of a divided stage, with stand-ins for received values.

    Tracing it raises ConfigError for a collective without a stand-in.
    """
    if axes.num_devices == 1 and not axes.vocab_parts:
        return function

    def run(*args: Any) -> Any:
        closed, out = jax.make_jaxpr(function, axis_env=list(axes.sizes), return_shape=True)(*args)
        leaves = interpret(closed, jax.tree.leaves(args), _run_alone)
        return jax.tree.unflatten(jax.tree.structure(out), leaves)

    return run


def _run_alone(eqn: core.JaxprEqn, values: list[Any]) -> list[Any]:
    """Return the results of an equation, with stand-ins for received values."""
    name, called = eqn.primitive.name, called_program(eqn)
    if name in STAND_INS:
        each = zip(values or [None], eqn.outvars, strict=True)
        return [STAND_INS[name](value, eqn.params | {"received": v.aval}) for value, v in each]
    if called is not None:
        return interpret(called, values, _run_alone)
    if name in BODIES:
        bodies = {key: _without_sends(eqn.params[key]) for key in BODIES[name]}
        return bind_eqn(eqn, values, **bodies)
    if "axis_name" in eqn.params:
        raise ConfigError(
            "`ppctl rehearse` runs one device, and has no stand-in for values received by "
            f"{name}. Use `ppctl plan`, or a model that sends by all_gather, psum_scatter, "
            "all_to_all, psum, pmax and ppermute."
        )
    return bind_eqn(eqn, values)


def _without_sends(body: Any) -> Any:
    """Return a loop's jaxpr, or branches' jaxprs, with stand-ins for received values."""
    if isinstance(body, tuple):
        return tuple(map(_without_sends, body))
    return retraced(body, _run_alone)


# stand-ins; without the barriers, compilers would simplify the copies of local values away


def _gathered(value: jax.Array, params: dict[str, Any]) -> jax.Array:
    """Return the local values repeated for each device, every second copy reversed."""
    dim, value = params["all_gather_dimension"], jax.lax.optimization_barrier(value)
    if not params["tiled"]:
        value = jnp.expand_dims(value, dim)
    # reversed, because equal copies would compile to a view, which is never written
    turned = jax.lax.rev(value, (value.ndim - 1,))
    parts = [turned if i % 2 else value for i in range(params["axis_size"])]
    return jax.lax.optimization_barrier(jnp.concatenate(parts, dim))


def _sum_scattered(value: jax.Array, params: dict[str, Any]) -> jax.Array:
    """Return the sum of the local value's parts, one for each device."""
    dim, value = params["scatter_dimension"], jax.lax.optimization_barrier(value)
    parts = jnp.split(value, params["axis_size"], dim)
    total = sum(parts[1:], parts[0])
    return jax.lax.optimization_barrier(total if params["tiled"] else jnp.squeeze(total, dim))


def _exchanged(value: jax.Array, params: dict[str, Any]) -> jax.Array:
    """Return the local parts in place of the parts that other devices send."""
    split, concat = params["split_axis"], params["concat_axis"]
    number = value.shape[split] // params["received"].shape[split]
    parts = jnp.split(jax.lax.optimization_barrier(value), number, split)
    return jax.lax.optimization_barrier(jnp.concatenate(parts, concat))


def _own(value: jax.Array, params: dict[str, Any]) -> jax.Array:
    del params
    return jax.lax.optimization_barrier(value)


def _first(value: None, params: dict[str, Any]) -> jax.Array:
    """Return 0, the index of the first device along any axis."""
    del value, params
    return jax.lax.optimization_barrier(jax.lax.full((), 0, jnp.int32))


STAND_INS: dict[str, Callable[[Any, dict[str, Any]], jax.Array]] = {
    "all_gather": _gathered,
    "reduce_scatter": _sum_scattered,
    "all_to_all": _exchanged,
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "pmax", "ppermute"), _own),
    "axis_index": _first,
}
