"""When each task of a schedule runs: in the ticks of one program, or on free-running ranks.

Ranks may share cores, as simulated devices do: with a capacity of c, k ranks at work go on at the
speed min(1, c/k) each (processor sharing).
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, chain, pairwise
from math import inf

from ppctl.schedule.costs import Costs
from ppctl.schedule.execution_order import Jobs
from ppctl.schedule.ir import Schedule, Task
from ppctl.schedule.lockstep_ticks import tick_phases
from ppctl.schedule.simulator import Timeline, simulate
from ppctl.schedule.tick_lowering import Ticks
from ppctl.schedule.validation import check_order

ROUNDING = 1e-12  # relative


def together_s(works_s: Sequence[float], capacity: float) -> float:
    """Return the seconds until all of `works_s`, which start together, are done.

    >>> together_s([1.0, 1.0, 3.0], capacity=2.0)
    3.5
    """
    left = len(works_s)
    if left <= capacity:
        return max(works_s, default=0.0)
    done = elapsed = 0.0
    for work in sorted(works_s):
        elapsed += (work - done) * max(1.0, left / capacity)
        done, left = work, left - 1
    return elapsed


def timeline_at(
    schedule: Schedule, ticks: Ticks | None, costs: Costs, capacity: float = inf
) -> Timeline:
    """Return the timeline at these costs: in ticks, or of free-running ranks if there are none."""
    if ticks is None:
        return free_running(schedule, costs, capacity)
    return _lockstep(ticks, costs, capacity)


def free_running(schedule: Schedule, costs: Costs, capacity: float = inf) -> Timeline:
    """Return the timeline of free ranks that share `capacity`; transfers take none.

    >>> from ppctl.schedule.families.one_f_one_b import one_f_one_b
    >>> free_running(one_f_one_b(2, 4), Costs(), capacity=1.0).makespan_s
    24.0
    """
    if capacity >= schedule.num_ranks:
        return simulate(schedule, costs)
    costs.check(schedule.num_stages, schedule.vocab_parts)
    jobs, now = Jobs(schedule, costs), 0.0
    at, written_s = [0] * schedule.num_ranks, [inf] * jobs.num_values  # each rank's step
    left: dict[int, float] = {}  # seconds at full speed left of each working rank's task
    start_s, end_s = dict[Task, float](), dict[Task, float]()
    while True:
        # 1. every idle rank begins its next task, if all that it reads is there
        arrives_s = inf  # the first of the values that ranks wait for
        for rank, order in enumerate(jobs.first):
            if rank in left or at[rank] == len(order):
                continue
            task = order[at[rank]]
            m, needs = jobs.microbatch[task], jobs.needs[task]
            ready = max((written_s[base + m] + after for base, after in needs), default=0.0)
            if ready <= now * (1 + ROUNDING):
                left[rank], start_s[jobs.tasks[task]] = jobs.seconds[task], now
            else:
                arrives_s = min(arrives_s, ready)
        if not left and arrives_s == inf:
            break
        # 2. all at work go on until one is done, or a value arrives
        speed = min(1.0, capacity / len(left)) if left else 1.0
        until = min(*(seconds / speed for seconds in left.values()), arrives_s - now, inf)
        now += until
        for rank in list(left):
            left[rank] -= until * speed
            if left[rank] <= ROUNDING * now:
                del left[rank]
                task = jobs.first[rank][at[rank]]
                end_s[jobs.tasks[task]] = now
                for base in jobs.makes[task]:
                    written_s[base + jobs.microbatch[task]] = now
                at[rank] += 1
    if len(end_s) < len(jobs.tasks):
        check_order(schedule)  # raises the error that names the missing value
    return Timeline(schedule, costs, start_s, end_s, is_uneven=True)


def _lockstep(ticks: Ticks, costs: Costs, capacity: float) -> Timeline:
    """Return the timeline of ticks in lockstep, each as long as its slowest rank and transfers.

    Ranks meet after each phase of a tick. Those that share `capacity` go on alike: when one has
    done w seconds of work, every other has too, or has ended.
    """
    start_s, end_s = dict[Task, float](), dict[Task, float]()
    now, chunks = 0.0, ticks.schedule.num_chunks
    for phase in chain.from_iterable(tick_phases(ticks.schedule, ticks.cells)):
        of_ranks = [[costs.seconds(t.kind, t.stage, chunks) for t in tasks] for tasks in phase]
        works_s = [sum(seconds) + costs.transfer_s for seconds in of_ranks]

        @cache
        def after(work_s: float, works_s: list[float] = works_s) -> float:
            """Return the seconds until a rank of this phase has done work_s of its work."""
            return together_s([min(each, work_s) for each in works_s], capacity)

        for tasks, seconds in zip(phase, of_ranks, strict=True):
            at_s = [now + after(done_s) for done_s in accumulate(seconds, initial=0.0)]
            for task, span in zip(tasks, pairwise(at_s), strict=True):
                start_s[task], end_s[task] = span
        now += after(max(works_s))
    return Timeline(ticks.schedule, costs, start_s, end_s, is_uneven=True)
