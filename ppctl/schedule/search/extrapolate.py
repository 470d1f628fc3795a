"""The cost of schedules too large to simulate, from smaller ones that are shown to grow by equal steps.

docs/derivations.md, "Extrapolating large schedules", says why that is sound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from ppctl.errors import ScheduleError
from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import KINDS, Schedule, Task
from ppctl.schedule.simulate import Timeline, simulate

Build = Callable[[int, int], Schedule]  # from ranks and microbatches

MOST_TASKS = 500_000  # of one simulation and one chunk a rank, about a second
MOST_SAMPLE_TASKS = 1_000_000  # of the largest schedule that an extrapolation rests on
MOST_RANKS = 64  # above, ranks are extrapolated together with the microbatches
WARM_ROUNDS = 3  # of p microbatches: past the warm-up of every family
RESIDUES = 12  # families differ by p mod 2 (V-Half) and p mod 3 (V-Min); ranks grow by multiples of both
LEAST_RANKS = 16
TOLERANCE = 1e-9  # of equal steps, relative: rounding only


@dataclass(frozen=True)
class Extrapolation:
    """The cost of a schedule of `num_ranks` and `num_microbatches`; `simulated` are the (p, m) it rests on."""

    num_ranks: int
    num_microbatches: int
    makespan_s: float
    period_s: float
    bubble_fraction: float
    peak_activations: float  # of the rank that holds most
    simulated: tuple[tuple[int, int], ...]


def extrapolate(build: Build, num_ranks: int, num_microbatches: int, costs: Costs) -> Extrapolation:
    """Return the cost of build(num_ranks, num_microbatches): simulated up to 500,000 tasks, else extrapolated.

    Up to 64 ranks from three schedules with fewer microbatches, a whole number of cycles of the steady state apart;
    above, from four schedules with fewer ranks and the same m/p.
    ScheduleError unless all that is reported grows by equal steps between them.

    >>> from ppctl.schedule.families.one_f_one_b import one_f_one_b
    >>> extrapolate(one_f_one_b, 1024, 4096, Costs()).makespan_s
    15357.0
    """
    if 3 * num_ranks * num_microbatches <= MOST_TASKS:
        sizes = [(num_ranks, num_microbatches)]
    elif num_ranks <= MOST_RANKS:
        sizes = _sizes_of_fewer_microbatches(build, num_ranks, num_microbatches, costs)
    else:
        sizes = _sizes_of_fewer_ranks(num_ranks, num_microbatches, costs)
    measured = [_numbers(simulate(build(p, m), costs)) for p, m in sizes]
    _check_equal_steps(sizes, measured, (num_ranks, num_microbatches))
    along = (num_microbatches - sizes[0][1]) / max(1, sizes[-1][1] - sizes[0][1])
    numbers = [first + along * (last - first) for first, last in zip(measured[0], measured[-1], strict=True)]
    makespan_s, period_s, busy_s, peak = numbers
    bubble_fraction = 1 - busy_s / makespan_s
    return Extrapolation(num_ranks, num_microbatches, makespan_s, period_s, bubble_fraction, peak, tuple(sizes))


def _sizes_of_fewer_microbatches(build: Build, num_ranks: int, m: int, costs: Costs) -> list[tuple[int, int]]:
    """Three sizes, a whole number of cycles and of p microbatches apart, and so is m."""
    probe = simulate(build(num_ranks, 2 * WARM_ROUNDS * num_ranks + m % num_ranks), costs)
    cycle = _cycle(probe)
    step = None if cycle is None else math.lcm(cycle, num_ranks)
    if step is None or 3 * probe.schedule.num_stages * (WARM_ROUNDS * num_ranks + 3 * step) > MOST_SAMPLE_TASKS:
        raise ScheduleError(
            f"{probe.schedule.name}: {num_ranks} ranks show no steady state within {probe.schedule.num_microbatches} "
            f"microbatches at these costs, so that {m} cannot be extrapolated. Simulate them, or use fewer."
        )
    first = WARM_ROUNDS * num_ranks + (m - WARM_ROUNDS * num_ranks) % step
    return [(num_ranks, first + k * step) for k in range(3)]


def _cycle(timeline: Timeline) -> int | None:
    """After how many microbatches the times of a schedule repeat, later by a constant for each stage and kind; or None.

    Looked for among the middle microbatches, which neither warm-up nor cool-down reaches.
    """
    schedule, end_s = timeline.schedule, timeline.end_s
    num_ranks = schedule.num_ranks
    middle = range(2 * num_ranks, 4 * num_ranks)
    lines = [
        [end_s[Task(stage, kind, m)] for m in middle]
        for stage in range(schedule.num_stages)
        for kind in KINDS
        if all(Task(stage, kind, m) in end_s for m in middle)  # dualpipe_v splits only some of its backwards
    ]
    close = TOLERANCE * timeline.makespan_s
    for cycle in range(1, num_ranks + 1):
        if all(abs(b[cycle] - b[0] - (b[k + cycle] - b[k])) <= close for b in lines for k in range(len(b) - cycle)):
            return cycle
    return None


def _sizes_of_fewer_ranks(num_ranks: int, num_microbatches: int, costs: Costs) -> list[tuple[int, int]]:
    """Four sizes equally far apart with the m/p of the request, their p equal to its modulo 12."""
    if any(isinstance(value, tuple) for value in vars(costs).values()):
        raise ScheduleError(
            f"num_ranks={num_ranks} is above {MOST_RANKS}, where ranks are extrapolated, but the costs are those of "
            "each stage. Give numbers for 1/p of the model."
        )
    step = math.lcm(RESIDUES, num_ranks // math.gcd(num_ranks, num_microbatches))
    first = LEAST_RANKS + (num_ranks - LEAST_RANKS) % step
    last = first + 3 * step
    if last >= num_ranks or 6 * last * last * num_microbatches // num_ranks > MOST_SAMPLE_TASKS:
        raise ScheduleError(
            f"num_microbatches/num_ranks = {num_microbatches}/{num_ranks} is the ratio of no four small schedules, "
            "from which large ones are extrapolated. "
            f"Use num_microbatches={max(1, round(num_microbatches / num_ranks)) * num_ranks}."
        )
    return [(p, p * num_microbatches // num_ranks) for p in range(first, last + 1, step)]


def _numbers(timeline: Timeline) -> list[float]:
    """Makespan, period, work of a rank on average, and the largest peak."""
    busy_s = timeline.makespan_s * (1 - timeline.bubble_fraction)
    return [timeline.makespan_s, timeline.period_s, busy_s, max(timeline.peak_activations)]


def _check_equal_steps(sizes: list[tuple[int, int]], measured: list[list[float]], wanted: tuple[int, int]) -> None:
    steps = [[after - before for before, after in zip(a, b, strict=True)] for a, b in pairwise(measured)]
    for one, other in pairwise(steps):
        for number, x, y in zip(measured[-1], one, other, strict=True):
            if abs(x - y) > TOLERANCE * number:
                raise ScheduleError(
                    f"no steady state: schedules of (ranks, microbatches) {', '.join(map(str, sizes))} grow by "
                    f"{x:.6g}, then {y:.6g}, so that of {wanted} cannot be extrapolated. Simulate it."
                )
