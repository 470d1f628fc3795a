"""Pairs of tasks, an F and a B or I, that are neighbours in a rank's order and run as one program.

A pair starts once both tasks can start, and its values exist once both have ended, so other ranks
may wait longer. Tasks are paired only if the step then takes at most `MOST_LONGER` times as long as
without pairs. Step times follow from the schedule's relative costs; a pair is assumed to take as
long as its two tasks in sequence.
"""

from collections import deque
from itertools import islice, pairwise

from ppctl.errors import ScheduleError
from ppctl.schedule.costs import Costs
from ppctl.schedule.execution_order import NEVER, ChoosingRanks, Chosen, Jobs
from ppctl.schedule.families.registry import FAMILIES, build
from ppctl.schedule.ir import Schedule, Task

MOST_LONGER = 1.03  # largest allowed factor on the step time
PAIRS = ("FB", "BF", "FI", "IF")  # kinds of two tasks that can run as one program


def fused_order(schedule: Schedule, costs: Costs) -> list[tuple[Task, ...]]:
    """Return the tasks of all ranks by start, pairs together, each after the tasks it depends on.

    When a rank can start a task, it pairs the task with its next one if the values that both read
    are written and the pair ends early enough for the tasks that depend on it.

    >>> from ppctl.schedule.families.one_f_one_b import eager_1f1b
    >>> order = fused_order(eager_1f1b(2, 4), Costs())
    >>> [" ".join(map(str, tasks)) for tasks in order if len(tasks) == 2]
    ['0B0 0F3']
    """
    jobs = Jobs(schedule, costs)
    ranks, latest_s, seconds = ChoosingRanks(jobs), _latest_ends(jobs), jobs.seconds
    rest = [deque(order) for order in jobs.first]
    found = list[tuple[float, tuple[int, ...]]]()

    def choose(rank: int, now_s: float) -> Chosen:
        """Run a rank's next task, or its next two as a pair if both end in time."""
        group = tuple(islice(rest[rank], 2))
        start_s = max(now_s, ranks.ready_s(group[0])) if group else NEVER
        if start_s > now_s:
            return (), start_s
        kinds = "".join(jobs.tasks[task].kind for task in group)
        together_s = max(now_s, ranks.ready_s(group[-1])) if kinds in PAIRS else NEVER
        if together_s > min(latest_s[task] for task in group) - sum(seconds[n] for n in group):
            group, together_s = group[:1], now_s
        for _ in group:
            rest[rank].popleft()
        found.append((together_s, group))
        return group, together_s

    ranks.run(choose)
    found.sort(key=lambda each: each[0])
    return [tuple(jobs.tasks[task] for task in group) for _, group in found]


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
