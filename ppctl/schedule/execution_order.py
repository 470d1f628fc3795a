"""The one walk over a schedule: tasks in an order that ranks can really run, with start and end.

The dependency rule of `ir` is the same for every microbatch, so it is evaluated once for each stage
and kind; the walk then runs on integers. A schedule of 131,072 tasks takes a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ppctl.schedule.ir import WRITES, Kind, Schedule, Task, writes
from ppctl.schedule.schedule_faults import fault, order_that_blocks

# by kind and stage the values that a task reads: (base, seconds after it was written)
Arrivals = dict[Kind, list[tuple[tuple[int, float], ...]]]
NEVER = float("inf")


@dataclass(frozen=True)
class Rule:
    """The dependency rule in integers: the number of value (name, stage, m) is its base plus m.

    `reads[kind][stage]` are (base, does the value cross ranks), `writes[kind][stage]` are bases.
    Kinds of the vocabulary have the part for the stage.
    """

    num_values: int
    base: dict[tuple[str, int], int]
    reads: dict[Kind, list[tuple[tuple[int, bool], ...]]]
    writes: dict[Kind, list[tuple[int, ...]]]

    @staticmethod
    def of(schedule: Schedule) -> Rule:
        values = dict.fromkeys(name for names in WRITES.values() for name in names)
        names = [(name, at) for name in values for at in range(len(schedule.ranks_of(name)))]
        base = {place: i * schedule.num_microbatches for i, place in enumerate(names)}

        def read_by(task: Task) -> tuple[tuple[int, bool], ...]:
            rank_at, here = schedule.rank_at, schedule.rank_at(task)
            return tuple((base[v[:2]], rank_at(v) != here) for v in schedule.reads(task))

        def written_by(task: Task) -> tuple[int, ...]:
            return tuple(base[value[:2]] for value in writes(task))

        tasks: dict[Kind, list[Task]] = {
            k: [Task(place, k, 0) for place in range(len(schedule.ranks_of(k)))] for k in WRITES
        }
        return Rule(
            len(names) * schedule.num_microbatches,
            base,
            {kind: list(map(read_by, of_kind)) for kind, of_kind in tasks.items()},
            {kind: list(map(written_by, of_kind)) for kind, of_kind in tasks.items()},
        )

    def arrivals(self, hop_s: float) -> Arrivals:
        """Return `reads` with the seconds from writing to reading: hop_s between ranks, else 0."""

        def delayed(needs: tuple[tuple[int, bool], ...]) -> tuple[tuple[int, float], ...]:
            return tuple((base, hop_s if crosses else 0.0) for base, crosses in needs)

        return {kind: list(map(delayed, of_stage)) for kind, of_stage in self.reads.items()}


def check_order(schedule: Schedule) -> None:
    """Raise ScheduleError, with the grid and an arrow, when ranks wait for each other for ever."""
    for _ in timed_walk(schedule, lambda kind, stage: 0.0, 0.0):
        pass


def timed_walk(
    schedule: Schedule, seconds: Callable[[Kind, int], float], hop_s: float
) -> Iterator[tuple[int, int, Task, float, float]]:
    """Yield (rank, step, task, start, end): tasks start once rank is free and values arrived.

    seconds(kind, stage) is how long a task takes; a value that crosses ranks arrives `hop_s` after
    it was written. The other walks are special for a reason: `Jobs.run` numbers tasks and gives up
    early (thousands of runs of one search), `pack` counts ticks, `free_running` slows ranks down,
    and in `ChoosingRanks` ranks choose their tasks.
    """
    rule = Rule.of(schedule)
    arrivals = rule.arrivals(hop_s)
    # 1. for each kind and stage: its reads, its writes, how long it takes
    plan = {
        kind: [(reads, rule.writes[kind][s], seconds(kind, s)) for s, reads in enumerate(of_kind)]
        for kind, of_kind in arrivals.items()
    }
    written_s: list[float | None] = [None] * rule.num_values
    waiting: dict[int, list[int]] = {}
    at, free_s = [0] * schedule.num_ranks, [0.0] * schedule.num_ranks
    ready = list(range(schedule.num_ranks))
    # 2. each ready rank goes on until a value is missing; who writes it makes the rank ready again
    while ready:
        rank = ready.pop()
        tasks, step, start = schedule.ranks[rank], at[rank], free_s[rank]
        while step < len(tasks):
            task = tasks[step]
            stage, kind, m = task
            needs, makes, lasts_s = plan[kind][stage]
            missing = None
            for base, after_s in needs:
                arrives = written_s[base + m]
                if arrives is None:
                    missing = base + m
                    break
                if arrives + after_s > start:
                    start = arrives + after_s
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            end = start + lasts_s
            yield rank, step, task, start, end
            for base in makes:
                written_s[base + m] = end
                if base + m in waiting:
                    ready.extend(waiting.pop(base + m))
            step, start, free_s[rank] = step + 1, end, end
        at[rank] = step
    _check_done(schedule, rule, at, written_s)


def _check_done(schedule: Schedule, rule: Rule, at: list[int], written: list[float | None]) -> None:
    """Raise ScheduleError for the first rank that could not finish."""
    for rank, tasks in enumerate(schedule.ranks):
        if at[rank] < len(tasks):
            task = tasks[at[rank]]
            reads = schedule.reads(task)
            missing = next(v for v in reads if written[rule.base[v[:2]] + v.microbatch] is None)
            what = f"{task} waits for {missing}, which no rank can write any more. "
            what += order_that_blocks(schedule, at)
            raise fault(schedule, rank, at[rank], what.rstrip())
