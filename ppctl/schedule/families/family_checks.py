"""Checks of sizes and knobs that several families share."""

from __future__ import annotations

import math

from ppctl.errors import ScheduleError


def require_at_least(name: str, what: str, value: int, least: int) -> None:
    """Raise ScheduleError for a count below `least`."""
    if value < least:
        use = f"Use {what}={least} or more."
        raise ScheduleError(f"{what}={value} is below {least} ({name}). {use}")


def require_multiple_of_ranks(name: str, num_microbatches: int, num_ranks: int) -> None:
    """Raise ScheduleError for microbatches that do not fill groups of p."""
    if num_microbatches % num_ranks:
        what = f"num_microbatches={num_microbatches} is not a multiple of num_ranks={num_ranks}"
        use = f"Use {num_ranks}, {2 * num_ranks}, ... or schedule=1f1b."
        raise ScheduleError(f"{what} ({name}). {use}")


def hops_floor(name: str, warmup_hops: float, hops: int) -> int:
    """Return floor(warmup_hops * hops). ScheduleError unless 1 <= warmup_hops <= 2.

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
