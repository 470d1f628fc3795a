"""The least time under a memory cap: bytes held times seconds must find room on every rank.

Every microbatch's stash lives at least through the forwards after it and the input gradients back
to it. On each rank the sum of these sizes times lives is at most the cap times the time in which
the rank runs tasks (the argument of `lower_bounds.peak_activations_bound`, turned round).
"""

from __future__ import annotations

import math

from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import Schedule
from ppctl.schedule.lower_bounds import makespan_bound_s, outside_s, period_bound_s, trips_s
from ppctl.schedule.search.placement_costs import Ledger


def bound_under_cap_s(
    schedule: Schedule, costs: Costs, ledger: Ledger, cap: int, *, by_period: bool = False
) -> float:
    """Return the least makespan (or period) of any order of these tasks with no rank above `cap`.

    Infinite where a rank has no room for a microbatch.

    >>> from ppctl.schedule.families.one_f_one_b import one_f_one_b
    >>> schedule = one_f_one_b(4, 8)
    >>> [bound_under_cap_s(schedule, Costs(), Ledger.counted(schedule), cap) for cap in (0, 2, 4)]
    [inf, 48.0, 33.0]
    """
    # 1. the bound without a cap
    if ledger.least(schedule) > cap:
        return math.inf
    least_s = (period_bound_s if by_period else makespan_bound_s)(schedule, costs)
    trip_s, chunks = trips_s(schedule, costs), schedule.num_chunks
    stages_s = [
        {kind: costs.seconds(kind, s, chunks) for kind in "IW"} for s in range(schedule.num_stages)
    ]

    def held_s(stage: int) -> float:
        """Return units held times seconds of a microbatch. Other backwards may be whole."""
        stash, seconds = ledger.stash[stage], stages_s[stage]
        if not schedule.is_split:
            return stash * trip_s[stage]
        whole = stash * (trip_s[stage] + seconds["W"])
        if ledger.pending is None:
            return whole
        pending = ledger.pending[stage] * (seconds["I"] + seconds["W"])
        return min(whole, stash * trip_s[stage] + pending)

    # 2. each rank's sum of sizes times lives, over its room
    elsewhere_s = [0.0] * schedule.num_ranks if by_period else outside_s(schedule, costs)
    for stages, held, other_s in zip(schedule.stages_of, ledger.held, elsewhere_s, strict=True):
        needs = schedule.num_microbatches * sum(map(held_s, stages))
        if needs:
            least_s = max(least_s, other_s + needs / (cap - held) if cap > held else math.inf)
    return least_s
