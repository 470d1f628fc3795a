"""Local search over partitions by moves of one layer from a stage to another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from statistics import median_low
from typing import Any


def climbed(
    bounds: list[int],
    step_s: Callable[[list[int]], Any],
    fits: Callable[[list[int]], bool],
    least: Sequence[int],
    max_tried: int,
    num_detours: int = 0,
) -> list[int]:
    """Return bounds that no fitting move makes faster, or the best of the `max_tried` first.

    Moves are tried from the fastest bounds whose moves were not, those of unusual stages first; the
    first that is faster than all goes on at once. num_detours: slower bounds in a row from which
    moves are tried in vain.
    """
    best, known = step_s(bounds), {tuple(bounds)}
    waiting, detours = [(best, 0, bounds)], 0  # the number settles ties: the older ones first
    while waiting and detours <= num_detours:
        # 1. the fastest bounds that are left
        seconds, number, start = heappop(waiting)
        detours += 1
        # 2. its moves, until one is faster than all
        for source, target in _promising_first(start):
            if start[source + 1] - start[source] <= least[source]:
                continue
            low, high, by = (source, target, -1) if source < target else (target, source, 1)
            moved = [b + by if low < k <= high else b for k, b in enumerate(start)]
            if tuple(moved) in known or not fits(moved):
                continue
            if len(known) >= max_tried:
                return bounds
            found = step_s(moved)
            heappush(waiting, (found, len(known), moved))
            known.add(tuple(moved))
            if found < best:
                best, bounds, detours = found, moved, 0
                heappush(waiting, (seconds, number, start))
                break
    return bounds


def _promising_first(bounds: list[int]) -> list[tuple[int, int]]:
    """Return all moves: first from large stages, to small ones, of the first and the last stage.

    Layers are alike in most models: a partition is slow at its ends, which have embedding and head,
    and where layers do not divide.

    >>> _promising_first([0, 2, 4, 7, 9])[:2]
    [(0, 1), (1, 0)]
    >>> (1, 2) in _promising_first([0, 2, 4, 7, 9])[-2:]
    True
    """
    sizes = [after - before for before, after in pairwise(bounds)]
    usual, ends = median_low(sizes), (0, len(sizes) - 1)

    def is_usual(move: tuple[int, int]) -> bool:
        source, target = move
        unusual = sizes[source] > usual or sizes[target] < usual or source in ends or target in ends
        return not unusual

    return sorted(_moves(len(sizes)), key=is_usual)


def _moves(num_stages: int) -> Iterator[tuple[int, int]]:
    """Yield (source, target) of a layer: to the neighbouring stage first."""
    for distance in range(1, num_stages):
        for low in range(num_stages - distance):
            yield low, low + distance
            yield low + distance, low
