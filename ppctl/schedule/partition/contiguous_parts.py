"""A row in contiguous parts: the least possible largest part, and the most equal parts under a cap.

sums: the costs before each place in the row. ends: a fixed cost of each part. least: the least
length of each part. Standard library only.
"""

from collections.abc import Sequence
from math import inf

STEPS = 60  # of a bisection: the accuracy of a float


def least_cap(sums: Sequence[float], ends: Sequence[float], least: Sequence[int]) -> float:
    """Return the least cap on the cost of a part with which parts of the whole row exist.

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
    """Return the places at which parts begin, and the end, with the least sum of `passing`.

    Then with the least sum of the squares of costs. None where no parts cost at most `cap`.
    passing: of a part that ends at a place; inf: none may. Ties: the later places.
    """
    last = len(sums) - 1
    best: list[tuple[float, float]] = [(0.0, 0.0)] + [(inf, inf)] * last
    starts: list[list[int]] = []
    before, after = 0, sum(least)
    # 1. part by part: for each end the best start
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
    # 2. the starts of the best, from the last part back
    places = [last]
    for start in reversed(starts):
        places.append(start[places[-1]])
    return places[::-1]
