"""Programs on submeshes: traced and lowered once, compiled in threads, dispatched by the host.

A program is lowered for an abstract submesh and compiled for the devices of each rank that runs it.
JAX has no public way to load one executable on other devices, so ranks share only the trace. For
described devices (`plan.topology`) each program is compiled once and cannot run. A crossing is a
program that moves a value between submeshes of different processes.

Several processes walk the same plan. Each program takes as argument the turn, a counter that the
program before it on its rank returns, so that every device runs its programs in the plan's order.
docs/executors-internals.md, "The turns of mpmd", proves that this cannot deadlock.
"""

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ppctl.executors.compiler_options import temp_bytes
from ppctl.executors.described_devices import is_described
from ppctl.executors.model_shapes import shard_bytes
from ppctl.executors.mpmd.dispatch_plan import Call, Key, PlanEntry, ProgramId, Walk, last_uses
from ppctl.executors.mpmd.program_library import ProgramLibrary
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
from ppctl.executors.parameter_layout import without_axes
from ppctl.executors.programs_under_way import ProgramsUnderWay

Tree = Any


class Runtime:
    """The submeshes of the ranks, all of one shape, and the programs that run on them."""

    def __init__(
        self,
        submeshes: Sequence[Mesh],
        programs: ProgramLibrary,
        options: Mapping[str, Any] | None = None,
    ):
        # 1. the submeshes
        self.submeshes, self.programs, self.options = submeshes, programs, dict(options or {})
        one = submeshes[0]
        self.abstract = AbstractMesh(one.devices.shape, one.axis_names, axis_types=one.axis_types)
        self.is_described = is_described(one)
        self.is_mine = tuple(self.is_described or is_mine(submesh) for submesh in submeshes)
        # 2. the turn of each rank, and the turns of its unfinished programs
        self.turns = [self.numbers(np.zeros((), np.int32), r) for r in range(len(submeshes))]
        self.under_way = [*map(ProgramsUnderWay, submeshes)]
        # 3. programs: `traced` with the shapes of their results, `compiled` by key of `_place`
        self.traced: dict[ProgramId, tuple[jax.stages.Traced, tuple]] = {}
        self.lowered: dict[ProgramId, jax.stages.Lowered] = {}
        self.compiled: dict[tuple[ProgramId, int | None], jax.stages.Compiled] = {}
        # 4. executables of crossings by (parts, sender, receiver)
        self.crossings: dict[tuple[tuple[Part, ...], int, int], jax.stages.Compiled] = {}
        self.connected: set[tuple[int, ...]] = set()  # (sender, receiver)

    def numbers(self, values: np.ndarray, rank: int) -> jax.Array | None:
        """Return `values` replicated over a rank's devices; None for remote and described ranks."""
        if self.is_described or not self.is_mine[rank]:
            return None
        sharding, dtype = NamedSharding(self.submeshes[rank], P()), values.dtype
        return jax.make_array_from_callback(values.shape, sharding, values.__getitem__, dtype=dtype)

    def pass_turn(self, rank: int, turn: jax.Array | None) -> None:
        """Set the turn for a rank's next program; wait if too many of its programs are pending."""
        self.turns[rank] = turn
        if turn is not None:
            self.under_way[rank].add(turn)

    def wait(self) -> None:
        """Wait until all dispatched programs are done."""
        jax.block_until_ready(self.turns)

    def connect(self) -> None:
        """Run a crossing on zeros for each pair of submeshes that is not connected yet.

        All processes call this at about the same time, with no program under way: Gloo waits only
        half a minute for the other side of a new connection, but without limit once connected.
        """
        for (parts, *ranks), compiled in self.crossings.items():
            if tuple(ranks) not in self.connected:
                self.connected.add(tuple(ranks))
                pair = pair_mesh(*(self.submeshes[rank] for rank in ranks))
                zeros = (local_zeros(pair, *part) for part in (TURN, *parts))
                jax.block_until_ready(compiled(*(each_its_own(pair, each) for each in zeros)))

    def shape(self, tree: Tree, specs: Tree) -> Tree:
        """Return shapes with the shardings of `specs` (a tree, or a prefix of one) on a submesh."""

        def one(spec: P, part: Tree) -> Tree:
            sharding = NamedSharding(self.abstract, spec)
            shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)  # noqa: E731
            return jax.tree.map(shape, part)

        return jax.tree.map(one, specs, tree)

    def placed(self, rank: int, shapes: Tree) -> Tree:
        """Return `shapes` with their shardings on the devices of a rank."""
        mesh = self.submeshes[rank]
        sharding = lambda a: NamedSharding(mesh, a.sharding.spec)  # noqa: E731
        placed = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding(a))  # noqa: E731
        return jax.tree.map(placed, shapes)

    def compile(
        self, entries: Sequence[PlanEntry], given: Mapping[Key, Tree], kept: Collection[Key]
    ) -> Walk:
        """Compile a plan and return its walk.

        given: shapes of the values that the walk takes; kept: keys of the values that it returns.
        """
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
            keys = entry.reads, entry.writes, drop
            places = (tuple(slots[key] for key in each) for each in keys)
            steps.append((self._call(entry, shapes), *places))
        held = self.memory_breakdown(mine, given, kept, shapes=shapes)
        kept_shapes = {key: shapes[key] for key in kept}
        return Walk(mine, tuple(steps), slots, tuple(given), tuple(kept), kept_shapes, held)

    def memory_breakdown(
        self,
        entries: Sequence[PlanEntry],
        given: Mapping[Key, Tree],
        kept: Collection[Key],
        temps: Sequence[int] | None = None,
        shapes: Mapping[Key, Tree] | None = None,
    ) -> tuple[dict[str, int], ...]:
        """Return for each rank the bytes on one device at the peak, by value name, without `given`.

        temps: bytes of temporaries of each entry; None: those of the compiled programs.
        shapes: shapes of all values; None: trace them.
        """
        shapes = self.shapes(entries, given) if shapes is None else shapes
        temps, freed = temps or self._temps(entries), last_uses(entries, {*kept, *given})
        live = [Counter[str]() for _ in self.submeshes]
        peak = [Counter[str]() for _ in self.submeshes]
        where: dict[Key, int] = {}
        # runs of a program write values of one tree of shapes
        trees = {id(tree): tree for tree in shapes.values()}
        bytes_of = {number: shard_bytes(tree) for number, tree in trees.items()}
        size = {key: bytes_of[id(tree)] for key, tree in shapes.items()}
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
        return tuple(
            dict(held) if mine else {} for held, mine in zip(peak, self.is_mine, strict=True)
        )

    def compiled_first(self, entries: Sequence[PlanEntry]) -> dict[ProgramId, jax.stages.Compiled]:
        """Return each traced program of these entries, compiled for the first rank that runs it."""
        first = {entry.program: entry for entry in reversed(entries) if entry.program is not None}
        self._compile(list(first.values()), {})
        return {id_: self.compiled[self._place(id_, entry.rank)] for id_, entry in first.items()}

    def _place(self, program: ProgramId, rank: int) -> tuple[ProgramId, int | None]:
        """Return the key of a rank's executable in `compiled`; described ranks share one."""
        return program, None if self.is_described else rank

    def _temps(self, entries: Sequence[PlanEntry]) -> list[int]:
        """Return the temporary bytes of each entry whose program is compiled, else 0."""
        places = (o.program and self._place(o.program, o.rank) for o in entries)
        compiled = (None if place is None else self.compiled.get(place) for place in places)
        return [0 if each is None else temp_bytes(each) for each in compiled]

    def lower(self, program: ProgramId) -> jax.stages.Lowered:
        """Return a traced program lowered for the platform of the submeshes; lower it only once."""
        if program not in self.lowered:
            traced, _ = self.traced[program]
            with self._backend():
                self.lowered[program] = traced.lower(lowering_platforms=(self._platform,))
        return self.lowered[program]

    def shapes(self, entries: Sequence[PlanEntry], given: Mapping[Key, Tree]) -> dict[Key, Tree]:
        """Return the shapes of all values of a plan."""
        shapes: dict[Key, Tree] = dict(given)
        for entry in entries:
            written = tuple(shapes[key] for key in entry.reads)
            if entry.program is not None:
                written = self._trace(entry.program, written)
            shapes.update(zip(entry.writes, written, strict=True))
        return shapes

    def _trace(self, program: ProgramId, reads: tuple) -> tuple:
        """Trace a program once, with a turn before its values; return the shapes it writes."""
        if program in self.traced:
            return self.traced[program][1]
        # 1. the function of one device, which also counts the turn up
        programs, auto = self.programs, self.programs.auto_axes(program)
        specs, out_specs = (programs.all_specs(program, n) for n in (program.reads, program.writes))
        function = programs.function(program)

        def local(turn: jax.Array, *values: Tree) -> tuple:
            return turn + 1, *function(*values)

        local.__name__ = program.kind  # name of the compiled module
        # 2. over the devices of a rank
        whole, manual = local, set(self.abstract.axis_names) - set(auto)
        if manual:  # because shard_map reads an empty set as all axes
            whole = jax.shard_map(
                local,
                mesh=self.abstract,
                in_specs=(P(), *without_axes(specs, auto)),
                out_specs=(P(), *without_axes(out_specs, auto)),
                axis_names=manual,
                check_vma=False,
            )
        donated = programs.donated(program)
        donate = tuple(i for i, name in enumerate(program.reads, 1) if name in donated)
        sharding = partial(NamedSharding, self.abstract)
        shardings = jax.tree.map(sharding, (P(), *out_specs))
        jitted = jax.jit(whole, donate_argnums=donate, out_shardings=shardings)
        traced = jitted.trace(self.shape(jax.ShapeDtypeStruct((), np.int32), P()), *reads)
        written = tuple(map(self.shape, traced.out_info[1:], out_specs))
        self.traced[program] = traced, written
        return written

    def _backend(self) -> AbstractContextManager:
        """Return the context to lower programs in: a described device becomes JAX's default."""
        first = self.submeshes[0].devices.flat[0]
        return jax.default_device(first) if self.is_described else nullcontext()

    @property
    def _platform(self) -> str:
        device = self.submeshes[0].devices.flat[0]
        if device.platform != "gpu":
            return device.platform
        return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"

    def _crosses(self, entry: PlanEntry) -> bool:
        """Return whether a move is between processes."""
        assert entry.sender is not None, "only moves have a sender"
        return processes(self.submeshes[entry.sender]) != processes(self.submeshes[entry.rank])

    def _compile(self, entries: Sequence[PlanEntry], shapes: Mapping[Key, Tree]) -> None:
        """Compile missing programs in threads, started in plan order: the same in all processes."""
        # 1. missing executables by key: (cache, lowered program, mesh)
        missing: dict[tuple, tuple[dict, jax.stages.Lowered, Mesh]] = {}
        for entry in entries:
            if entry.program is not None:
                place = self._place(entry.program, entry.rank)
                if place not in self.compiled and place not in missing:
                    lowered, devices = self.lower(entry.program), self.submeshes[entry.rank]
                    missing[place] = self.compiled, lowered, devices
            elif entry.sender is not None and not self.is_described and self._crosses(entry):
                place = parts, sender, rank = parts_of(shapes[entry.reads[0]]), *entry.ranks
                if place not in self.crossings:
                    lowered = lower_crossing(self.abstract, parts, self._platform)
                    devices = pair_mesh(self.submeshes[sender], self.submeshes[rank])
                    missing[place] = self.crossings, lowered, devices

        # 2. compile them
        def compiled(key: tuple) -> jax.stages.Compiled:
            _, lowered, mesh = missing[key]
            return lowered.compile(self.options, device_assignment=tuple(mesh.devices.flat))

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for key, result in zip(missing, threads.map(compiled, missing), strict=True):
                missing[key][0][key] = result

    def _call(self, entry: PlanEntry, shapes: Mapping[Key, Tree]) -> Call:
        """Return the call that runs an entry: from values read to values written."""
        turns, rank, sender = self.turns, entry.rank, entry.sender
        # 1. a program
        if entry.program is not None:
            program = self.compiled[self._place(entry.program, rank)]

            def in_turn(*values: Tree) -> Sequence:
                turn, *written = program(turns[rank], *values)
                self.pass_turn(rank, turn)
                return written

            return in_turn
        # 2. a move inside a process; device_put takes 70 us to a device, 110 us to a sharding
        there = jax.tree.map(lambda a: a.sharding, self.placed(rank, shapes[entry.reads[0]]))
        assert sender is not None, "an entry without a program is a move"
        if not self._crosses(entry):
            if len(set(processes(self.submeshes[rank]))) == 1:
                devices = self.submeshes[rank].devices
                to = devices.item() if devices.size == 1 else there
                return lambda value: (jax.device_put(value, to),)
            return partial(copy_across, self.submeshes[sender], self.submeshes[rank], there)
        # 3. a move between processes
        value = shapes[entry.reads[0]]
        compiled = self.crossings[parts_of(value), sender, rank]
        cross = crossing(compiled, self.submeshes[sender], self.submeshes[rank], value, there)

        def in_both_turns(sent: Tree) -> Sequence:
            sender_turn, turn, received = cross(turns[sender], turns[rank], sent)
            self.pass_turn(sender, sender_turn)
            self.pass_turn(rank, turn)
            return (received,)

        return in_both_turns

    def _passed_on(self, entry: PlanEntry, freed: Sequence[Key]) -> list[Key]:
        """Return the freed values whose memory a program without a task reuses for its results."""
        of_rank = entry.program if entry.task is None else None
        donated = () if of_rank is None else self.programs.donated(of_rank)
        return [key for key in freed if key in entry.reads and key[0] in donated]
