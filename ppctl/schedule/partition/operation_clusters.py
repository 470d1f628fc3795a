"""Operations in clusters of nearly equal cost, between which little passes. Standard library only.

Source: Alpa (Zheng et al. 2022, OSDI, section 5.2), which clusters layers by the same two aims.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf

from ppctl.errors import ConfigError, setting
from ppctl.schedule.partition.contiguous_parts import least_cap, most_equal

TOLERANCE = 0.1  # of a cluster's cost above the least possible largest one


def clusters(
    costs: Sequence[float], crossing: Sequence[float], count: int, *, tolerance: float = TOLERANCE
) -> tuple[int, ...]:
    """Return the positions in the operations at which each of `count` clusters starts, and the end.

    costs: of each operation; crossing[b]: the size that passes if a cluster starts at operation b
    (inf: none may). No cluster costs more than 1 + tolerance times the least possible largest one;
    among these the largest size that passes is the smallest possible, then the sum of all sizes,
    then the sum of the squares of the costs. A position is looked at if nothing cheaper to cut lies
    between the operations with costs around it.

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
    # 2. the least limit on the sizes that pass with which a division exists
    passing = [0, *(crossing[place] for place in places[1:-1]), 0]
    limits = sorted(set(passing))

    def divided(limit: float) -> list[int] | None:
        return most_equal(at, *parts, cap, [n if n <= limit else inf for n in passing])

    starts = divided(limits[bisect_left(limits, True, key=lambda n: divided(n) is not None)])
    assert starts is not None, "the least largest cost is one of some division"
    return tuple(places[i] for i in starts)


def _places(costs: Sequence[float], crossing: Sequence[float]) -> list[int]:
    """Return the positions worth a look: between two costly operations the cheapest one to cut.

    Of equals the last, so that operations without cost, such as adding a bias, stay with the
    product before them.
    """
    costly = [i for i, cost in enumerate(costs) if cost] or list(range(len(costs)))
    between = (min(range(b, a, -1), key=lambda i: crossing[i]) for a, b in pairwise(costly))
    return [0, *(place for place in between if crossing[place] < inf), len(costs)]
