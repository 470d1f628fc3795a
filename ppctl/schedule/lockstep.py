"""Ticks in lockstep: which tasks every rank runs in each, what that costs, and slots for the values between them."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable
from typing import Literal, NamedTuple

from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import KINDS, Schedule, Task
from ppctl.schedule.walk import Rule, walk

TickShape = Literal["op", "fb"]  # one task a tick | an F, then a backward


class TickCell(NamedTuple):
    """The tasks of one rank in one tick."""

    forward: Task | None
    backward: Task | None  # B, I or W


IDLE = TickCell(None, None)
Part = tuple[int, str] | None  # (stage, kind) of a task
Counted = tuple[tuple[tuple[tuple[Part, Part], ...], int], ...]  # a row of cells without their microbatches; how often
Rows = list[tuple[list[float], int]]  # the seconds of each rank; how often


def counted(cells: tuple[tuple[TickCell, ...], ...]) -> Counted:
    """The rows of `cells` without their microbatches, each that differs with its number. Most ticks are alike."""
    return tuple(Counter(tuple([(f and f[:2], b and b[:2]) for f, b in row]) for row in cells).items())


def counted_s(rows: Counted, costs: Costs, num_chunks: int) -> float:
    """Seconds of ticks in lockstep: each lasts as long as its slowest rank, plus one transfer."""
    return sum(number * (max(seconds) + costs.hop_s) for seconds, number in rows_s(rows, costs, num_chunks))


def rows_s(rows: Counted, costs: Costs, num_chunks: int) -> Rows:
    """The seconds of each rank in each row."""
    cells = {cell for row, _ in rows for cell in row}
    seconds = {cell: sum(costs.seconds(part[1], part[0], num_chunks) for part in cell if part) for cell in cells}
    return [([seconds[cell] for cell in row], number) for row, number in rows]


def pack(schedule: Schedule, shape: TickShape) -> tuple[tuple[TickCell, ...], ...]:
    """The tasks of every rank in ticks, in program order and as early as their values allow; [tick][rank].

    ScheduleError when the ranks wait for each other.
    """
    rule, never = Rule.of(schedule), 1 << 60
    stashes = {rule.base["stash", stage] for stage in range(schedule.num_stages)}
    # for each kind and stage: what a task reads, as (base, in which tick after its writing); what it writes
    values = {
        kind: [
            (tuple((base, 0 if base in stashes else 1) for base, _ in needs), makes)  # a stash is there at once
            for needs, makes in zip(rule.reads[kind], rule.writes[kind], strict=True)
        ]
        for kind in KINDS
    }
    written = [never] * rule.num_values  # the tick

    def runs(task: Task, tick: int) -> bool:
        """Return whether all that a task reads is there; what it writes then is, too."""
        stage, kind, m = task
        needs, makes = values[kind][stage]
        for base, after in needs:
            if written[base + m] + after > tick:
                return False
        for base in makes:
            written[base + m] = tick
        return True

    at, rows = [0] * schedule.num_ranks, list[tuple[TickCell, ...]]()
    left = sum(map(len, schedule.ranks))
    while left:
        row, before, tick = list[TickCell](), left, len(rows)
        for rank, tasks in enumerate(schedule.ranks):
            step, cell = at[rank], IDLE
            if step < len(tasks) and runs(tasks[step], tick):
                task = tasks[step]
                cell = TickCell(task, None) if task.kind == "F" else TickCell(None, task)
                step += 1
                follows = shape == "fb" and task.kind == "F" and step < len(tasks) and tasks[step].kind != "F"
                if follows and runs(tasks[step], tick):
                    cell = TickCell(task, tasks[step])
                    step += 1
                left -= step - at[rank]
                at[rank] = step
            row.append(cell)
        if left == before:  # what is missing now would be missing for ever: the walk says what it is
            for _ in walk(schedule):
                pass
        rows.append(tuple(row))
    return tuple(rows)


class Slots:
    """Slots of one kind on one rank: the lowest free number is taken, so the count is the peak of live values."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.count = 0
        self.of: dict[Hashable, int] = {}

    def put(self, value: Hashable) -> int:
        if self.free:
            slot = heapq.heappop(self.free)
        else:
            slot, self.count = self.count, self.count + 1
        self.of[value] = slot
        return slot

    def drop(self, value: Hashable) -> int:
        slot = self.of.pop(value)
        heapq.heappush(self.free, slot)
        return slot
