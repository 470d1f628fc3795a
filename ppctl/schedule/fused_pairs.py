"""Pairs of tasks, an F and a B or I, that are neighbours in a rank's order and run as one program.

A pair starts once both tasks can start, and its values exist once both have ended, so other ranks
may wait longer. Tasks are paired only if the step then takes at most `MOST_LONGER` times as long as
without pairs. Step times follow from the schedule's relative costs; a pair is assumed to take as
long as its two tasks in sequence.
"""

from heapq import heappop, heappush
from itertools import islice, pairwise

from ppctl.errors import ScheduleError
from ppctl.schedule.costs import Costs
from ppctl.schedule.execution_order import Jobs
from ppctl.schedule.families.registry import FAMILIES, build
from ppctl.schedule.ir import Schedule, Task

MOST_LONGER = 1.03  # largest allowed factor on the step time


def fused_order(schedule: Schedule, costs: Costs) -> list[tuple[Task, ...]]:
    """Return the tasks of all ranks by start, pairs together, each after the tasks it depends on.

    When a rank can start a task, it pairs the task with its next one if the values that both read
    are written and the pair ends early enough for the tasks that depend on it.

    >>> from ppctl.schedule.families.one_f_one_b import eager_1f1b
    >>> order = fused_order(eager_1f1b(2, 4), Costs())
    >>> [" ".join(map(str, tasks)) for tasks in order if len(tasks) == 2]
    ['0B0 0F3']
    """
    # 1. tasks as numbers; each rank's next step, and the end of its last task
    jobs = Jobs(schedule, costs)
    latest_s, seconds, microbatch = _latest_ends(jobs), jobs.seconds, jobs.microbatch
    at, free_s = [0] * jobs.num_ranks, [0.0] * jobs.num_ranks
    written_s, starts = dict[int, float](), list[tuple[float, int]]()  # (seconds, rank)
    waiting, found = set(range(jobs.num_ranks)), list[tuple[float, list[int]]]()

    def ready_s(task: int, free_s: float) -> float | None:
        """Return a task's start in seconds on a rank free at free_s; None if still unknown."""
        reads = {base + microbatch[task]: hop_s for base, hop_s in jobs.needs[task]}
        if not reads.keys() <= written_s.keys():
            return None
        return max([free_s, *(written_s[value] + hop_s for value, hop_s in reads.items())])

    # 2. in order of time, run a rank's next task, or its next two as a pair if both end in time
    while True:
        for rank in [*waiting]:
            for task in jobs.first[rank][at[rank] : at[rank] + 1]:
                if (start_s := ready_s(task, free_s[rank])) is not None:
                    heappush(starts, (start_s, rank))
                    waiting.remove(rank)
        if not starts:
            break
        start_s, rank = heappop(starts)
        group = jobs.first[rank][at[rank] : at[rank] + 2]
        together_s = ready_s(group[-1], start_s) if _can_pair(jobs, group) else None
        must_start_s = min(latest_s[task] for task in group) - sum(seconds[task] for task in group)
        if together_s is None or together_s > must_start_s:
            group, together_s = group[:1], start_s
        found.append((together_s, group))
        at[rank] += len(group)
        free_s[rank] = together_s + sum(seconds[task] for task in group)
        made = (base + microbatch[task] for task in group for base in jobs.makes[task])
        written_s |= dict.fromkeys(made, free_s[rank])
        waiting.add(rank)
    found.sort(key=lambda each: each[0])
    return [tuple(jobs.tasks[task] for task in group) for _, group in found]


def _can_pair(jobs: Jobs, group: list[int]) -> bool:
    kinds = "".join(jobs.tasks[task].kind for task in group)
    return kinds in ("FB", "BF", "FI", "IF")


def _latest_ends(jobs: Jobs) -> list[float]:
    """Return the latest end of each task, in seconds, for a step MOST_LONGER times as long."""
    times = jobs.run(jobs.first)
    assert times is not None, "a valid schedule"
    latest_s = [MOST_LONGER * times.makespan_s] * len(jobs.tasks)
    writer = {base + jobs.microbatch[task]: task for task in jobs.ran for base in jobs.makes[task]}
    before = {b: a for order in jobs.first for a, b in pairwise(order)}
    for task in reversed(jobs.ran):
        start_s, m = latest_s[task] - jobs.seconds[task], jobs.microbatch[task]
        earlier = [(writer[base + m], hop_s) for base, hop_s in jobs.needs[task]]
        earlier += [(before[task], 0.0)] if task in before else []
        for other, hop_s in earlier:
            latest_s[other] = min(latest_s[other], start_s - hop_s)
    return latest_s


def with_pairs(schedule: Schedule, costs: Costs) -> tuple[int | None, list[str]]:
    """Return requests with pairs, for a schedule without: more microbatches, and three families.

    >>> with_pairs(build("dualpipe_v", 4, 4), Costs())
    (8, ['interleaved', 'eager_1f1b', 'hanayo'])
    """

    def has_pairs(name: str, number: int) -> bool:
        try:
            made = build(name, schedule.num_ranks, number)
        except ScheduleError:
            return False
        return any(len(tasks) > 1 for tasks in fused_order(made, costs))

    name, m = schedule.name, schedule.num_microbatches
    numbers = (2 * m, 4 * m, 8 * m) if name in FAMILIES else ()
    number = next((number for number in numbers if has_pairs(name, number)), None)
    return number, [*islice((each for each in FAMILIES if each != name and has_pairs(each, m)), 3)]
