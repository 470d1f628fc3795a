"""Programs on submeshes: traced and lowered once for all ranks, compiled in threads, dispatched by the host.

A program is lowered for an abstract submesh and compiled for the devices of each rank that runs it. JAX has no public
way to load one executable on other devices, so ranks share the trace, and the stages of one rank the executable. For
devices that are described only (`plan.topology`) each program is compiled once, and nothing can run.

Several processes walk the same plan. Each program takes the turn that the program before it on its rank made, so that
every device runs its programs in the order of the plan; docs/executors-internals.md, "The turns of mpmd", proves that
then nothing stands still.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ppctl.executors.auto_axes import is_spec, without_axes
from ppctl.executors.compiler_preset import cpu_options, temp_bytes
from ppctl.executors.mpmd.library import ProgramLibrary, written_specs
from ppctl.executors.mpmd.plan import Key, PlanEntry, ProgramId, last_uses
from ppctl.executors.mpmd.transfers import (
    TURN,
    Part,
    copy_across,
    crossing,
    each_its_own,
    is_mine,
    local_zeros,
    lower_crossing,
    pair_mesh,
    parts_of,
    processes,
)
from ppctl.executors.spmd.memory import shard_bytes
from ppctl.executors.topology import is_described
from ppctl.schedule.ir import Task

Tree = Any
MOST_STARTED = 32  # programs of a device that XLA has under way on CPU


@dataclass(frozen=True)
class Walk:
    """A compiled plan: of each entry of this process (call, slots read, slots written, slots freed).

    Values that none of its devices holds are None.
    """

    entries: tuple[PlanEntry, ...]
    steps: tuple[tuple[Callable[..., Sequence], tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]
    slots: Mapping[Key, int]
    given: tuple[Key, ...]
    kept: tuple[Key, ...]
    shapes: Mapping[Key, Tree]  # of what is kept
    held: tuple[Mapping[str, int], ...]  # of each rank as `Runtime.memory_breakdown`; empty for other processes'

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """For each rank the bytes of one device: values and temporaries, without the values given."""
        return tuple(sum(held.values()) for held in self.held)

    def run(self, given: Mapping[Key, Tree]) -> dict[Key, Tree]:
        """Return the values to keep, from those given; when all is dispatched, not when it is done."""
        values: list[Any] = [None] * len(self.slots)
        for key in self.given:
            values[self.slots[key]] = given[key]
        for call, reads, writes, freed in self.steps:
            results = call(*[values[i] for i in reads])
            for i, result in zip(writes, results, strict=True):
                values[i] = result
            results = None
            for i in freed:
                values[i] = None
        return {key: values[self.slots[key]] for key in self.kept}

    def timed(self, seconds: dict[Task, float]) -> Walk:
        """Return the same walk, one program at a time; its runs put the seconds of each task into `seconds`."""

        def waiting(entry: PlanEntry, call: Callable[..., Sequence]) -> Callable[..., Sequence]:
            def run(*values: Tree) -> Sequence:
                began = time.perf_counter()
                results = jax.block_until_ready(call(*values))
                if entry.program is not None and entry.task is not None:
                    seconds[entry.task] = time.perf_counter() - began
                return results

            return run

        steps = tuple(
            (waiting(entry, call), *rest) for entry, (call, *rest) in zip(self.entries, self.steps, strict=True)
        )
        return replace(self, steps=steps)

    @cached_property
    def programs(self) -> list[list[tuple[str, Task | None]]]:
        """For each rank its programs in order: name of the compiled module, and the task if it is one."""
        ranks = range(len(self.peak_bytes))
        return [[(f"jit_{o.program.kind}", o.task) for o in self.entries if o.program and o.rank == r] for r in ranks]


class Runtime:
    """The submeshes of the ranks, all of one shape, and the programs that run on them."""

    def __init__(self, submeshes: Sequence[Mesh], programs: ProgramLibrary, options: Mapping[str, Any] | None = None):
        self.submeshes, self.programs, self.options = submeshes, programs, dict(options or {})
        one = submeshes[0]
        self.abstract = AbstractMesh(one.devices.shape, one.axis_names, axis_types=one.axis_types)
        self.is_described = is_described(one)
        self.is_mine = tuple(self.is_described or is_mine(submesh) for submesh in submeshes)
        self.turns = [self.number(0, r) for r in range(len(submeshes))]
        mine, is_cpu = jax.process_index(), one.devices.flat[0].platform == "cpu"
        self.under_way: list[deque[jax.Array] | None] = [
            deque() if is_cpu and processes(submesh).count(mine) > 1 else None for submesh in submeshes
        ]
        self.traced: dict[ProgramId, tuple[jax.stages.Traced, tuple]] = {}  # and shapes of the values that it writes
        self.lowered: dict[ProgramId, jax.stages.Lowered] = {}
        self.compiled: dict[tuple[ProgramId, int | None], jax.stages.Compiled] = {}  # as `_place` has it
        self.crossings: dict[tuple[tuple[Part, ...], int, int], jax.stages.Compiled] = {}  # parts, sender, receiver
        self.connected: set[tuple[int, ...]] = set()  # senders and receivers

    def number(self, value: int, rank: int) -> jax.Array | None:
        """Return an int32 that a whole rank has; None where this process has no device of it."""
        return self.numbers(np.asarray(value, np.int32), rank)

    def numbers(self, values: np.ndarray, rank: int) -> jax.Array | None:
        """Return an array that a whole rank has; None where this process has no device of it."""
        if self.is_described or not self.is_mine[rank]:
            return None
        sharding = NamedSharding(self.submeshes[rank], P())
        return jax.make_array_from_callback(values.shape, sharding, values.__getitem__, dtype=values.dtype)

    def pass_turn(self, rank: int, turn: jax.Array | None) -> None:
        """Set the turn that the next program of a rank takes; wait while too many of the rank are under way."""
        self.turns[rank] = turn
        under_way = self.under_way[rank]
        if under_way is not None and turn is not None:
            under_way.append(turn)
            if len(under_way) > MOST_STARTED // 2:
                under_way.popleft().block_until_ready()

    def wait(self) -> None:
        """Wait until all that was dispatched is done."""
        jax.block_until_ready(self.turns)

    def connect(self) -> None:
        """Run a crossing of each pair of submeshes that has not run any, on zeros.

        To be called by all processes at about the same time, with nothing else under way. Gloo waits half a minute for
        the other side of a new connection, and for as long as it takes once there is one.
        """
        for (parts, *ranks), compiled in self.crossings.items():
            if tuple(ranks) not in self.connected:
                self.connected.add(tuple(ranks))
                pair = pair_mesh(*(self.submeshes[rank] for rank in ranks))
                jax.block_until_ready(
                    compiled(*(each_its_own(pair, local_zeros(pair, *part)) for part in (TURN, *parts)))
                )

    def shape(self, tree: Tree, specs: Tree) -> Tree:
        """Return shapes with the shardings of `specs` (a tree, or a prefix of one) on a submesh."""

        def one(spec: P, part: Tree) -> Tree:
            sharding = NamedSharding(self.abstract, spec)
            return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), part)

        return jax.tree.map(one, specs, tree, is_leaf=lambda a: isinstance(a, P))

    def on(self, rank: int, shapes: Tree) -> Tree:
        """Return the shardings of `shapes` on the devices of a rank."""
        return jax.tree.map(lambda a: NamedSharding(self.submeshes[rank], a.sharding.spec), shapes)

    def compile(self, entries: Sequence[PlanEntry], given: Mapping[Key, Tree], kept: Collection[Key]) -> Walk:
        """Compile a plan: return the walk over its entries, from values of these shapes to those that are kept."""
        shapes = self.shapes(entries, given)
        freed = last_uses(entries, {*kept, *given})
        here = [
            (entry, drop)
            for entry, drop in zip(entries, freed, strict=True)
            if any(self.is_mine[r] for r in entry.ranks)
        ]
        mine = tuple(entry for entry, _ in here)
        self._compile(mine, shapes)
        slots = {key: i for i, key in enumerate(shapes)}
        steps = []
        for entry, drop in () if self.is_described else here:
            places = (tuple(slots[key] for key in keys) for keys in (entry.reads, entry.writes, drop))
            steps.append((self._call(entry, shapes), *places))
        held = self._held(mine, [drop for _, drop in here], shapes, given, self._temps(mine))
        kept_shapes = {key: shapes[key] for key in kept}
        return Walk(mine, tuple(steps), slots, tuple(given), tuple(kept), kept_shapes, held)

    def memory_breakdown(
        self,
        entries: Sequence[PlanEntry],
        given: Mapping[Key, Tree],
        kept: Collection[Key],
        temps: Sequence[int] | None = None,
    ) -> tuple[dict[str, int], ...]:
        """Return for each rank the bytes of values by name at its peak, on one device, without the values given.

        temps: the "temporaries" of each entry; None: those of programs that are compiled. `ops` are traced only.
        """
        temps = self._temps(entries) if temps is None else temps
        return self._held(entries, last_uses(entries, {*kept, *given}), self.shapes(entries, given), given, temps)

    def compiled_first(self, entries: Sequence[PlanEntry]) -> dict[ProgramId, jax.stages.Compiled]:
        """Return each program of these entries, which were traced, as compiled for the first rank that runs it."""
        first = {entry.program: entry for entry in reversed(entries) if entry.program is not None}
        self._compile(list(first.values()), {})
        return {program: self.compiled[self._place(program, entry.rank)] for program, entry in first.items()}

    def _place(self, program: ProgramId, rank: int) -> tuple[ProgramId, int | None]:
        """Return the key of a rank's executable in `compiled`: described ranks share one."""
        return program, None if self.is_described else rank

    def _temps(self, entries: Sequence[PlanEntry]) -> list[int]:
        """The temporaries of each entry whose program is compiled."""
        compiled = (
            None if entry.program is None else self.compiled.get(self._place(entry.program, entry.rank))
            for entry in entries
        )
        return [0 if each is None else temp_bytes(each) for each in compiled]

    def lower(self, program: ProgramId) -> jax.stages.Lowered:
        """Return a program that was traced, lowered for these devices."""
        if program not in self.lowered:
            traced, _ = self.traced[program]
            with self._backend():
                self.lowered[program] = traced.lower(lowering_platforms=(self._platform,))
        return self.lowered[program]

    def shapes(self, entries: Sequence[PlanEntry], given: Mapping[Key, Tree]) -> dict[Key, Tree]:
        """Return the shapes of all values of a plan."""
        shapes: dict[Key, Tree] = dict(given)
        for entry in entries:
            reads = tuple(shapes[key] for key in entry.reads)
            shapes.update(
                zip(entry.writes, reads if entry.program is None else self._trace(entry.program, reads), strict=True)
            )
        return shapes

    def _trace(self, program: ProgramId, reads: tuple) -> tuple:
        """Return the shapes that a program writes; trace it the first time, with a turn before its reads and writes."""
        if program not in self.traced:
            specs, out_specs = (self.programs.all_specs(program, names) for names in (program.reads, program.writes))
            donated = self.programs.donated(program)
            function = self.programs.function(program)

            def local(turn: jax.Array, *values: Tree) -> tuple:
                return turn + 1, *function(*values)

            local.__name__ = program.kind  # names the compiled module
            auto = self.programs.auto
            whole = jax.shard_map(
                local,
                mesh=self.abstract,
                in_specs=(P(), *without_axes(specs, auto)),
                out_specs=(P(), *without_axes(out_specs, auto)),
                axis_names=set(self.abstract.axis_names) - set(auto),
                check_vma=False,
            )
            donate = tuple(i for i, name in enumerate(program.reads, 1) if name in donated)
            turn = self.shape(jax.ShapeDtypeStruct((), np.int32), P())
            traced = jax.jit(whole, donate_argnums=donate).trace(turn, *reads)
            if auto:  # what XLA divides must lie as the next program expects it
                out_specs = written_specs(self.programs, program, traced, reads, out_specs)
                shardings = jax.tree.map(partial(NamedSharding, self.abstract), (P(), *out_specs), is_leaf=is_spec)
                again = jax.jit(whole, donate_argnums=donate, out_shardings=shardings)
                traced = again.trace(turn, *reads)
            written = tuple(self.shape(out, spec) for out, spec in zip(traced.out_info[1:], out_specs, strict=True))
            self.traced[program] = traced, written
        return self.traced[program][1]

    def _backend(self) -> AbstractContextManager:
        """Return a context in which programs of an abstract mesh are lowered for the backend of these devices.

        JAX takes that of the default device, which devices that are only described are not.
        """
        return jax.default_device(self.submeshes[0].devices.flat[0]) if self.is_described else nullcontext()

    @property
    def _platform(self) -> str:
        device = self.submeshes[0].devices.flat[0]
        if device.platform != "gpu":
            return device.platform
        return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"

    def _options(self, program: ProgramId | None) -> dict[str, Any]:
        """Return the compiler's options for a program or a crossing: those given come before ours."""
        if self._platform != "cpu":
            return self.options
        return cpu_options("once" if program is None else self.programs.preset(program)) | self.options

    def _crosses(self, entry: PlanEntry) -> bool:
        """Return whether a move is between processes."""
        assert entry.sender is not None, "of moves alone"
        return processes(self.submeshes[entry.sender]) != processes(self.submeshes[entry.rank])

    def _compile(self, entries: Sequence[PlanEntry], shapes: Mapping[Key, Tree]) -> None:
        """Compile what is not compiled yet, in threads that begin in the order of `ops`, as in every process."""
        missing: dict[tuple, tuple[dict, jax.stages.Lowered, Mesh, ProgramId | None]] = {}
        for entry in entries:
            if entry.program is not None:
                place = self._place(entry.program, entry.rank)
                if place not in self.compiled and place not in missing:
                    lowered, devices = self.lower(entry.program), self.submeshes[entry.rank]
                    missing[place] = self.compiled, lowered, devices, entry.program
            elif entry.sender is not None and not self.is_described and self._crosses(entry):
                parts = parts_of(shapes[entry.reads[0]])
                if (parts, entry.sender, entry.rank) not in self.crossings:
                    lowered = lower_crossing(self.abstract, parts, self._platform)
                    devices = pair_mesh(self.submeshes[entry.sender], self.submeshes[entry.rank])
                    missing[parts, entry.sender, entry.rank] = self.crossings, lowered, devices, None

        def compiled(job: tuple[dict, jax.stages.Lowered, Mesh, ProgramId | None]) -> jax.stages.Compiled:
            _, lowered, mesh, program = job
            return lowered.compile(self._options(program), device_assignment=tuple(mesh.devices.flat))

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for key, result in zip(missing, threads.map(compiled, missing.values()), strict=True):
                missing[key][0][key] = result

    def _call(self, entry: PlanEntry, shapes: Mapping[Key, Tree]) -> Callable[..., Sequence]:
        """The call that runs an entry: from values read to values written."""
        turns, rank, sender = self.turns, entry.rank, entry.sender
        if entry.program is not None:
            program = self.compiled[self._place(entry.program, rank)]

            def in_turn(*values: Tree) -> Sequence:
                turn, *written = program(turns[rank], *values)
                self.pass_turn(rank, turn)
                return written

            return in_turn
        there = self.on(rank, shapes[entry.reads[0]])
        assert sender is not None, "what is no program is a move"
        if not self._crosses(entry):
            if len(set(processes(self.submeshes[rank]))) == 1:
                devices = self.submeshes[rank].devices
                return partial(_move, devices.item() if devices.size == 1 else there)  # a device: 70 us, not 110
            return partial(copy_across, self.submeshes[sender], self.submeshes[rank], there)
        value = shapes[entry.reads[0]]
        compiled = self.crossings[parts_of(value), sender, rank]
        cross = crossing(compiled, self.submeshes[sender], self.submeshes[rank], value, there)

        def in_both_turns(sent: Tree) -> Sequence:
            sender_turn, turn, received = cross(turns[sender], turns[rank], sent)
            self.pass_turn(sender, sender_turn)
            self.pass_turn(rank, turn)
            return (received,)

        return in_both_turns

    def _held(
        self,
        entries: Sequence[PlanEntry],
        freed: Sequence[tuple[Key, ...]],
        shapes: Mapping[Key, Tree],
        given: Collection[Key],
        temps: Sequence[int],
    ) -> tuple[dict[str, int], ...]:
        live = [Counter[str]() for _ in self.submeshes]
        peak = [Counter[str]() for _ in self.submeshes]
        where: dict[Key, int] = {}
        size = {key: shard_bytes(tree) for key, tree in shapes.items()}
        for entry, drop, temp in zip(entries, freed, temps, strict=True):
            for key in self._passed_on(entry, drop):
                live[where.pop(key)][key[0]] -= size[key]
            for key in entry.writes:
                if key not in where and key not in given:
                    where[key] = entry.rank
                    live[entry.rank][key[0]] += size[key]
            if live[entry.rank].total() + temp > peak[entry.rank].total():
                peak[entry.rank] = live[entry.rank] + Counter(temporaries=temp)
            for key in drop:
                if key in where:
                    live[where.pop(key)][key[0]] -= size[key]
        return tuple(dict(held) if mine else {} for held, mine in zip(peak, self.is_mine, strict=True))

    def _passed_on(self, entry: PlanEntry, freed: Sequence[Key]) -> list[Key]:
        """Return what a rank's program reads for the last time, and whose memory it writes to."""
        of_rank = entry.program if entry.task is None else None
        donated = () if of_rank is None else self.programs.donated(of_rank)
        return [key for key in freed if key in entry.reads and key[0] in donated]


def _move(there: Tree, value: Tree) -> tuple[Tree]:
    return (jax.device_put(value, there),)
