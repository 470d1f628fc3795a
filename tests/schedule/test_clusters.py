"""Clusters of operations against brute force over all divisions."""

import random
from itertools import combinations, pairwise
from math import inf

import pytest

from ppctl.errors import ConfigError
from ppctl.schedule.partition.cut_layers import clusters


def best_of_all(costs, crossing, count, tolerance):
    """(most that passes, sum of it, sum of squares) of the best division, by looking at all."""
    n, found = len(costs), []
    for cuts in combinations([i for i in range(1, n) if crossing[i] < inf], count - 1):
        sizes = [sum(costs[a:b]) for a, b in pairwise((0, *cuts, n))]
        passing = [crossing[i] for i in cuts]
        found.append(
            (
                max(sizes),
                (max(passing, default=0), sum(passing), sum(size * size for size in sizes)),
            )
        )
    least = min(largest for largest, _ in found)
    return min(key for largest, key in found if largest <= least * (1 + tolerance) + 1e-9), least


@pytest.mark.parametrize("seed", range(60))
def test_the_best_division_of_all_is_found(seed):
    choose = random.Random(seed)
    n = choose.randint(3, 9)
    costs = [choose.randint(1, 9) for _ in range(n)]
    crossing = [inf if choose.random() < 0.15 else choose.randint(1, 5) for _ in range(n)]
    count, tolerance = choose.randint(1, 4), choose.choice([0.0, 0.2, 0.5])
    if count - 1 > sum(c < inf for c in crossing[1:]):
        with pytest.raises(
            ConfigError, match=r"but there are only \d groups of operations that could be layers"
        ):
            clusters(costs, crossing, count, tolerance=tolerance)
        return
    found = clusters(costs, crossing, count, tolerance=tolerance)
    assert (found[0], found[-1], len(found)) == (0, n, count + 1)
    sizes, passing = (
        [sum(costs[a:b]) for a, b in pairwise(found)],
        [crossing[i] for i in found[1:-1]],
    )
    key, least = best_of_all(costs, crossing, count, tolerance)
    assert max(sizes) <= least * (1 + tolerance) + 1e-6
    assert (max(passing, default=0), sum(passing), sum(size * size for size in sizes)) == key


def test_between_products_the_cheapest_place_is_cut():
    assert clusters([5, 0, 0, 0, 5], [9, 3, 1, 2, 4], 2) == (0, 2, 5)


def test_many_operations_take_no_time():
    found = clusters([1.0] * 1200, [1.0] * 1200, 24)
    assert {b - a for a, b in pairwise(found)} == {50}
