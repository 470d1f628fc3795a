"""Lower bounds on time and memory that no schedule can beat: docs/derivations.md, "Lower bounds".

They hold for any placement and any costs of the stages. The bound on time under a memory cap: each
stash lives at least while its microbatch goes forward through all later stages and its gradient
comes back. On each rank, the sum over stashes of size times lifetime is at most the cap times the
time from the rank's first task to its last.
"""

import math

from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import Schedule
from ppctl.schedule.placement_costs import Ledger


def period_bound_s(schedule: Schedule, costs: Costs) -> float:
    """Return the least period in seconds: the work of the busiest rank.

    >>> from ppctl.schedule.families.one_f_one_b import one_f_one_b
    >>> period_bound_s(one_f_one_b(8, 32), Costs())
    96.0
    """
    return max(rank_work_s(schedule, costs))


def makespan_bound_s(
    schedule: Schedule, costs: Costs, num_microbatches: int | None = None
) -> float:
    """Return the least makespan, in seconds, of any order of these tasks.

    It is the largest sum, over the ranks, of a rank's work and its time outside it (`outside_s`).
    num_microbatches: number of microbatches to assume; None: that of the schedule.

    >>> from ppctl.schedule.families.one_f_one_b import one_f_one_b
    >>> makespan_bound_s(one_f_one_b(8, 32), Costs())
    117.0
    """
    times = 1.0 if num_microbatches is None else num_microbatches / schedule.num_microbatches
    parts = zip(outside_s(schedule, costs), rank_work_s(schedule, costs), strict=True)
    return max(other_s + work_s * times for other_s, work_s in parts)


def peak_activations_bound(schedule: Schedule, costs: Costs, period_s: float) -> tuple[float, ...]:
    """Return a lower bound of each rank's peak activations, for any order within period_s.

    Activations are in microbatches through 1/p of the model (p ranks). period_s: seconds of a step.
    The peak is at least the sum of lifespans divided by the period (the building-block argument of
    arXiv 2405.15362). An activation lives at least while its microbatch goes forward through
    all later stages, its gradient comes back, and its weight gradient is computed.
    """
    held_s, times = _held_s(schedule, costs, Ledger.counted(schedule)), schedule.num_microbatches
    lives_s = [times * sum(held_s[s] for s in stages) for stages in schedule.stages_of]
    return tuple(life_s / schedule.num_chunks / period_s for life_s in lives_s)


def bound_under_cap_s(schedule: Schedule, costs: Costs, ledger: Ledger, cap: int) -> float:
    """Return the least makespan, in seconds, of any order of these tasks within `cap` a rank.

    Infinite if a rank has no room for one microbatch. cap: in units of `ledger`.

    >>> from ppctl.schedule.families.one_f_one_b import one_f_one_b
    >>> schedule = one_f_one_b(4, 8)
    >>> [bound_under_cap_s(schedule, Costs(), Ledger.counted(schedule), cap) for cap in (0, 2, 4)]
    [inf, 48.0, 33.0]
    """
    # 1. the bound without a cap
    if ledger.least(schedule) > cap:
        return math.inf
    least_s, held_s = makespan_bound_s(schedule, costs), _held_s(schedule, costs, ledger)
    # 2. each rank's sum of sizes x lifetimes, divided by the room under the cap
    ranks = zip(schedule.stages_of, ledger.held, outside_s(schedule, costs), strict=True)
    for stages, held, other_s in ranks:
        needs = schedule.num_microbatches * sum(held_s[s] for s in stages)
        if needs:
            least_s = max(least_s, other_s + needs / (cap - held) if cap > held else math.inf)
    return least_s


def _held_s(schedule: Schedule, costs: Costs, ledger: Ledger) -> list[float]:
    """Return each stage's least memory x time for one microbatch: ledger units x seconds.

    If the schedule is split and the ledger has `pending` (memory that I hands to W), this is the
    smaller of two values: with the stash until W, or with the stash until I and `pending` until W.
    """
    held_s: list[float] = []
    for s, trip_s in enumerate(trips_s(schedule, costs)):
        i_s, w_s = (costs.seconds(kind, s, schedule.num_chunks) for kind in "IW")
        whole_s = ledger.stash[s] * (trip_s + (w_s if schedule.is_split else 0.0))
        if schedule.is_split and ledger.pending is not None:
            split_s = ledger.stash[s] * trip_s + ledger.pending[s] * (i_s + w_s)
            whole_s = min(whole_s, split_s)
        held_s.append(whole_s)
    return held_s


def trips_s(schedule: Schedule, costs: Costs) -> list[float]:
    """Return each stage's least seconds from the start of a forward to the end of its I (or B)."""
    kinds, last = ("F", _backward_kind(schedule)), schedule.num_stages - 1
    trip_s = _chain_s(schedule, costs, kinds)
    whole_s = trip_s[-1]
    for kind in kinds:
        whole_s += costs.seconds(kind, last, schedule.num_chunks)
    return [whole_s - before_s for before_s in trip_s]


def outside_s(schedule: Schedule, costs: Costs) -> list[float]:
    """Return each rank's least seconds before its first task plus after its last one.

    The time after the last task counts as 0 if that task may be a weight gradient.
    """
    before_s = _chain_s(schedule, costs, ("F",))
    after_s = _chain_s(schedule, costs, (_backward_kind(schedule),))
    may_end_with_w = [any(kind == "W" for kind, _, _ in rank) for rank in schedule.counts]
    return [
        min(before_s[s] for s in stages) + (0.0 if ends else min(after_s[s] for s in stages))
        for stages, ends in zip(schedule.stages_of, may_end_with_w, strict=True)
    ]


def rank_work_s(schedule: Schedule, costs: Costs) -> list[float]:
    """Return the seconds of each rank's tasks."""
    chunks = schedule.num_chunks
    return [
        sum(number * costs.seconds(kind, s, chunks) for kind, s, number in rank)
        for rank in schedule.counts
    ]


def _backward_kind(schedule: Schedule) -> str:
    """Return the kind that passes gradients on: I if any backward is split, else B."""
    return "I" if schedule.is_split else "B"


def _chain_s(schedule: Schedule, costs: Costs, kinds: tuple[str, ...]) -> list[float]:
    """Return the seconds of a microbatch's `kinds`, transfers included, before each stage."""
    total_s, chain_s = 0.0, [0.0]
    for stage in range(schedule.num_stages - 1):
        crosses = schedule.rank_of[stage] != schedule.rank_of[stage + 1]
        for kind in kinds:
            total_s += costs.seconds(kind, stage, schedule.num_chunks) + crosses * costs.transfer_s
        chain_s.append(total_s)
    return chain_s
