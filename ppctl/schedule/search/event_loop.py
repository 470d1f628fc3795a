"""The event loop of searches: ranks that choose what to run next whenever they are free and something has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

NEVER = float("inf")
Wake = tuple[float, int]  # when, and which rank


def run_ranks(num_ranks: int, act: Callable[[int, float], tuple[float, Sequence[Wake]]]) -> None:
    """Let all ranks act at 0, then each whenever it is woken and not busy, in the order of time, then of rank.

    act(rank, now_s) does what the rank does at that time; it returns until when the rank is busy, and who is to be
    woken when, itself included. The loop ends when nobody is left to be woken.
    """
    wake = [(0.0, rank) for rank in range(num_ranks)]
    free_s = [0.0] * num_ranks
    while wake:
        now_s, rank = heappop(wake)
        if free_s[rank] <= now_s:
            free_s[rank], wakes = act(rank, now_s)
            for each in wakes:
                heappush(wake, each)
