"""Ticks in lockstep: which tasks every rank runs in each, what that costs, and slots for the values between them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Literal, NamedTuple

from ppctl.costs import Costs
from ppctl.schedule.ir import Schedule, Task, Value
from ppctl.schedule.simulate import duration_s
from ppctl.schedule.walk import Rule, walk

Shape = Literal["one", "pair"]  # one task a tick | an F, then a backward


class Cell(NamedTuple):
    """What one rank does in one tick."""

    forward: Task | None
    backward: Task | None  # B, I or W


Counted = tuple[tuple[int, tuple[Cell, ...]], ...]  # how often, and a row of cells


def counted(cells: tuple[tuple[Cell, ...], ...]) -> Counted:
    """The rows of `cells` that differ in more than their microbatches, each with its number. Most ticks are alike."""
    found: dict[tuple, list] = {}
    for row in cells:
        key = tuple(None if task is None else (task.stage, task.kind) for cell in row for task in cell)
        found.setdefault(key, [0, row])[0] += 1
    return tuple((number, row) for number, row in found.values())


def lockstep_s(cells: tuple[tuple[Cell, ...], ...], costs: Costs, num_chunks: int) -> float:
    """Seconds of ticks in lockstep: each lasts as long as its slowest rank, plus one transfer."""
    return counted_s(((1, row) for row in cells), costs, num_chunks)


def counted_s(rows: Iterable[tuple[int, tuple[Cell, ...]]], costs: Costs, num_chunks: int) -> float:
    """The same of rows with their numbers."""

    def cell_s(cell: Cell) -> float:
        return sum(duration_s(task, costs, num_chunks) for task in cell if task is not None)

    return sum(number * (max(map(cell_s, row)) + costs.hop_s) for number, row in rows)


def pack(schedule: Schedule, shape: Shape) -> tuple[tuple[Cell, ...], ...]:
    """The tasks of every rank in ticks, in program order and as early as their values allow; [tick][rank].

    ScheduleError when the ranks wait for each other.
    """
    rule, never = Rule.of(schedule), 1 << 60
    stashes = {rule.base["stash", stage] for stage in range(schedule.num_stages)}
    # for each kind and stage what a task reads: (base, in which tick after its writing)
    reads = {
        kind: [tuple((base, 0 if base in stashes else 1) for base, _ in needs) for needs in by_stage]
        for kind, by_stage in rule.reads.items()
    }
    written = [never] * rule.num_values  # the tick
    at, cells = [0] * schedule.num_ranks, []
    left = sum(map(len, schedule.ranks))

    def take(rank: int, kinds: str, tick: int) -> Task | None:
        """The rank's next task, if it is of these kinds and all it reads is there; a stash is there at once."""
        tasks = schedule.ranks[rank]
        if at[rank] == len(tasks):
            return None
        stage, kind, m = task = tasks[at[rank]]
        if kind not in kinds:
            return None
        for base, after in reads[kind][stage]:
            if written[base + m] + after > tick:
                return None
        at[rank] += 1
        for base in rule.writes[kind][stage]:
            written[base + m] = tick
        return task

    while left:
        row, before = [], left
        for rank in range(schedule.num_ranks):
            forward = take(rank, "F", len(cells))
            backward = take(rank, "BIW", len(cells)) if forward is None or shape == "pair" else None
            left -= (forward is not None) + (backward is not None)
            row.append(Cell(forward, backward))
        if left == before:  # what is missing now would be missing for ever: the walk says what it is
            for _ in walk(schedule):
                pass
        cells.append(tuple(row))
    return tuple(cells)


class Slots:
    """Slots of one kind on one rank: the lowest free number is taken, so the count is the peak of live values."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.count = 0
        self.of: dict[Value, int] = {}

    def put(self, value: Value) -> int:
        if self.free:
            slot = heapq.heappop(self.free)
        else:
            slot, self.count = self.count, self.count + 1
        self.of[value] = slot
        return slot

    def drop(self, value: Value) -> int:
        slot = self.of.pop(value)
        heapq.heappush(self.free, slot)
        return slot
