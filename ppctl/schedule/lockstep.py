"""Ticks in lockstep: which tasks every rank runs in each, what that costs, and slots for the values between them."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable
from typing import Literal, NamedTuple

from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import KINDS, PART_KINDS, Schedule, Task
from ppctl.schedule.walk import Rule, walk

TickShape = Literal["op", "fb"]  # one task a tick | an F, then a backward


class TickCell(NamedTuple):
    """The tasks of one rank in one tick."""

    forward: Task | None
    backward: Task | None  # B, I or W


class Passes(NamedTuple):
    """The microbatches of whose vocabulary every rank computes its part in a tick: at most one of each.

    Before the tick's tasks it is embedded, after the forwards come S and T, behind all the embedding's gradient.
    """

    embedded: int | None
    head: int | None
    embedding_grad: int | None


class Divided(NamedTuple):
    """How ticks have the parts of a vocabulary that is divided.

    between: the head's come between the forwards and the backwards of a tick; otherwise behind all its tasks.
    """

    num_stages: int
    between: bool
    kinds: frozenset[str]  # that the schedule has: one of forwards alone has no gradients


IDLE = TickCell(None, None)
Part = tuple[int, str] | None  # (stage, kind) of a task
Counted = tuple[tuple[tuple[tuple[Part, ...], ...], int], ...]  # a row of cells without their microbatches; how often
Rows = list[tuple[list[float], int]]  # the seconds of each rank; how often


def passes_of(row: tuple[TickCell, ...], num_stages: int) -> Passes:
    """The passes of a tick, where the vocabulary is divided: those of the first and the last stage's tasks in it."""
    of_task = {task[:2]: task.microbatch for cell in row for task in cell if task is not None}
    last, first = num_stages - 1, of_task.get((0, "B"), of_task.get((0, "I")))
    return Passes(of_task.get((0, "F")), of_task.get((last, "F")), first)


def counted(cells: tuple[tuple[TickCell, ...], ...], divided: Divided | None = None) -> Counted:
    """The rows of `cells` without their microbatches, each that differs with its number. Most ticks are alike.

    divided: where the vocabulary is. Ranks meet before the parts of the last stage's head: such a tick is two rows.
    """
    if divided is None:
        return tuple(Counter(tuple([(f and f[:2], b and b[:2]) for f, b in row]) for row in cells).items())
    rows = Counter[tuple[tuple[Part, ...], ...]]()
    for row in cells:
        rows.update(tuple(tuple(task[:2] for task in tasks) for tasks in phase) for phase in phases(row, divided))
    return tuple(rows.items())


def phases(row: tuple[TickCell, ...], divided: Divided) -> list[list[list[Task]]]:
    """The tasks of each rank between which ranks meet in a tick, parts of the vocabulary among them."""
    passes = passes_of(row, divided.num_stages)

    def parts(kinds: str, m: int | None, rank: int) -> list[Task]:
        return [Task(rank, kind, m) for kind in PART_KINDS if kind in kinds and kind in divided.kinds and m is not None]

    before, after = list[list[Task]](), list[list[Task]]()
    for rank, (f, b) in enumerate(row):
        forward, backward = [f] if f else [], [b] if b else []
        first = parts("E", passes.embedded, rank) + forward
        head, last = parts("ST", passes.head, rank), parts("G", passes.embedding_grad, rank)
        if divided.between:
            before.append(first)
            after.append([*head, *backward, *last])
        else:
            before.append(first + backward)
            after.append(head + last)
    if passes.head is None:
        return [[[*one, *other] for one, other in zip(before, after, strict=True)]]
    return [before, after]


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
