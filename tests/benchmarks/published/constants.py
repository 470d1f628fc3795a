"""The four numbers that are fitted to published steps, on half of the rows. Standard library only."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """Shares of stated speeds that long runs on many devices reach.

    sustained_a100, sustained_h100: 0..1: of the speed of products that single ones reach, what
    power and clocks leave of it for hours. infiniband_share, other_share: 0..1: of a network's
    stated speed, what collectives reach of InfiniBand, and of others (Ethernet, Omni-Path, not
    stated).
    """

    sustained_a100: float = 1.0
    sustained_h100: float = 1.0
    infiniband_share: float = 1.0
    other_share: float = 1.0


FITTED = Constants(
    0.84, 0.81, 1.0, 0.5
)  # 2026-11-25, by `python tests/benchmarks/published --fit`; 1.0 is the most


def is_fitted(row_id: str) -> bool:
    """Return whether a row belongs to the half that the constants are fitted on: by a hash of its
    id.

    >>> is_fitted("megatron-h100-1.7B"), is_fitted("megatron-h100-32B")
    (False, True)
    """
    return hashlib.sha256(row_id.encode()).digest()[0] % 2 == 0
