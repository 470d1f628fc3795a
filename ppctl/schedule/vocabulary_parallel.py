"""Embedding and head divided over the ranks by their vocabulary, as tasks of any schedule.

Vocabulary parallelism (arXiv 2411.05288): rank r has part r of embedding and head, and its tasks
E, S, T and G of each microbatch (`schedule.ir`). The last stage's backward needs all T, these the
sums of all S, and they its forward; with `delay` more microbatches in flight ranks have other work
meanwhile.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import product
from math import inf

from ppctl.errors import ScheduleError, setting
from ppctl.schedule.costs import Costs
from ppctl.schedule.execution_order import Wake, run_ranks
from ppctl.schedule.ir import ALL_KINDS, KINDS, PART_KINDS, Kind, Schedule, Task, Value, writes
from ppctl.schedule.validation import validate

DELAYS = (0, 1, 2)  # one hides the way to the sums, one that to the last output's gradient
AHEAD = 2  # microbatches by which embeddings are looked up before the first stage needs them
OF_ALL = ("embedded", "sums", "head_grad")  # values that readers need from all parts
Written = tuple[str, int, int]  # a `Value` without the class: thousands a second are made
_PRIORITY: tuple[Kind, ...] = ("T", "S", "E", "G")  # which of its part's ready tasks a rank runs


def with_vocabulary(
    schedule: Schedule, delay: int | None = None, costs: Costs | None = None
) -> Schedule:
    """Return `schedule` with embedding and head divided over its ranks.

    Each rank's forwards go `delay` microbatches further ahead of its backwards, and it holds as
    many more at most; None: the least of `DELAYS` that makes the schedule shortest. A rank runs the
    tasks of its part between those of its stages, once their values are there, at these costs
    (None: the papers' units). ScheduleError for one rank, a vocabulary divided already, or a delay
    with which ranks wait for each other.

    >>> from ppctl.schedule.families.one_f_one_b import one_f_one_b
    >>> [str(task) for task in with_vocabulary(one_f_one_b(2, 1)).ranks[1]]
    ['1E0', '1F0', '1S0', '1T0', '1B0', '1G0']
    """
    whole = setting("schedule.vocab", "whole")
    if schedule.num_ranks == 1:
        raise ScheduleError(
            f"{schedule.name}: {setting('schedule.vocab', 'parallel')} divides embedding and head "
            f"over the ranks of the pipeline, but num_ranks=1. Use {whole}, or more ranks."
        )
    if schedule.vocab_parts:
        what = "its tasks divide the vocabulary already (E, S, T and G)"
        raise ScheduleError(f"{schedule.name}: {what}. Use {whole}.")
    delays = DELAYS if delay is None else (delay,)
    timed = [_delayed(schedule, each, costs or Costs()) for each in delays]
    return validate(min(timed, key=lambda each: each[0])[1])


def _delayed(schedule: Schedule, delay: int, costs: Costs) -> tuple[float, Schedule]:
    """Return (makespan, schedule): infinity and a part of it if ranks wait for each other."""
    programs = zip(schedule.ranks, schedule.stages_of, strict=True)
    ahead = tuple(_ahead(tasks, delay * len(stages)) for tasks, stages in programs)
    insertion = _Insertion(replace(schedule, ranks=ahead, vocab_parts=schedule.num_ranks), costs)
    divided = insertion.run()
    tasks = sum(map(len, ahead)) + schedule.num_ranks * len(PART_KINDS) * schedule.num_microbatches
    is_whole = sum(map(len, divided.ranks)) == tasks
    return round(max(insertion.free_s), 9) if is_whole else inf, divided


def with_parts(schedule: Schedule) -> Schedule:
    """Return `schedule` with the tasks of all parts at the end.

    For uses that ignore their order: counts of tasks, and ticks, in which ranks meet anyway.
    """
    cells = list(product(PART_KINDS, range(schedule.num_microbatches)))
    parts = ([Task(r, kind, m) for kind, m in cells] for r in range(schedule.num_ranks))
    ranks = tuple((*tasks, *more) for tasks, more in zip(schedule.ranks, parts, strict=True))
    return replace(schedule, ranks=ranks, vocab_parts=schedule.num_ranks)


def without_vocabulary(schedule: Schedule) -> Schedule:
    """Return `schedule` without the tasks of parts of the vocabulary."""
    if not schedule.vocab_parts:
        return schedule
    of_stages = ((task for task in tasks if task.kind in KINDS) for tasks in schedule.ranks)
    return replace(schedule, ranks=tuple(map(tuple, of_stages)), vocab_parts=0)


def _ahead(tasks: tuple[Task, ...], number: int) -> tuple[Task, ...]:
    """Return a rank's tasks with `number` more forwards before each of the others; order is kept.

    >>> program = "0F0 0B0 0F1 0B1 0F2 0B2".split()
    >>> " ".join(map(str, _ahead(tuple(map(Task.parse, program)), 1)))
    '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    forwards = deque(task for task in tasks if task.kind == "F")
    moved: list[Task] = []
    before = done = 0
    for task in tasks:
        if task.kind == "F":
            before += 1
            continue
        while forwards and done < before + number:
            moved.append(forwards.popleft())
            done += 1
        moved.append(task)
    return (*moved, *forwards)


class _Insertion:
    """Free-running ranks with programs of stages' tasks, which run parts' tasks when they can.

    A value that all parts write is one value, of part 0, written when the last part has written it.
    """

    def __init__(self, schedule: Schedule, costs: Costs):
        self.schedule, self.hop_s = schedule, costs.transfer_s
        places: list[tuple[Kind, int]] = [
            (kind, place) for kind in ALL_KINDS for place in schedule.places(kind)
        ]
        self.seconds = {each: costs.seconds(*each, schedule.num_chunks) for each in places}
        self.reads = {(kind, place): self._reads(Task(place, kind, 0)) for kind, place in places}
        self.writes = {(kind, place): writes(Task(place, kind, 0)) for kind, place in places}
        # microbatches left by rank and kind, in the order of the stage that the kind belongs to
        self.left: list[dict[Kind, deque[int]]]
        self.left = [{kind: deque(self._order(kind)) for kind in _PRIORITY} for _ in schedule.ranks]
        forwards = self._order("E")
        # the first stage's microbatch that must be done before one is embedded
        self.released_by = dict(zip(forwards[AHEAD:], forwards, strict=False))
        self.at, self.free_s = [0] * schedule.num_ranks, [0.0] * schedule.num_ranks
        self.done: list[list[Task]] = [[] for _ in schedule.ranks]
        self.written_s: dict[Written, float] = {}
        self.parts_left: dict[Written, int] = {}  # of values that all parts write
        self.waiting: dict[Written, set[int]] = {}  # ranks that may go on once a value is there

    def run(self) -> Schedule:
        """Return the schedule with all tasks; `validate` refuses that of a rank that got stuck."""
        run_ranks(self.schedule.num_ranks, self._act)
        return replace(self.schedule, ranks=tuple(map(tuple, self.done)))

    def _act(self, rank: int, now_s: float) -> tuple[float, list[Wake]]:
        """Run the next task of a rank, or wait for it. Readers of its values are woken."""
        start_s, task = self._next(rank)
        if task is None or start_s > now_s:
            return now_s, [] if task is None else [(start_s, rank)]
        self.free_s[rank] = end_s = start_s + self.seconds[task.kind, task.stage]
        self.done[rank].append(task)
        if task.kind in PART_KINDS:
            self.left[rank][task.kind].popleft()
        else:
            self.at[rank] += 1
        written = self.writes[task.kind, task.stage]
        woken = {rank}.union(*(self._write(value, task.microbatch, end_s) for value in written))
        return end_s, [(max(end_s, self.free_s[each]), each) for each in woken]

    def _write(self, value: Value, microbatch: int, end_s: float) -> set[int]:
        """Write a value of a microbatch, and return the ranks that waited for it."""
        name, place, _ = value
        key = name, 0 if name in OF_ALL else place, microbatch
        if name in OF_ALL:
            left = self.parts_left.get(key, self.schedule.vocab_parts) - 1
            self.parts_left[key] = left
            if left:
                return set()
        self.written_s[key] = end_s
        return self.waiting.pop(key, set())

    def _reads(self, task: Task) -> tuple[tuple[Value, float], ...]:
        """Return the values that a task of microbatch 0 reads, with their seconds of transfer."""
        found: dict[Value, float] = {}
        rank_at = self.schedule.rank_at
        for value in self.schedule.reads(task):
            is_of_all = value.name in OF_ALL
            crosses = is_of_all or rank_at(value) != rank_at(task)
            found[value._replace(stage=0) if is_of_all else value] = self.hop_s if crosses else 0.0
        return tuple(found.items())

    def _order(self, kind: Kind) -> list[int]:
        """Return the microbatches in the order of the stage that a kind of parts belongs to."""
        stage = 0 if kind in "EG" else self.schedule.num_stages - 1
        kinds = "BI" if kind == "G" else "F"
        tasks = self.schedule.ranks[self.schedule.rank_of[stage]]
        return [task.microbatch for task in tasks if task.stage == stage and task.kind in kinds]

    def _next(self, rank: int) -> tuple[float, Task | None]:
        """Return (start, task) of the task that a rank runs next; (inf, None) if unknown yet."""
        tasks = [Task(rank, k, left[0]) for k, left in self.left[rank].items() if left]
        tasks += self.schedule.ranks[rank][self.at[rank] : self.at[rank] + 1]
        start_s, task = min(
            ((self._ready_s(rank, task), task) for task in tasks),
            key=lambda each: each[0],
            default=(inf, None),
        )
        return start_s, None if start_s == inf else task

    def _ready_s(self, rank: int, task: Task) -> float:
        """Return when a rank can run a task; infinity, and a wake later, if that is not known."""
        stage, kind, m = task
        needs = [((name, at, m), after_s) for (name, at, _), after_s in self.reads[kind, stage]]
        if kind == "E" and m in self.released_by:
            needs.append((("act", 0, self.released_by[m]), 0.0))
        ready_s = self.free_s[rank]
        for value, after_s in needs:
            written_s = self.written_s.get(value)
            if written_s is None:
                self.waiting.setdefault(value, set()).add(rank)
                return inf
            ready_s = max(ready_s, written_s + after_s)
        return ready_s
