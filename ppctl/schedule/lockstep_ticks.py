"""Ticks in lockstep: the tasks of every rank in each, their time, and slots for values between."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Literal, NamedTuple

from ppctl.schedule.costs import Costs
from ppctl.schedule.execution_order import Rule, check_order
from ppctl.schedule.ir import PART_KINDS, Kind, Schedule, Task

TickShape = Literal["op", "fb"]  # one task a tick | an F, then a backward


class TickCell(NamedTuple):
    """The tasks of one rank in one tick."""

    forward: Task | None
    backward: Task | None  # B, I or W


Cells = tuple[tuple[TickCell, ...], ...]  # [tick][rank]


class Passes(NamedTuple):
    """The microbatches whose passes of vocabulary parts run in a tick on every rank, one each.

    The embedding comes before the tick's tasks, S and T after the forwards, the embedding's
    gradient last.
    """

    embedded: int | None
    head: int | None
    embedding_grad: int | None


class Divided(NamedTuple):
    """How ticks have the parts of a vocabulary that is divided.

    between: the head's come between the forwards and backwards of a tick, not after all tasks.
    """

    num_stages: int
    between: bool
    kinds: frozenset[str]  # of the schedule's tasks: forwards only have no gradients


IDLE = TickCell(None, None)
Part = tuple[int, str]  # (stage, kind) of a task
PhaseParts = tuple[tuple[Part, ...], ...]  # of each rank
Counted = tuple[tuple[PhaseParts, int], ...]  # phases; how often
Rows = list[tuple[list[float], int]]  # the seconds of each rank; how often


def passes_of(row: tuple[TickCell, ...], num_stages: int) -> Passes:
    """Return the passes of a tick, which belong to the first and the last stage's tasks in it."""
    of_task = {task[:2]: task.microbatch for cell in row for task in cell if task is not None}
    last, first = num_stages - 1, of_task.get((0, "B"), of_task.get((0, "I")))
    return Passes(of_task.get((0, "F")), of_task.get((last, "F")), first)


def counted(cells: Cells, divided: Divided | None = None) -> Counted:
    """Return the phases of `cells` without microbatches, and how often each occurs."""
    rows = Counter[PhaseParts](
        tuple(tuple(task[:2] for task in tasks) for tasks in phase)
        for row in cells
        for phase in phases(row, divided)
    )
    return tuple(rows.items())


def phases(row: tuple[TickCell, ...], divided: Divided | None) -> list[list[list[Task]]]:
    """Return the tasks of each rank, vocabulary parts included, in each phase of a tick.

    Ranks meet before the parts of the last stage's head: such a tick has two phases.
    """
    if divided is None:
        return [[[task for task in cell if task is not None] for cell in row]]
    passes = passes_of(row, divided.num_stages)

    def parts(kinds: str, m: int | None, rank: int) -> list[Task]:
        known: list[Kind] = [kind for kind in PART_KINDS if kind in kinds and kind in divided.kinds]
        return [] if m is None else [Task(rank, kind, m) for kind in known]

    before, after = list[list[Task]](), list[list[Task]]()
    for rank, (f, b) in enumerate(row):
        forward, backward = [f] if f else [], [b] if b else []
        first = parts("E", passes.embedded, rank) + forward
        head, last = parts("ST", passes.head, rank), parts("G", passes.embedding_grad, rank)
        before.append(first if divided.between else first + backward)
        after.append([*head, *backward, *last] if divided.between else head + last)
    if passes.head is None:
        return [[[*one, *other] for one, other in zip(before, after, strict=True)]]
    return [before, after]


def counted_s(rows: Counted, costs: Costs, num_chunks: int) -> float:
    """Return the seconds of ticks in lockstep: each its slowest rank's, plus one transfer."""
    timed = rows_s(rows, costs, num_chunks)
    return sum(number * (max(seconds) + costs.transfer_s) for seconds, number in timed)


def rows_s(rows: Counted, costs: Costs, num_chunks: int) -> Rows:
    """Return the seconds of each rank in each row."""

    def of_cell(cell: tuple[Part, ...]) -> float:
        return sum(costs.seconds(kind, stage, num_chunks) for stage, kind in cell)

    seconds = {cell: of_cell(cell) for cell in {cell for row, _ in rows for cell in row}}
    return [([seconds[cell] for cell in row], number) for row, number in rows]


def pack(schedule: Schedule, shape: TickShape) -> Cells:
    """Return the tasks of every rank in ticks, in program order, as early as values allow.

    ScheduleError when the ranks wait for each other.
    """
    runs = _tick_runs(schedule)
    at, rows = [0] * schedule.num_ranks, list[tuple[TickCell, ...]]()
    left = sum(map(len, schedule.ranks))
    while left:
        row, before, tick = list[TickCell](), left, len(rows)
        for rank, tasks in enumerate(schedule.ranks):
            step, cell = at[rank], IDLE
            if step < len(tasks) and runs(tasks[step], tick):
                task, follower = tasks[step], tasks[step + 1] if step + 1 < len(tasks) else None
                cell = TickCell(task, None) if task.kind == "F" else TickCell(None, task)
                at[rank] += 1
                is_pair = shape == "fb" and task.kind == "F"
                if is_pair and follower and follower.kind != "F" and runs(follower, tick):
                    cell = TickCell(task, follower)
                    at[rank] += 1
                left -= at[rank] - step
            row.append(cell)
        if left == before:  # a value missing now is missing for ever
            check_order(schedule)  # raises the error that names it
        rows.append(tuple(row))
    return tuple(rows)


def _tick_runs(schedule: Schedule) -> Callable[[Task, int], bool]:
    """Return run(task, tick): whether a task can run then, and if so its values are written."""
    rule, never = Rule.of(schedule), 1 << 60
    stashes = {rule.base["stash", stage] for stage in range(schedule.num_stages)}

    def ticks_after(needs: tuple[tuple[int, bool], ...]) -> list[tuple[int, int]]:
        return [(base, int(base not in stashes)) for base, _ in needs]  # a stash is there at once

    needs_of = {kind: list(map(ticks_after, of_kind)) for kind, of_kind in rule.reads.items()}
    written = [never] * rule.num_values  # the tick

    def run(task: Task, tick: int) -> bool:
        stage, kind, m = task
        for base, after in needs_of[kind][stage]:
            if written[base + m] + after > tick:
                return False
        for base in rule.writes[kind][stage]:
            written[base + m] = tick
        return True

    return run


class Slots:
    """Slots of one kind on one rank. The lowest free one is taken: `count` is their peak."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.count = 0
        self.of: dict[Hashable, int] = {}

    def put(self, value: Hashable) -> int:
        if not self.free:
            self.free, self.count = [self.count], self.count + 1
        slot = self.of[value] = heapq.heappop(self.free)
        return slot

    def drop(self, value: Hashable) -> int:
        slot = self.of.pop(value)
        heapq.heappush(self.free, slot)
        return slot
