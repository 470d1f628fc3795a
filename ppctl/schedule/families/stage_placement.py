"""Which rank holds which stage."""

from __future__ import annotations


def loop(num_ranks: int, num_chunks: int = 1) -> tuple[int, ...]:
    """Return rank_of for stages dealt round the ranks: stage s on rank s mod p (2104.04473, s2.2).

    >>> loop(2, 2)
    (0, 1, 0, 1)
    """
    return tuple(s % num_ranks for s in range(num_ranks * num_chunks))


def v_shape(num_ranks: int) -> tuple[int, ...]:
    """Return rank_of for two chunks a rank, down and back up: rank min(s, 2p-1-s) (2405.15362).

    >>> v_shape(3)
    (0, 1, 2, 2, 1, 0)
    """
    return waves(num_ranks, 1)


def waves(num_ranks: int, num_waves: int) -> tuple[int, ...]:
    """Return rank_of for 2w chunks a rank, w times down and back up (Hanayo, 2308.15762).

    >>> waves(2, 2)
    (0, 1, 1, 0, 0, 1, 1, 0)
    """
    return (*range(num_ranks), *reversed(range(num_ranks))) * num_waves
