"""Every V-shaped building block with uniform offsets: patterns that `squeeze` makes schedules of.

A building block says when each rank runs the F and I of microbatch 0; the next microbatch follows
six ticks later. Source: Qi et al. 2024, arXiv 2405.15362, sections 3.1 and 3.2 and appendix A.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, permutations

from ppctl.schedule.search.placement_costs import Ledger
from ppctl.schedule.search.squeeze_pattern import F_DOWN, F_UP, I_DOWN, I_UP, PERIOD

Block = tuple[tuple[int, int, int, int], ...]  # by rank the ticks of F down, F up, I up, I down
STEPS = range(1, PERIOD)  # ticks from a rank to the next on the way down; one tick on the way up


def blocks(num_ranks: int) -> Iterator[Block]:
    """Yield the distinct building blocks in which no rank runs two of its four lines at once.

    Which ones these are: docs/derivations.md, "Building blocks of V-shaped schedules".

    >>> len(list(blocks(8)))
    480
    """
    seen: set[Block] = set()
    for later in permutations(STEPS, 3):
        for steps in _steps(num_ranks):
            down = tuple(accumulate(steps, initial=0))
            # ticks modulo the period; F down and I up go down the ranks, F up and I down come back
            phases = [
                (tick, later[0] - r, later[1] + tick, later[2] - r) for r, tick in enumerate(down)
            ]
            if any(len({phase % PERIOD for phase in row}) < 4 for row in phases):
                continue
            block = _unrolled(down, [tuple(phase % PERIOD for phase in row) for row in phases])
            if block not in seen:
                seen.add(block)
                yield block


def steady_excess(block: Block, ledger: Ledger, limit: float) -> float:
    """Return how far the fullest rank is above `limit` in the steady state, in the ledger's units.

    An activation lives from the start of F to the end of W, right after I at the earliest; the
    gradient that I hands to W instead lives for two ticks.

    >>> steady_excess(next(blocks(2)), Ledger((0, 0), (1, 1, 1, 1)), 3)
    0.3333333333333335
    """
    last = len(ledger.stash) - 1
    of_ranks: list[float] = []
    for r, row in enumerate(block):
        size = 0
        for stage, life in ((r, row[I_DOWN] - row[F_DOWN]), (last - r, row[I_UP] - row[F_UP])):
            handed = ledger.stash if ledger.pending is None else ledger.pending
            size += ledger.stash[stage] * (life + (ledger.pending is not None)) + 2 * handed[stage]
        of_ranks.append(ledger.held[r] + size / PERIOD)
    return max(of_ranks) - limit


def _steps(num_ranks: int) -> Iterator[tuple[int, ...]]:
    for first in STEPS:
        yield (first,) * (num_ranks - 1)
        for second in range(1, first):
            for change in range(1, num_ranks - 1):
                yield (first,) * change + (second,) * (num_ranks - 1 - change)


def _unrolled(down: tuple[int, ...], phases: list[tuple[int, ...]]) -> Block:
    """Return the block whose lines follow each other as early as their phases allow."""
    last = len(down) - 1
    f_up = _next(down[last], phases[last][F_UP])  # on the last rank, the turn of the V
    i_up = _next(f_up + last, phases[0][I_UP])  # on rank 0, where the loss is
    i_down = _next(i_up + down[last], phases[last][I_DOWN])
    return tuple(
        (tick, f_up + last - r, i_up + tick, i_down + last - r) for r, tick in enumerate(down)
    )


def _next(tick: int, phase: int) -> int:
    """Return the first tick after `tick` with this phase.

    >>> _next(7, 2), _next(8, 2)
    (8, 14)
    """
    return tick + 1 + (phase - tick - 1) % PERIOD
