"""Which rank holds which stage."""

from __future__ import annotations


def loop(num_ranks: int, num_chunks: int = 1) -> tuple[int, ...]:
    """rank_of for stages dealt round the ranks: stage s on rank s mod P (Megatron-LM's interleaving, 2104.04473 s2.2).

    >>> loop(2, 2)
    (0, 1, 0, 1)
    """
    return tuple(s % num_ranks for s in range(num_ranks * num_chunks))
