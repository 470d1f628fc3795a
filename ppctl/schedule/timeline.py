"""When each task of a schedule runs: in the ticks of one program, or on free-running ranks."""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise
from math import inf

from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import Schedule, Task
from ppctl.schedule.lockstep_ticks import phases
from ppctl.schedule.shared_cores import free_running, together_s
from ppctl.schedule.simulator import Timeline
from ppctl.schedule.tick_lowering import Ticks, how_divided


def timeline_at(
    schedule: Schedule, ticks: Ticks | None, costs: Costs, capacity: float = inf
) -> Timeline:
    """Return the timeline at these costs: in ticks, or of free-running ranks if there are none."""
    if ticks is None:
        return free_running(schedule, costs, capacity)
    return _lockstep(ticks, costs, capacity)


def _lockstep(ticks: Ticks, costs: Costs, capacity: float) -> Timeline:
    """Return the timeline of ticks in lockstep, each as long as its slowest rank and transfers.

    Ranks meet after each phase of a tick. Those that share `capacity` go on alike: when one has
    done w seconds of work, every other has too, or has ended.
    """
    start_s, end_s = dict[Task, float](), dict[Task, float]()
    now, chunks, divided = 0.0, ticks.schedule.num_chunks, how_divided(ticks.schedule)
    for phase in (phase for row in ticks.cells for phase in phases(row, divided)):
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
