"""The event loop of searches: free ranks choose their next task whenever something has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

NEVER = float("inf")
Wake = tuple[float, int]  # when, and which rank


def run_ranks(num_ranks: int, act: Callable[[int, float], tuple[float, Sequence[Wake]]]) -> None:
    """Let all ranks act at 0, then each when it is woken and free, by time, then by rank.

    act(rank, now_s) runs the rank's task and returns until when the rank is busy, and whom to wake
    when, itself included. The loop ends when no rank is left to be woken.
    """
    wake = [(0.0, rank) for rank in range(num_ranks)]
    free_s = [0.0] * num_ranks
    while wake:
        now_s, rank = heappop(wake)
        if free_s[rank] <= now_s:
            free_s[rank], wakes = act(rank, now_s)
            for each in wakes:
                heappush(wake, each)
