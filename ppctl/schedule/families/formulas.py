"""Terms of closed forms, and checks of sizes and knobs, that several families share.

`tests/schedule/test_formulas.py` compares every formula with the simulator. A formula is None
outside its domain: other ratios of F, I and W, an unsupported latency, too few microbatches.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ppctl.errors import ScheduleError
from ppctl.schedule.costs import Costs

SMALL_HOP = 0.3  # largest transfer / min(F, B) in the domain of 1F1B's formulas


@dataclass(frozen=True)
class FormulaInputs:
    """Inputs of closed forms: sizes, costs (F, I, W and a transfer c, in seconds) and all knobs."""

    p: int  # number of ranks
    m: int  # number of microbatches
    costs: Costs
    num_chunks: int = 1
    num_waves: int = 1
    warmup_hops: float = 2.0

    @property
    def fiw(self) -> tuple[float, float, float]:
        costs = self.costs
        return costs.seconds("F", 0, 1), costs.seconds("I", 0, 1), costs.seconds("W", 0, 1)

    @property
    def work_s(self) -> float:
        return sum(self.fiw)

    @property
    def warmup(self) -> int:
        """Return the number of rank 0's warm-up forwards with one chunk: floor(h(p-1))."""
        return floor_hops(self.warmup_hops, self.p - 1)

    @property
    def is_free(self) -> bool:
        """Return whether transfers cost nothing."""
        return self.costs.transfer_s == 0

    @property
    def is_equal(self) -> bool:
        """Return whether F = I = W and transfers cost nothing."""
        f, i, w = self.fiw
        return self.is_free and f == i == w

    @property
    def has_small_hop(self) -> bool:
        f, i, w = self.fiw
        return self.costs.transfer_s <= SMALL_HOP * min(f, i + w)


Formula = Callable[[FormulaInputs], float | None]


def only_if(
    holds: Callable[[FormulaInputs], bool], formula: Callable[[FormulaInputs], float]
) -> Formula:
    """Return `formula` restricted to its domain: it returns None where `holds` is false."""
    return lambda s: formula(s) if holds(s) else None


def fill_and_drain_s(s: FormulaInputs) -> float:
    """Return the bubble of filling and draining the pipeline, in seconds: (p-1)(F+B+2c)."""
    return (s.p - 1) * (s.work_s + 2 * s.costs.transfer_s)


def looped_bubble_s(s: FormulaInputs) -> float:
    """Return the bubble with V looped chunks a rank, in seconds: (p-1)(F+B)/V."""
    return (s.p - 1) * s.work_s / s.num_chunks


def zero_bubble_s(s: FormulaInputs) -> float:
    """Return the bubble if weight gradients fill gaps, in seconds: (p-1) max(F+I-W, F, I)/V."""
    f, i, w = s.fiw
    return (s.p - 1) * max(f + i - w, f, i) / s.num_chunks


def forward_trip_s(s: FormulaInputs) -> float:
    """Return the seconds until the first forward reaches the last rank: (p-1)F."""
    return (s.p - 1) * s.fiw[0]


def peak_of_1f1b(s: FormulaInputs) -> float:
    """Return the peak activations of 1F1B: min(m, p)."""
    return min(s.m, s.p)


def require_at_least(name: str, what: str, value: int, least: int) -> None:
    """Raise ScheduleError if `value` is below `least`.

    name: schedule family. what: name of the knob or size that has this value.
    """
    if value < least:
        use = f"Use {what}={least} or more."
        raise ScheduleError(f"{what}={value} is below {least} ({name}). {use}")


def require_multiple_of_ranks(name: str, num_microbatches: int, num_ranks: int) -> None:
    """Raise ScheduleError unless num_microbatches is a multiple of num_ranks."""
    if num_microbatches % num_ranks:
        what = f"num_microbatches={num_microbatches} is not a multiple of num_ranks={num_ranks}"
        use = f"Use a multiple of {num_ranks} that divides the batch, or schedule=1f1b."
        raise ScheduleError(f"{what} ({name}). {use}")


def hops_floor(name: str, warmup_hops: float, hops: int) -> int:
    """Return floor(warmup_hops * hops). ScheduleError unless 1 <= warmup_hops <= 2.

    name: schedule family. hops: number of ranks after this one.

    >>> hops_floor("eager_1f1b", 1.2, 5)
    6
    """
    if not 1 <= warmup_hops <= 2:
        raise ScheduleError(
            f"warmup_hops={warmup_hops} is outside [1, 2] ({name}). "
            "Use 1 for the fewest activations, 2 to hide the latency of transfers."
        )
    return floor_hops(warmup_hops, hops)


def floor_hops(warmup_hops: float, hops: int) -> int:
    """Return floor(warmup_hops * hops), exact for decimals: 1.2 * 5 is 6, not 5.999..."""
    return math.floor(warmup_hops * hops + 1e-9)
