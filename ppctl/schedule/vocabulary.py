"""Embedding and head divided over the ranks by their vocabulary: any schedule with the tasks of its parts.

Vocabulary parallelism (arXiv 2411.05288): rank r has part r of embedding and head, and for each microbatch the tasks E,
S, T and G of it (`schedule.ir`). The last stage's backward needs all T, these the sums of all S, and they its forward;
with `delay` microbatches more in flight ranks have other work meanwhile.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import replace
from itertools import count
from math import inf

from ppctl.errors import ScheduleError
from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import ALL_KINDS, PART_KINDS, Kind, Schedule, Task, Value, writes
from ppctl.schedule.validate import validate

DELAYS = (0, 1, 2)  # one hides the way to the sums, one that to the gradient of the last stage's output
AHEAD = 2  # microbatches by which embeddings are looked up before the first stage needs them
OF_ALL = ("embedded", "sums", "head_grad")  # values of which a task reads those of all parts
Written = tuple[str, int, int]  # a `Value` of some microbatch, without the class: thousands a second are made
_PRIORITY: tuple[Kind, ...] = ("T", "S", "E", "G")  # of several tasks of its part a rank runs the first


def with_vocabulary(schedule: Schedule, delay: int | None = None, costs: Costs | None = None) -> Schedule:
    """Return `schedule` with embedding and head divided over its ranks.

    Each rank's forwards go `delay` microbatches ahead of its backwards, of which it so holds as many more at most;
    None: the least of `DELAYS` with which the schedule is shortest. A rank runs the tasks of its part as soon as what
    they read is there, at these costs (None: the units of papers), between those of its stages.

    Raises:
        ScheduleError: There is but one rank, the vocabulary is divided already, or ranks wait for each other with so
            much delay.

    >>> from ppctl.schedule.families.one_f_one_b import one_f_one_b
    >>> [str(task) for task in with_vocabulary(one_f_one_b(2, 1)).ranks[1]]
    ['1E0', '1F0', '1S0', '1T0', '1B0', '1G0']
    """
    if schedule.num_ranks == 1:
        raise ScheduleError(
            f"{schedule.name}: schedule.vocab=parallel divides embedding and head over the ranks of the pipeline, but "
            "num_ranks=1. Use schedule.vocab=whole, or more ranks."
        )
    if schedule.divides_vocabulary:
        raise ScheduleError(
            f"{schedule.name}: its tasks divide the vocabulary already (E, S, T and G). Use schedule.vocab=whole."
        )
    costs = costs or Costs()
    if delay is not None:
        return validate(_delayed(schedule, delay, costs)[1])
    found = [_delayed(schedule, each, costs) for each in DELAYS]
    return validate(min(found, key=lambda each: each[0])[1])


def _delayed(schedule: Schedule, delay: int, costs: Costs) -> tuple[float, Schedule]:
    """Return (makespan, the schedule): infinity where ranks wait for each other, whose tasks are then not all there."""
    ahead = tuple(_ahead(tasks, delay * len(of)) for tasks, of in zip(schedule.ranks, schedule.stages_of, strict=True))
    insertion = _Insertion(replace(schedule, ranks=ahead, divides_vocabulary=True), costs)
    divided = insertion.run()
    tasks = sum(map(len, ahead)) + schedule.num_ranks * len(PART_KINDS) * schedule.num_microbatches
    is_whole = sum(map(len, divided.ranks)) == tasks
    return round(max(insertion.free_s), 9) if is_whole else inf, divided


def with_parts(schedule: Schedule) -> Schedule:
    """Return `schedule` with the tasks of all parts behind the others: for what does not depend on their order.

    That is how many tasks there are of each kind, and ticks, in which ranks meet wherever the parts are needed.
    """
    parts = (tuple(Task(r, kind, m) for kind in PART_KINDS for m in range(schedule.num_microbatches)) for r in count())
    ranks = tuple((*tasks, *of_rank) for tasks, of_rank in zip(schedule.ranks, parts, strict=False))
    return replace(schedule, ranks=ranks, divides_vocabulary=True)


def without_vocabulary(schedule: Schedule) -> Schedule:
    """Return `schedule` without the tasks of parts of the vocabulary."""
    if not schedule.divides_vocabulary:
        return schedule
    ranks = tuple(tuple(task for task in tasks if task.kind not in PART_KINDS) for tasks in schedule.ranks)
    return replace(schedule, ranks=ranks, divides_vocabulary=False)


def _ahead(tasks: tuple[Task, ...], number: int) -> tuple[Task, ...]:
    """Return a rank's tasks with so many forwards more before each of the others; either keep their order.

    >>> program = "0F0 0B0 0F1 0B1 0F2 0B2".split()
    >>> " ".join(map(str, _ahead(tuple(map(Task.parse, program)), 1)))
    '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    forwards = deque(task for task in tasks if task.kind == "F")
    found: list[Task] = []
    before = done = 0
    for task in tasks:
        if task.kind == "F":
            before += 1
            continue
        while forwards and done < before + number:
            found.append(forwards.popleft())
            done += 1
        found.append(task)
    return (*found, *forwards)


class _Insertion:
    """Free-running ranks with programs of the stages' tasks, which run the parts' tasks when they can.

    What all parts write is one value here, of part 0, there when the last of them has written it.
    """

    def __init__(self, schedule: Schedule, costs: Costs):
        self.schedule, self.hop_s = schedule, costs.hop_s
        places: list[tuple[Kind, int]] = [(kind, place) for kind in ALL_KINDS for place in schedule.places(kind)]
        self.seconds = {(kind, place): costs.seconds(kind, place, schedule.num_chunks) for kind, place in places}
        self.reads = {(kind, place): self._reads(Task(place, kind, 0)) for kind, place in places}
        self.writes = {(kind, place): writes(Task(place, kind, 0)) for kind, place in places}
        ranks = range(schedule.num_ranks)
        # of each rank and kind the microbatches left: parts take them in the order in which stages do
        self.left = [{kind: deque(self._order(kind)) for kind in _PRIORITY} for _ in ranks]
        forwards = self._order("E")
        # a microbatch is embedded once the first stage has done with the one that many before it
        self.released_by = dict(zip(forwards[AHEAD:], forwards, strict=False))
        self.at = [0] * schedule.num_ranks
        self.free_s = [0.0] * schedule.num_ranks
        self.found: list[list[Task]] = [[] for _ in ranks]
        self.written_s: dict[Written, float] = {}
        self.parts_left: dict[Written, int] = {}  # of what all parts write
        self.waiting: dict[Written, set[int]] = {}  # ranks that may go on once a value is there
        self.queue: list[tuple[float, int]] = []
        self.queued_s: list[float] = [inf] * schedule.num_ranks  # the entry of each rank that counts

    def run(self) -> Schedule:
        """Return the schedule with all tasks; a rank that could not go on lacks the rest, which `validate` refuses."""
        for rank in range(self.schedule.num_ranks):
            self._queue(rank, 0.0)
        while self.queue:
            now_s, rank = heapq.heappop(self.queue)
            if now_s != self.queued_s[rank]:
                continue
            self.queued_s[rank] = inf
            start_s, task = self._next(rank)
            if task is None:
                continue
            if start_s > now_s:
                self._queue(rank, start_s)
                continue
            self.free_s[rank] = end_s = start_s + self.seconds[task.kind, task.stage]
            self.found[rank].append(task)
            written = self.writes[task.kind, task.stage]
            if task.kind in PART_KINDS:
                self.left[rank][task.kind].popleft()
            else:
                self.at[rank] += 1
            for each in {rank}.union(*(self._write(value, task.microbatch, end_s) for value in written)):
                self._queue(each, max(end_s, self.free_s[each]))
        return replace(self.schedule, ranks=tuple(map(tuple, self.found)))

    def _queue(self, rank: int, at_s: float) -> None:
        """Look at a rank at a time, if not before."""
        if at_s < self.queued_s[rank]:
            self.queued_s[rank] = at_s
            heapq.heappush(self.queue, (at_s, rank))

    def _write(self, value: Value, microbatch: int, end_s: float) -> set[int]:
        """Write a value of a microbatch, and return the ranks that waited for it."""
        name, place, _ = value
        key = name, 0 if name in OF_ALL else place, microbatch
        if name in OF_ALL:
            left = self.parts_left.get(key, self.schedule.num_parts) - 1
            self.parts_left[key] = left
            if left:
                return set()
        self.written_s[key] = end_s
        return self.waiting.pop(key, set())

    def _reads(self, task: Task) -> tuple[tuple[Value, float], ...]:
        """Return what a task of microbatch 0 reads, and how long after it was written."""
        found: dict[Value, float] = {}
        for value in self.schedule.reads(task):
            key = value._replace(stage=0) if value.name in OF_ALL else value
            crosses = value.name in OF_ALL or self.schedule.rank_at(value) != self.schedule.rank_at(task)
            found[key] = self.hop_s if crosses else 0.0
        return tuple(found.items())

    def _order(self, kind: Kind) -> list[int]:
        """Return the microbatches in the order in which a stage runs what a part's tasks of this kind belong to."""
        stage, kinds = (0, "F") if kind == "E" else (0, "BI") if kind == "G" else (self.schedule.num_stages - 1, "F")
        tasks = self.schedule.ranks[self.schedule.rank_of[stage]]
        return [task.microbatch for task in tasks if task.stage == stage and task.kind in kinds]

    def _next(self, rank: int) -> tuple[float, Task | None]:
        """Return (when, which) of the task that a rank runs next, as far as it is known yet; None: of none."""
        candidates: list[tuple[float, int, Task]] = []
        for priority, kind in enumerate(_PRIORITY):
            if self.left[rank][kind]:
                task = Task(rank, kind, self.left[rank][kind][0])
                candidates.append((self._ready_s(rank, task), priority, task))
        if self.at[rank] < len(self.schedule.ranks[rank]):
            task = self.schedule.ranks[rank][self.at[rank]]
            candidates.append((self._ready_s(rank, task), len(_PRIORITY), task))
        start_s, _, task = min(candidates, default=(inf, 0, None))
        return start_s, None if start_s == inf else task

    def _ready_s(self, rank: int, task: Task) -> float:
        """Return when a rank can run a task; infinity while that is not known: the rank is queued again once it is."""
        stage, kind, m = task
        needs = [((name, place, m), after_s) for (name, place, _), after_s in self.reads[kind, stage]]
        if kind == "E" and m in self.released_by:
            needs.append((("act", 0, self.released_by[m]), 0.0))
        ready_s = self.free_s[rank]
        for value, after_s in needs:
            written_s = self.written_s.get(value)
            if written_s is None:
                self.waiting.setdefault(value, set()).add(rank)
                return inf
            if written_s + after_s > ready_s:
                ready_s = written_s + after_s
        return ready_s
