"""One rank's tasks of a step on one device: what other ranks would send stands in, and nothing is sent."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ppctl.executors.compiler_preset import cpu_options, temp_bytes
from ppctl.executors.mpmd.plan import Key, PlanEntry, ProgramId, last_uses
from ppctl.executors.mpmd.rank import GradientPrograms, RankRole, prepare_rank
from ppctl.executors.mpmd.tasks import Model
from ppctl.model.trainable import trained_part
from ppctl.planner.stand_ins import alone
from ppctl.planner.timing import Timing, median, random_like, timed_at_once
from ppctl.training.job import TrainingJob
from ppctl.training.optim import global_norm
from ppctl.training.train_step import apply_gradients

Tree = Any
NUMBERS = ("m", "part")  # int32 scalars that programs are given


@dataclass(frozen=True)
class RankTimes:
    """The seconds of a rank's part of a step on this device, and the temporary memory of its tasks.

    Of ranks that share cores: while as many of them run at the same time as there are cores.
    """

    tasks: Timing  # all its tasks, one after the other, or the ticks that they stand in
    update: Timing  # the norm of its gradients, the optimizer
    task_s: dict[tuple[int, str], float]  # of (stage, kind), so that what the rank runs adds up to `tasks`
    temp_bytes: int  # of the task that needs most


class RankOnDevice:
    """A rank's tasks, compiled for one device, and the values that they start from.

    prepare: the entry of the program that makes the rank ready; of it only the shapes are taken. entries: the rank's
    tasks in order. batch: the device's examples, as `examples_of_device` gives them. copies: of the rank, which run at
    the same time.
    """

    def __init__(
        self,
        job: TrainingJob,
        here: RankRole,
        prepare: PlanEntry,
        entries: Sequence[PlanEntry],
        batch: Mapping[str, Any],
        copies: int = 1,
    ):
        pipe, model = job.pipe, replace(job.pipe.model, layer_specs=None)  # one device has whole layers
        self.device = pipe.mesh.devices.flat[0]
        self.entries, self.model = entries, model
        self.library = GradientPrograms(model, {})
        self.options = dict(pipe.execution.xla_flags)
        self.has_presets = pipe.execution.dispatches_tasks and self.device.platform == "cpu"
        self.freed = last_uses(entries, keep=set(_lasting(prepare, entries)))
        shapes = self._shapes(here, prepare, batch)
        self.arriving = {name: random_like(shape) for name, shape in self._shapes_arriving.items()}
        self.programs = self._compiled(shapes)
        examples = {key: jax.device_put(batch[key[0]], self.device) for key in shapes if key[0] in batch}
        self.values = [{key: self._filled(key, a) for key, a in shapes.items()} | examples for _ in range(copies)]
        self.update, self.states = self._update(job, pipe.engine.share(prepare.rank), copies)

    def times(self, runs: int) -> RankTimes:
        """Return medians over so many runs, after one that warms up."""
        by_task: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
        before_s = 0.0  # of what joins the values of all parts, for the task behind it

        def watched(entry: PlanEntry, call: Callable[..., Sequence], values: Sequence) -> Sequence:
            nonlocal before_s
            began = time.perf_counter()
            written = jax.block_until_ready(call(*values))
            before_s += time.perf_counter() - began
            if entry.task is not None:
                by_task[entry.task.stage, entry.task.kind].append(before_s)
                before_s = 0.0
            return written

        self._run(0)
        tasks = median([self._at_once(self._run) for _ in range(runs)])
        self._run(0, watched)
        update = median([self._at_once(self._run_update) for _ in range(runs + 1)][1:])
        alone = {which: statistics.median(seconds) for which, seconds in by_task.items()}
        longer = tasks.wall_s / sum(alone[which] * len(by_task[which]) for which in alone)
        temps = max(map(temp_bytes, self.programs.values()))
        return RankTimes(tasks, update, {which: s * longer for which, s in alone.items()}, temps)

    def _at_once(self, run: Callable[[int], None]) -> Timing:
        return timed_at_once([partial(run, copy) for copy in range(len(self.values))])

    def _run(self, copy: int, watched: Callable[..., Sequence] | None = None) -> None:
        kept = self.values[copy]
        values = dict(kept)
        for entry, drop in zip(self.entries, self.freed, strict=True):
            program = self.programs[_id(entry)]
            read = [values[key] if key in values else _arrived(self._stand_in(key)) for key in entry.reads]
            written = program(*read) if watched is None else watched(entry, program, read)
            del read
            values.update(zip(entry.writes, written, strict=True))
            for key in drop:
                values.pop(key, None)
        self.values[copy] = jax.block_until_ready({key: values[key] for key in kept})

    def _stand_in(self, key: Key) -> jax.Array:
        """Return what stands in for a value that another rank sends."""
        return self.arriving[key[0] if key[0] in self.arriving else "x"]

    @cached_property
    def _shapes_arriving(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of what other ranks send: activations and gradients "x", of a vocabulary in parts log sums."""
        model, parts = self.model, self.model.stack.parts
        if parts is None:
            return {"x": model.x}
        part = jax.ShapeDtypeStruct((), jnp.int32)
        sums, _ = model.traced(lambda: jax.eval_shape(parts.log_sums, model.computed(model.ends), model.x, part))
        return {"x": model.x, "log_sums": sums, "all_log_sums": sums}

    def _run_update(self, copy: int) -> None:
        self.states[copy] = jax.block_until_ready(self.update(*self.states[copy]))

    def _shapes(self, here: RankRole, prepare: PlanEntry, batch: Mapping[str, Any]) -> dict[Key, Tree]:
        """Return the shapes of what a rank's tasks start from."""
        model, program = self.model, _id(prepare)
        ends = model.keep(model.ends, model.used_by(here.has_first, here.has_last))
        params = {"ends": ends, "layers": staged_layers(model, here)}
        whole = jax.tree.map(lambda _: P(), params)
        made = model.traced(lambda: jax.eval_shape(partial(prepare_rank, model, here, program, whole), params))
        read = {key for entry in self.entries for key in entry.reads}
        given: dict[Key, Tree] = dict(zip(prepare.writes, made, strict=True))
        for key in read:
            if key[0] in batch:
                given[key] = jax.ShapeDtypeStruct(batch[key[0]].shape, batch[key[0]].dtype)
        return given | {key: jax.ShapeDtypeStruct((), jnp.int32) for key in read if key[0] in NUMBERS}

    def _filled(self, key: Key, shape: Tree) -> Tree:
        if key[0] in NUMBERS:
            return jax.device_put(jnp.int32(key[-1]), self.device)
        if key[0] in ("w", "ends_in", "ends_out", "ends"):
            return jax.device_put(random_like(shape), self.device)
        return jax.device_put(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shape), self.device)

    def _compiled(self, given: dict[Key, Tree]) -> dict[ProgramId, jax.stages.Compiled]:
        """Return the programs of the tasks, compiled in threads."""
        shapes, lowered = dict(given), dict[ProgramId, jax.stages.Lowered]()
        written: dict[ProgramId, Tree] = {}
        for entry in self.entries:
            program = _id(entry)
            if program not in lowered:
                donated = self.library.donated(program)
                function = alone(self.library.function(program), self.model.axes)
                donate = [i for i, name in enumerate(program.reads) if name in donated]
                arriving = self._shapes_arriving
                reads = [shapes.get(key, arriving.get(key[0], arriving["x"])) for key in entry.reads]
                lowered[program] = jax.jit(function, donate_argnums=donate).lower(*reads)
                written[program] = jax.tree.map(
                    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), lowered[program].out_info
                )
            shapes.update(zip(entry.writes, written[program], strict=True))

        def compiled(program: ProgramId) -> jax.stages.Compiled:
            preset = cpu_options(self.library.preset(program)) if self.has_presets else {}
            return lowered[program].compile(preset | self.options)

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return dict(zip(lowered, threads.map(compiled, lowered), strict=True))

    def _update(self, job: TrainingJob, shapes: Tree, copies: int) -> tuple[Callable[..., Tree], list[Tree]]:
        """Return the update of a device's share of the state, and what each copy of it takes: state and gradients."""
        optimizer = job.pipe.optimizer

        def update(state: Tree, grads: Tree) -> tuple[Tree, Tree]:
            return apply_gradients(optimizer, state, grads, global_norm(grads)), grads

        zeros = lambda tree: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)  # noqa: E731
        trained = trained_part(shapes["params"], job.pipe.stack.trainable)
        states = [jax.device_put((zeros(shapes), zeros(trained)), self.device) for _ in range(copies)]
        return jax.jit(update, donate_argnums=(0, 1)).lower(*states[0]).compile(self.options or None), states


def staged_layers(model: Model, here: RankRole) -> Tree:
    """Return the shapes of a rank's layers in staged form, [V, 1, K, ...]."""
    stacked = (len(here.stages), 1, here.num_layer_slots)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((*stacked, *a.shape), a.dtype), model.layer)


def _lasting(prepare: PlanEntry, entries: Sequence[PlanEntry]) -> list[Key]:
    """Return the keys of values that outlast the tasks: what they start from."""
    read = (key for entry in entries for key in entry.reads)
    return [*prepare.writes, *(key for key in read if key[0] in ("inputs", "targets", *NUMBERS))]


def _id(entry: PlanEntry) -> ProgramId:
    assert entry.program is not None, "moves have none"
    return entry.program


@jax.jit
def _arrived(a: jax.Array) -> jax.Array:
    """Return a copy, as a transfer writes one."""
    return jnp.copy(a)
