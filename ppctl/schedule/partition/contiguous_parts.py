"""Divide a row of costs into contiguous parts: least largest cost, most equal costs under a cap.

`least_cap` minimizes the cost of the largest part, `most_equal` finds the most equal parts under a
cap, and `clusters` divides a model's operations with both (Zheng et al. 2022, OSDI, section 5.2).
Arguments: sums: the sum of costs before each position of the row, then the total. ends: a fixed
cost of each part, on top of its positions. least: the minimum length of each part.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf

from ppctl.errors import ConfigError, setting

STEPS = 60  # number of steps of a bisection, enough for the accuracy of a float
TOLERANCE = 0.1  # largest excess of a cluster's cost, relative to the least largest cost


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
