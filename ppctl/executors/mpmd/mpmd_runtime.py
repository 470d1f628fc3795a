"""The host's dispatch of compiled programs on the meshes of ranks.

Several processes walk the same plan. Each program takes as argument the turn, a counter that the
program before it on its rank returns, so that every device runs its programs in the plan's order.
docs/executors-internals.md, "The turns of mpmd", proves that this cannot deadlock.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from ppctl.executors.device_mesh import processes
from ppctl.executors.mpmd.compiled_programs import CompiledPrograms, memory_breakdown
from ppctl.executors.mpmd.crossings import TURN, crossing, recut, union
from ppctl.executors.mpmd.dispatch_plan import Call, Key, PlanEntry, Walk, last_uses
from ppctl.executors.mpmd.plan_values import value_kind
from ppctl.executors.mpmd.transfers import copy_across, each_its_own, local_zeros, resized
from ppctl.executors.programs_under_way import ProgramsUnderWay

Tree = Any


class Runtime:
    """The turns of the ranks, and the calls of programs in turn."""

    def __init__(self, programs: CompiledPrograms):
        self.programs, self.submeshes = programs, programs.submeshes
        self.is_mine = programs.is_mine
        # the turn of each rank, and the turns of its unfinished programs
        ranks = range(len(self.submeshes))
        self.turns = [self.numbers(np.zeros((), np.int32), r) for r in ranks]
        self.under_way = [*map(ProgramsUnderWay, self.submeshes)]
        self.connected: set[tuple[int, ...]] = set()  # (sender, receiver)

    def numbers(self, values: np.ndarray, rank: int) -> jax.Array | None:
        """Return `values` replicated over a rank's devices; None for remote and described ranks."""
        if self.programs.is_described or not self.is_mine[rank]:
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
        for move, compiled in self.programs.crossings.items():
            ranks = move.sender, move.receiver
            if ranks not in self.connected:
                self.connected.add(ranks)
                pair = union(*(self.submeshes[rank] for rank in ranks))
                zeros = (local_zeros(pair, *part) for part in (TURN, *move.parts))
                jax.block_until_ready(compiled(*(each_its_own(pair, each) for each in zeros)))

    def compile(
        self, entries: Sequence[PlanEntry], given: Mapping[Key, Tree], kept: Collection[Key]
    ) -> Walk:
        """Compile a plan and return its walk.

        given: shapes of the values that the walk takes; kept: keys of the values that it returns.
        """
        programs = self.programs
        shapes = programs.shapes(entries, given)
        freed = last_uses(entries, {*kept, *given})
        here = [
            (entry, drop)
            for entry, drop in zip(entries, freed, strict=True)
            if any(self.is_mine[r] for r in entry.ranks)
        ]
        mine = tuple(entry for entry, _ in here)
        programs.compile(mine, shapes)
        slots = {key: i for i, key in enumerate(shapes)}
        steps = []
        for entry, drop in () if programs.is_described else here:
            keys = entry.reads, entry.writes, drop
            places = (tuple(slots[key] for key in each) for each in keys)
            steps.append((self._call(entry, shapes), *places))
        held = memory_breakdown(programs, mine, given, kept, shapes=shapes)
        kept_shapes = {key: shapes[key] for key in kept}
        return Walk(mine, tuple(steps), slots, tuple(given), tuple(kept), kept_shapes, held)

    def _call(self, entry: PlanEntry, shapes: Mapping[Key, Tree]) -> Call:
        """Return the call that runs an entry: from values read to values written."""
        if entry.program is None:
            return self._move(entry, shapes)
        turns, rank = self.turns, entry.rank
        program = self.programs.compiled[self.programs.place(entry.program, rank)]

        def in_turn(*values: Tree) -> Sequence:
            turn, *written = program(turns[rank], *values)
            self.pass_turn(rank, turn)
            return written

        return in_turn

    def _move(self, entry: PlanEntry, shapes: Mapping[Key, Tree]) -> Call:
        """Return the call that moves a value to another rank."""
        turns, rank, sender, value = self.turns, entry.rank, entry.sender, shapes[entry.reads[0]]
        assert sender is not None, "an entry without a program is a move"
        arrived = self.programs.placed(rank, shapes[entry.writes[0]])
        there = jax.tree.map(lambda a: a.sharding, arrived)
        # 1. inside a process; device_put takes 70 us to a device, 110 us to a sharding
        if not self.programs.crosses(entry):
            if self.programs.changes_group(entry):
                return self._resized_move(entry, arrived)
            if len(set(processes(self.submeshes[rank]))) == 1:
                devices = self.submeshes[rank].devices
                to = devices.item() if devices.size == 1 else there
                return lambda value: (jax.device_put(value, to),)
            return partial(copy_across, self.submeshes[sender], self.submeshes[rank], arrived)
        # 2. between processes
        compiled = self.programs.crossings[self.programs.crossing(entry, shapes)]
        cross = crossing(compiled, self.submeshes[sender], self.submeshes[rank], value, arrived)

        def in_both_turns(sent: Tree) -> Sequence:
            sender_turn, turn, received = cross(turns[sender], turns[rank], sent)
            self.pass_turn(sender, sender_turn)
            self.pass_turn(rank, turn)
            return (received,)

        return in_both_turns

    def _resized_move(self, entry: PlanEntry, there: Tree) -> Call:
        """Return the call that moves a value of one process to a rank of other sizes."""
        if value_kind(entry.reads[0][0]).form != "activation":
            return partial(resized, there)
        sender, receiver = (self.submeshes[rank] for rank in entry.ranks)
        return recut(self.programs.route(entry), sender, receiver, there)
