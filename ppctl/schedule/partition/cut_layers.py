"""Partitions by cost: the least cost of the costliest stage, or the shortest simulated step.

Distance of the results from the optimum: docs/derivations.md. `least_cap` minimizes the cost of the
largest part of a row of costs, `most_equal` finds the most equal parts under a cap, and `clusters`
divides a model's operations with both (Zheng et al. 2022, OSDI, section 5.2). Their arguments:
sums: the sum of costs before each position of the row, then the total. ends: a fixed cost of each
part, on top of its positions. least: the minimum length of each part.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from math import inf
from statistics import median_low
from typing import Any

from ppctl.errors import ConfigError, setting
from ppctl.schedule.engine_traits import rank_sums
from ppctl.schedule.partition.partition import (
    Partition,
    balanced,
    least_layers,
    partition_of,
    stage_costs,
)

STEPS = 60  # number of steps of a bisection, enough for the accuracy of a float
TOLERANCE = 0.1  # largest excess of a cluster's cost, relative to the least largest cost
# default num_detours of `improved`. With 0 detours its step is 0.5% to 1.6% longer than the
# shortest on average, and up to 18% longer; with 8, up to 6% longer
DETOURS = 4
MAX_EVENED = 20_000  # maximum partitions to try to equalize ranks; 128 stages have 16,256 moves


def divided_evenly(
    layers: Sequence[float], rank_of: Sequence[int], *, embed: float, head: float
) -> Partition:
    """Return contiguous layers of each stage that minimize the largest of `stage_costs`.

    layers, embed, head: costs in one unit; `balanced` divides equal layers. rank_of: the rank of
    each stage. Ties if each rank has one stage: costs as equal as possible, then smaller later
    stages. Ties if ranks have several: a small largest sum over a rank's stages, then nearly equal
    costs. Both are minimal as far as moves of one layer can reduce them.

    >>> [len(stage) for stage in divided_evenly([1.0, 1.0, 2.0], (0, 1), embed=0.0, head=0.0)]
    [2, 1]
    """
    # 1. the least largest stage, then the most equal stages under it
    unit = layers[0] if len(set(layers)) == 1 else None
    ends = (0.0, 0.0) if unit is None else (embed / unit, head / unit)
    of_equal_layers = balanced(len(layers), rank_of, embed=ends[0], head=ends[1])
    if unit is not None:
        return of_equal_layers
    sums = list(accumulate(layers, initial=0))
    ends_s = stage_costs((range(0),) * len(rank_of), embed=embed, head=head)

    def stages_s(partition: Partition) -> list[float]:
        stages = zip(partition, ends_s, strict=True)
        return [sums[held.stop] - sums[held.start] + end for held, end in stages]

    parts = ends_s, least_layers(len(rank_of))
    bounds = most_equal(sums, *parts, least_cap(sums, *parts), [0.0] * len(sums))
    assert bounds is not None, "some parts are within the least cap"
    even = partition_of(bounds)
    # 2. if ranks hold several stages, make the ranks more equal
    if max(rank_of) + 1 == len(rank_of):
        return even

    def unevenness(partition: Partition) -> tuple[float, float, float]:
        """Return the costs to minimize: largest stage, largest sum of a rank, sum of squares."""
        costs = stages_s(partition)
        return max(costs), max(rank_sums(costs, rank_of)), sum(cost * cost for cost in costs)

    return improved(even, unevenness, max_tried=MAX_EVENED, num_detours=0)


def improved(
    partition: Partition,
    step_s: Callable[[Partition], Any],
    *,
    max_tried: int,
    num_detours: int = DETOURS,
) -> Partition:
    """Return a partition that no move of one layer makes faster, or the fastest of `max_tried`.

    A move takes a layer from one stage to another and shifts the layers between by one stage. The
    search takes the fastest partition with untried moves and tries them, promising ones first. As
    soon as a move gives a new fastest partition, the search goes on from that one.
    step_s: seconds of a step, such as the simulated makespan, or another key to minimize.
    num_detours: maximum number of slower partitions whose moves are tried after all moves of the
    fastest one have failed.

    >>> [len(held) for held in improved((range(3), range(3, 4)), lambda p: len(p[0]), max_tried=9)]
    [0, 4]
    """
    needs, best, known = least_layers(len(partition)), step_s(partition), {partition}
    waiting, detours = [(best, 0, partition)], 0  # the number breaks ties: older ones first
    while waiting and detours <= num_detours:
        # 1. the fastest partition with untried moves
        seconds, number, start = heappop(waiting)
        detours += 1
        # 2. its moves, until one is faster than all
        for source, target in _promising_first([len(held) for held in start]):
            if len(start[source]) <= needs[source]:
                continue
            low, high, by = (source, target, -1) if source < target else (target, source, 1)
            bounds = [0, *(held.stop for held in start)]
            moved = partition_of([b + by * (low < k <= high) for k, b in enumerate(bounds)])
            if moved in known:
                continue
            if len(known) >= max_tried:
                return partition
            found = step_s(moved)
            heappush(waiting, (found, len(known), moved))
            known.add(moved)
            if found < best:
                best, partition, detours = found, moved, 0
                heappush(waiting, (seconds, number, start))
                break
    return partition


def _promising_first(sizes: list[int]) -> list[tuple[int, int]]:
    """Return all moves, first those from a large stage, to a small one, or that touch an end stage.

    >>> _promising_first([2, 2, 3, 2])[:2]
    [(0, 1), (1, 0)]
    >>> (1, 2) in _promising_first([2, 2, 3, 2])[-2:]
    True
    """
    usual, ends, number = median_low(sizes), (0, len(sizes) - 1), len(sizes)

    def is_usual(move: tuple[int, int]) -> bool:
        source, target = move
        unusual = sizes[source] > usual or sizes[target] < usual or source in ends or target in ends
        return not unusual

    # the nearest stages first
    pairs = ((low, low + by) for by in range(1, number) for low in range(number - by))
    moves = (move for low, high in pairs for move in ((low, high), (high, low)))
    return sorted(moves, key=is_usual)


# a row of costs in contiguous parts


def least_cap(sums: Sequence[float], ends: Sequence[float], least: Sequence[int]) -> float:
    """Return the least cost of the largest part, over all divisions of the row.

    >>> round(least_cap([0, 1, 2, 4], ends=(0, 0), least=(1, 1)), 9)
    2.0
    """
    last = len(sums) - 1

    def suffices(cap: float) -> bool:
        start, after = 0, sum(least)
        for end, length in zip(ends, least, strict=True):
            after -= length
            stop = start
            while stop < last - after and sums[stop + 1] - sums[start] + end <= cap:
                stop += 1
            if stop - start < length or end > cap:
                return False
            start = stop
        return start == last

    low, high = 0.0, float(sums[-1]) + max(ends)
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def most_equal(
    sums: Sequence[float],
    ends: Sequence[float],
    least: Sequence[int],
    cap: float,
    passing: Sequence[float],
) -> list[int] | None:
    """Return the division with the least sum of `passing`: the start of each part, then the end.

    Ties: the least sum of squared costs, then later starts. None if no parts cost at most `cap`.
    passing: the size of the values that cross a cut at each position; inf: no cut there.
    """
    last = len(sums) - 1
    best: list[tuple[float, float]] = [(0.0, 0.0)] + [(inf, inf)] * last
    starts: list[list[int]] = []
    before, after = 0, sum(least)
    # 1. part by part, the best start for each end
    for end, length in zip(ends, least, strict=True):
        before, after = before + length, after - length
        following, start = [(inf, inf)] * (last + 1), [-1] * (last + 1)
        for b in range(before, last - after + 1):
            if passing[b] == inf:
                continue
            for a in range(b - length, -1, -1):
                cost = sums[b] - sums[a] + end
                if cost > cap:
                    break
                total = (best[a][0] + passing[b], best[a][1] + cost * cost)
                if total < following[b]:
                    following[b], start[b] = total, a
        best = following
        starts.append(start)
    if best[last][0] == inf:
        return None
    # 2. trace the starts back from the last part
    places = [last]
    for start in reversed(starts):
        places.append(start[places[-1]])
    return places[::-1]


def clusters(
    costs: Sequence[float], crossing: Sequence[float], count: int, *, tolerance: float = TOLERANCE
) -> tuple[int, ...]:
    """Return the first operation's index of each of `count` clusters, then len(costs).

    crossing[b]: the size of the values that a cluster starting at operation b receives; inf: no
    start. No cluster costs more than 1 + tolerance times the least possible largest one. Within
    this limit the largest crossing size is least, then the sum of these sizes, then the sum of
    squared costs.

    >>> clusters([1, 0, 1, 1, 0, 1], [0, 4, 9, 4, 9, 9], 2)
    (0, 3, 6)
    """
    # 1. the positions that can be cut, and the cap on costs
    sums = list(accumulate(costs, initial=0))
    places = _places(costs, crossing)
    if len(places) < count + 1:
        most = len(places) - 1
        raise ConfigError(
            f"{setting('model.num_layers', count, f'layers={count}')}, but there are only {most} "
            "groups of operations that could be layers. Use "
            f"{setting('model.num_layers', most, f'layers={most}')} or less."
        )
    at = [sums[place] for place in places]
    parts = (0.0,) * count, (1,) * count
    cap = least_cap(at, *parts) * (1 + tolerance)
    # 2. the least limit on crossing sizes that allows a division
    passing = [0, *(crossing[place] for place in places[1:-1]), 0]
    limits = sorted(set(passing))

    def divided(limit: float) -> list[int] | None:
        return most_equal(at, *parts, cap, [n if n <= limit else inf for n in passing])

    starts = divided(limits[bisect_left(limits, True, key=lambda n: divided(n) is not None)])
    assert starts is not None, "some division has the least largest cost"
    return tuple(places[i] for i in starts)


def _places(costs: Sequence[float], crossing: Sequence[float]) -> list[int]:
    """Return the cuts to try: between each two costly operations, the cut of least crossing size.

    Ties go to the last cut, so that operations without cost, such as adding a bias, stay with the
    product before them.
    """
    costly = [i for i, cost in enumerate(costs) if cost] or list(range(len(costs)))
    between = (min(range(b, a, -1), key=lambda i: crossing[i]) for a, b in pairwise(costly))
    return [0, *(place for place in between if crossing[place] < inf), len(costs)]
