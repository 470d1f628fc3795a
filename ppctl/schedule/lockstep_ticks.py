"""Lockstep ticks: the tasks of every rank in each tick, the time of ticks, slots for values."""

import heapq
import itertools
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from ppctl.schedule.costs import Costs
from ppctl.schedule.execution_order import Jobs
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
    hops = itertools.pairwise(schedule.rank_of)
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
    # 1. a tick is a second; in "fb" an F takes none of it if the rank's next task is a backward
    jobs = Jobs(schedule, Costs())
    is_forward = [task.kind == "F" for task in jobs.tasks]
    shared = {
        task
        for order in jobs.first
        for task, follower in itertools.pairwise(order)
        if shape == "fb" and is_forward[task] and not is_forward[follower]
    }
    jobs.seconds = [float(task not in shared) for task in range(len(jobs.tasks))]
    # 2. the activation of such an F can be read in the next tick, its stash at once
    late = {jobs.makes[task][0] + jobs.microbatch[task] for task in shared}
    for task in itertools.compress(range(len(jobs.tasks)), is_forward):
        m = jobs.microbatch[task]
        jobs.needs[task] = tuple((base, float(base + m in late)) for base, _ in jobs.needs[task])
    run = jobs.run(jobs.first)
    if run is None:
        check_order(schedule)  # raises the error that names the missing value
    assert run is not None, "orders block at any costs"
    # 3. the tasks of each tick
    rows = [[IDLE] * schedule.num_ranks for _ in range(round(run.makespan_s))]
    for task, rank, start_s in zip(jobs.tasks, jobs.rank, run.start_s, strict=True):
        row = rows[int(start_s)]
        forward, backward = row[rank]
        row[rank] = TickCell(task, backward) if task.kind == "F" else TickCell(forward, task)
    return tuple(map(tuple, rows))


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
