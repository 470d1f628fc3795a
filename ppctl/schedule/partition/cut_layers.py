"""Partitions by cost: the least cost of the costliest stage, or the shortest simulated step.

Standard library only. Distance of the results from the optimum: docs/derivations.md.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from statistics import median_low
from typing import Any

from ppctl.schedule.engine_traits import rank_sums
from ppctl.schedule.partition.contiguous_parts import least_cap, most_equal
from ppctl.schedule.partition.partition import (
    Partition,
    balanced,
    least_layers,
    partition_of,
    stage_costs,
)

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
