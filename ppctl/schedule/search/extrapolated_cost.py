"""The cost of schedules too large to simulate, from smaller ones that grow by equal steps.

Why that is sound: docs/derivations.md, "Extrapolating large schedules".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from ppctl.errors import ScheduleError
from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import KINDS, Schedule, Task
from ppctl.schedule.simulator import Timeline, simulate

Build = Callable[[int, int], Schedule]  # from ranks and microbatches

MOST_TASKS = 500_000  # of one simulation and one chunk a rank, about a second
MOST_SAMPLE_TASKS = 1_000_000  # of the largest schedule that an extrapolation rests on
MOST_RANKS = 64  # above, ranks are extrapolated together with the microbatches
WARM_ROUNDS = 3  # of p microbatches: past the warm-up of every family
RESIDUES = 12  # families differ by p mod 2 (V-Half) and mod 3 (V-Min): ranks grow by 12s
LEAST_RANKS = 16
TOLERANCE = 1e-9  # of equal steps, relative: rounding only


@dataclass(frozen=True)
class Extrapolation:
    """The cost of a schedule. simulated: the (ranks, microbatches) that it rests on."""

    num_ranks: int
    num_microbatches: int
    makespan_s: float
    period_s: float
    bubble_fraction: float
    peak_activations: float  # of the rank that holds most
    simulated: tuple[tuple[int, int], ...]


def extrapolate(build: Build, num_ranks: int, num_microbatches: int, costs: Costs) -> Extrapolation:
    """Return the cost of build(num_ranks, num_microbatches): simulated, or extrapolated if large.

    Above 500,000 tasks: up to 64 ranks from three schedules with fewer microbatches, a whole number
    of cycles of the steady state apart; else from four schedules with fewer ranks and the same m/p.
    ScheduleError unless all reported numbers grow by equal steps between them.

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
    ends = slice(None, None, max(1, len(sizes) - 1))
    found = along([m for _, m in sizes[ends]], measured[ends], num_microbatches)
    bubble_fraction = 1 - found["busy_s"] / found["makespan_s"]
    shown = (found["makespan_s"], found["period_s"], bubble_fraction, found["peak"])
    return Extrapolation(num_ranks, num_microbatches, *shown, tuple(sizes))


def along(
    numbers: Sequence[int], values: Sequence[Mapping[str, float]], wanted: float
) -> dict[str, Any]:
    """Return the values at one or two numbers of microbatches, extrapolated linearly to `wanted`.

    >>> along([2, 4], [{"a": 1.0}, {"a": 2.0}], 8)
    {'a': 4.0}
    """
    if len(numbers) == 1:
        return dict(values[0])
    share, (first, last) = (wanted - numbers[0]) / (numbers[1] - numbers[0]), values
    return {name: first[name] + share * (last[name] - first[name]) for name in first}


def _sizes_of_fewer_microbatches(
    build: Build, num_ranks: int, m: int, costs: Costs
) -> list[tuple[int, int]]:
    """Return three sizes, a whole number of cycles and of p microbatches apart, and so is m."""
    warm = WARM_ROUNDS * num_ranks
    probe = simulate(build(num_ranks, 2 * warm + m % num_ranks), costs)
    schedule, cycle = probe.schedule, _cycle(probe)
    step = None if cycle is None else math.lcm(cycle, num_ranks)
    if step is None or 3 * schedule.num_stages * (warm + 3 * step) > MOST_SAMPLE_TASKS:
        raise ScheduleError(
            f"{schedule.name}: {num_ranks} ranks show no steady state within "
            f"{schedule.num_microbatches} microbatches at these costs, so that {m} cannot be "
            "extrapolated. Simulate them, or use fewer."
        )
    first = warm + (m - warm) % step
    return [(num_ranks, first + k * step) for k in range(3)]


def _cycle(timeline: Timeline) -> int | None:
    """Return after how many microbatches times repeat, later by a constant by stage and kind.

    None if they do not, among the middle microbatches, which neither warm-up nor cool-down reaches.
    """
    end_s, num_ranks = timeline.end_s, timeline.schedule.num_ranks
    middle = range(2 * num_ranks, 4 * num_ranks)
    places = product(range(timeline.schedule.num_stages), KINDS)
    tasks = [[Task(stage, kind, m) for m in middle] for stage, kind in places]
    # dualpipe_v splits only some of its backwards
    lines = [[end_s[task] for task in line] for line in tasks if all(t in end_s for t in line)]
    close = TOLERANCE * timeline.makespan_s

    def repeats(line: list[float], cycle: int) -> bool:
        steps = [after - before for before, after in zip(line, line[cycle:], strict=False)]
        return all(abs(steps[0] - step) <= close for step in steps)

    cycles = range(1, num_ranks + 1)
    return next((n for n in cycles if all(repeats(line, n) for line in lines)), None)


def _sizes_of_fewer_ranks(
    num_ranks: int, num_microbatches: int, costs: Costs
) -> list[tuple[int, int]]:
    """Return four sizes equally far apart with the m/p of the request, p the same modulo 12."""
    if any(isinstance(value, tuple) for value in vars(costs).values()):
        raise ScheduleError(
            f"num_ranks={num_ranks} is above {MOST_RANKS}, where ranks are extrapolated, but the "
            "costs are those of each stage. Give numbers for 1/p of the model."
        )
    step = math.lcm(RESIDUES, num_ranks // math.gcd(num_ranks, num_microbatches))
    first = LEAST_RANKS + (num_ranks - LEAST_RANKS) % step
    last = first + 3 * step
    if last >= num_ranks or 6 * last * last * num_microbatches // num_ranks > MOST_SAMPLE_TASKS:
        usable = max(1, round(num_microbatches / num_ranks)) * num_ranks
        raise ScheduleError(
            f"num_microbatches/num_ranks = {num_microbatches}/{num_ranks} is the ratio of no four "
            "small schedules, from which large ones are extrapolated. Use "
            f"num_microbatches={usable}."
        )
    return [(p, p * num_microbatches // num_ranks) for p in range(first, last + 1, step)]


def _numbers(timeline: Timeline) -> dict[str, float]:
    """Return makespan, period, average work of a rank, and the largest peak."""
    makespan_s, peak = timeline.makespan_s, max(timeline.peak_activations)
    numbers = {"makespan_s": makespan_s, "period_s": timeline.period_s, "peak": peak}
    return numbers | {"busy_s": makespan_s * (1 - timeline.bubble_fraction)}


def _check_equal_steps(
    sizes: list[tuple[int, int]], found: list[dict[str, float]], wanted: tuple[int, int]
) -> None:
    """Raise ScheduleError unless each number grows by equal steps from size to size."""
    steps = [{name: b[name] - a[name] for name in a} for a, b in pairwise(found)]
    for one, other in pairwise(steps):
        for name, number in found[-1].items():
            x, y = one[name], other[name]
            if abs(x - y) > TOLERANCE * number:
                shown = ", ".join(map(str, sizes))
                raise ScheduleError(
                    f"no steady state: schedules of (ranks, microbatches) {shown} grow by {x:.6g}, "
                    f"then {y:.6g}, so that of {wanted} cannot be extrapolated. Simulate it."
                )
