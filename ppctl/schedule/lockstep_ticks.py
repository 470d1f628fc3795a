"""Lockstep ticks: the tasks of every rank in each tick, the time of ticks, slots for values."""

import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Literal, NamedTuple

from ppctl.schedule.costs import Costs
from ppctl.schedule.execution_order import Rule
from ppctl.schedule.ir import KINDS, PART_KINDS, Schedule, Task
from ppctl.schedule.validation import check_order

TickShape = Literal["op", "fb"]  # tasks of a rank in a tick: one | an F, then a backward


class TickCell(NamedTuple):
    """The tasks of one rank in one tick."""

    forward: Task | None
    backward: Task | None  # B, I or W


Cells = tuple[tuple[TickCell, ...], ...]  # [tick][rank]


class Passes(NamedTuple):
    """The microbatches whose vocabulary passes run in a tick, on every rank for its part.

    The pass E runs before the tick's other tasks, S and T after the forwards, G last (kinds: `ir`).
    """

    embedded: int | None  # microbatch of the pass E; None: the tick has none
    head: int | None  # microbatch of the passes S and T
    embedding_grad: int | None  # microbatch of the pass G


IDLE = TickCell(None, None)
Part = tuple[int, str]  # (stage, kind) of a task
Phase = tuple[tuple[Task, ...], ...]  # tasks of each rank until ranks synchronize
PhaseParts = tuple[tuple[Part, ...], ...]
Counted = tuple[tuple[PhaseParts, int], ...]  # (phase, number of occurrences)
Rows = list[tuple[list[float], int]]  # (seconds of each rank, number of occurrences)


def runs_in_fb_ticks(schedule: Schedule) -> bool:
    """Return whether a tick may run an F, then a B: looped placement, unsplit backwards."""
    hops = pairwise(schedule.rank_of)
    is_loop = all(there == (here + 1) % schedule.num_ranks for here, there in hops)
    return is_loop and schedule.kinds.isdisjoint("IW")


def passes_of(row: tuple[TickCell, ...], num_stages: int) -> Passes:
    """Return the vocabulary passes of a tick.

    E runs with stage 0's F, G with its B or I, S and T with the last stage's F.
    """
    of_task = {task[:2]: task.microbatch for cell in row for task in cell if task is not None}
    last, first = num_stages - 1, of_task.get((0, "B"), of_task.get((0, "I")))
    return Passes(of_task.get((0, "F")), of_task.get((last, "F")), first)


def tick_phases(schedule: Schedule, cells: Cells) -> Iterator[list[Phase]]:
    """Yield the phases of each tick, tasks of vocabulary parts included.

    Ranks synchronize before S, so a tick with a head pass has two phases. Forward-backward ticks
    run the head between forwards and backwards, single-op ticks after all other tasks.
    """
    between, parts = runs_in_fb_ticks(schedule), schedule.kinds.intersection(PART_KINDS)
    for row in cells:
        embedded, head, embedding_grad = passes_of(row, schedule.num_stages)
        microbatches = dict(zip(PART_KINDS, (embedded, head, head, embedding_grad), strict=True))
        ran = {kind: m for kind, m in microbatches.items() if kind in parts and m is not None}
        if not ran:
            yield [tuple(tuple(task for task in cell if task is not None) for cell in row)]
            continue
        before, after = list[tuple[Task, ...]](), list[tuple[Task, ...]]()
        for rank, (forward, backward) in enumerate(row):
            e, s, t, g = ((Task(rank, k, ran[k]),) if k in ran else () for k in PART_KINDS)
            f, b = (() if task is None else (task,) for task in (forward, backward))
            before.append((*e, *f) if between else (*e, *f, *b))
            after.append((*s, *t, *b, *g) if between else (*s, *t, *g))
        if "S" in ran:
            yield [tuple(before), tuple(after)]
        else:
            yield [tuple((*one, *other) for one, other in zip(before, after, strict=True))]


def counted(schedule: Schedule, cells: Cells) -> Counted:
    """Return the distinct phases, with their numbers of occurrences.

    Phases are equal if their tasks have the same stages and kinds; microbatches are ignored.
    """
    rows = Counter[PhaseParts](
        tuple(tuple(task[:2] for task in tasks) for tasks in phase)
        for phases in tick_phases(schedule, cells)
        for phase in phases
    )
    return tuple(rows.items())


def counted_s(rows: Counted, costs: Costs, num_chunks: int) -> float:
    """Return the seconds of all phases; each takes its slowest rank's time plus one transfer."""
    timed = rows_s(rows, costs, num_chunks)
    return sum(number * (max(seconds) + costs.transfer_s) for seconds, number in timed)


def rows_s(rows: Counted, costs: Costs, num_chunks: int) -> Rows:
    """Return the seconds of each rank in each phase, with the number of its occurrences."""

    def of_cell(cell: tuple[Part, ...]) -> float:
        return sum(costs.seconds(kind, stage, num_chunks) for stage, kind in cell)

    seconds = {cell: of_cell(cell) for cell in {cell for row, _ in rows for cell in row}}
    return [([seconds[cell] for cell in row], number) for row, number in rows]


def pack(schedule: Schedule, shape: TickShape) -> Cells:
    """Return the tasks of each tick and rank: in program order, each as early as values allow.

    ScheduleError if ranks wait for each other.
    """
    if schedule.part_ranks:  # parts run in the ticks of the stage tasks that they belong to
        of_stages = (filter(lambda task: task.kind in KINDS, tasks) for tasks in schedule.ranks)
        schedule = replace(schedule, ranks=tuple(map(tuple, of_stages)), part_ranks=())
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
        if left == before:  # no rank can run: the missing value will never exist
            check_order(schedule)  # raises the error that names it
        rows.append(tuple(row))
    return tuple(rows)


def _tick_runs(schedule: Schedule) -> Callable[[Task, int], bool]:
    """Return run(task, tick), which records a task's values and returns True if it can run."""
    rule, never = Rule.of(schedule), 1 << 60
    stashes = {rule.base["stash", stage] for stage in range(schedule.num_stages)}

    needs = {  # (base, ticks until the value can be read): 0 for a stash, else 1
        place: [(base, int(base not in stashes)) for base, _ in reads]
        for place, reads in rule.reads.items()
    }
    written = [never] * rule.num_values  # tick that writes each value

    def run(task: Task, tick: int) -> bool:
        place, m = task[:2], task.microbatch
        for base, after in needs[place]:
            if written[base + m] + after > tick:
                return False
        for base in rule.writes[place]:
            written[base + m] = tick
        return True

    return run


class Slots:
    """Slots of one kind on one rank. `put` takes the lowest free slot, so `count` is the peak."""

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
