"""The closed forms of the docstrings as numbers: each family's makespan and peak, where its paper's formula holds.

None outside: other ratios of F, I and W than the formula's, a latency that it does not know, too few microbatches.
`tests/schedule/test_formulas.py` holds them against the simulator, size by size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ppctl.schedule.costs import Costs

SMALL_HOP = 0.3  # of a forward and of a backward: up to here latency lengthens 1F1B and its kin as stated


@dataclass(frozen=True)
class _Size:
    """p, m, V and the knobs; F, I, W and c in seconds."""

    p: int
    m: int
    costs: Costs
    num_chunks: int = 1
    num_waves: int = 1
    warmup_hops: float = 2.0
    group_size: int | None = None

    @property
    def fiw(self) -> tuple[float, float, float]:
        costs = self.costs
        return costs.seconds("F", 0, 1), costs.seconds("I", 0, 1), costs.seconds("W", 0, 1)

    @property
    def work_s(self) -> float:
        return sum(self.fiw)

    @property
    def is_free(self) -> bool:
        return self.costs.hop_s == 0

    @property
    def is_equal(self) -> bool:
        f, i, w = self.fiw
        return self.is_free and f == i == w

    @property
    def has_small_hop(self) -> bool:
        f, i, w = self.fiw
        return self.costs.hop_s <= SMALL_HOP * min(f, i + w)


Formula = Callable[[_Size], float | None]


def makespan_formula_s(family: str, num_ranks: int, num_microbatches: int, costs: Costs, **knobs: Any) -> float | None:
    """Seconds by the closed form of `family` for stages of equal cost, or None where it does not hold.

    >>> makespan_formula_s("interleaved", 8, 32, Costs(), num_chunks=4)
    101.25
    """
    if any(isinstance(value, tuple) for value in vars(costs).values()):
        return None
    size = _Size(num_ranks, num_microbatches, costs, **knobs)
    bubble_s = _BUBBLE[family](size)
    return None if bubble_s is None else size.m * size.work_s + bubble_s


def peak_formula(family: str, num_ranks: int, num_microbatches: int, **knobs: Any) -> float | None:
    """Activations of the rank that holds most, in units of one microbatch through 1/p of the model, or None.

    >>> peak_formula("interleaved", 8, 32, num_chunks=2)
    11.5
    """
    return _PEAK[family](_Size(num_ranks, num_microbatches, Costs(), **knobs))


def _when(holds: Callable[[_Size], bool], formula: Callable[[_Size], float]) -> Formula:
    return lambda size: formula(size) if holds(size) else None


def _trips(size: _Size) -> float:
    """A trip through all ranks and back at the start, and as 1F1B alternates once more in every round of p."""
    return (size.p - 1) + (size.m - 1) * (size.p - 1) // size.p


def _zero_bubble(size: _Size) -> float:
    f, i, w = size.fiw
    return (size.p - 1) * max(f + i - w, f, i) / size.num_chunks


def _forwards(size: _Size) -> float:
    return (size.p - 1) * size.fiw[0]


_BUBBLE: dict[str, Formula] = {
    "gpipe": lambda s: (s.p - 1) * (s.work_s + 2 * s.costs.hop_s),
    "1f1b": _when(lambda s: s.has_small_hop, lambda s: (s.p - 1) * s.work_s + 2 * s.costs.hop_s * _trips(s)),
    "eager_1f1b": _when(
        lambda s: s.is_free or (s.has_small_hop and s.warmup_hops == 2 and s.m >= 2 * s.p - 1),
        lambda s: (s.p - 1) * (s.work_s + 2 * s.costs.hop_s),
    ),
    "interleaved": _when(lambda s: s.is_free, lambda s: (s.p - 1) * s.work_s / s.num_chunks),
    "looped_bfs": _when(lambda s: s.is_free and s.m >= s.p, lambda s: (s.p - 1) * s.work_s / s.num_chunks),
    "zb_h1": _when(lambda s: s.is_free and s.m >= s.p, _zero_bubble),
    "zb_h2": _when(lambda s: s.is_equal and s.m >= 2 * s.p - 1, _forwards),
    "interleaved_zb": _when(lambda s: s.is_free, _zero_bubble),
    "zb_v": _when(lambda s: s.is_equal and s.m >= s.p, lambda s: _forwards(s) / 2),
    "v_half": _when(lambda s: s.is_equal and s.p % 2 == 0 and s.m >= s.p >= 4, lambda s: (3 * s.p - 7) / 2 * s.fiw[0]),
    "v_min": _when(
        lambda s: s.is_equal and s.m >= s.p >= 4, lambda s: (2 * s.p - (2.5 if s.p % 3 else 3.5)) * s.fiw[0]
    ),
    "gis": _when(
        lambda s: s.is_equal and s.p % 4 == 0 and s.num_chunks == 2 and s.group_size is None and s.m % s.p == 0,
        lambda s: (5 * s.p / 4 - 1) * s.fiw[0],
    ),
    "dualpipe_v": _when(lambda s: s.is_equal and s.m >= 2 * s.p, lambda s: _forwards(s) / 2),
    "hanayo": _when(
        lambda s: s.is_free and s.fiw[0] == s.fiw[1] + s.fiw[2] and s.m % s.p == 0,
        lambda s: (s.p - 1) * s.work_s / (2 * s.num_waves),
    ),
}

_PEAK: dict[str, Formula] = {
    "gpipe": lambda s: s.m,
    "1f1b": lambda s: min(s.m, s.p),
    "eager_1f1b": lambda s: min(s.m, math.floor(s.warmup_hops * (s.p - 1) + 1e-9) + 1),
    "interleaved": _when(
        lambda s: s.group_size in (None, s.p),
        lambda s: min(s.m, s.p + (math.floor(s.warmup_hops * (s.p - 1) + 1e-9) - (s.p - 1)) / s.num_chunks),
    ),
    "looped_bfs": lambda s: s.m,
    "zb_h1": lambda s: min(s.m, s.p),
    "zb_h2": lambda s: min(s.m, 2 * s.p - 1),
    "interleaved_zb": lambda s: s.p,
    "zb_v": lambda s: min(s.m, s.p),
    "v_half": _when(lambda s: s.m >= s.p >= 4, lambda s: (s.p + 2) // 2),
    "v_min": _when(lambda s: s.m >= s.p >= 4, lambda s: (s.p + 4) // 3),
    "gis": _when(
        lambda s: s.p % 2 == 0 and s.num_chunks == 2 and s.group_size is None and s.m >= s.p, lambda s: 3 * s.p / 4
    ),
    "dualpipe_v": _when(lambda s: s.m >= 2 * s.p, lambda s: s.p + 0.5),
    "hanayo": lambda s: min(s.m, s.p),
}
