"""Hops that share a link: each occupies it for its bytes over the bandwidth, one after the other, and latency follows.

A hop from a rank to another has a link of its own direction. Where `Costs.link_hosts` says which host each rank is on,
all hops that leave a host share its link out, and all that reach a host its link in; those inside a host do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import Schedule

Link = Hashable
NONE = -1


class Hop(NamedTuple):
    """A value on its way to another rank: the rank that reads it, and the links that it occupies."""

    rank: int
    links: tuple[Link, ...]


class Times(NamedTuple):
    """Lists over tasks: start, end, and the task whose end set the start (or NONE)."""

    start_s: list[float]
    end_s: list[float]
    waits_for: list[int]


def links_between(costs: Costs, sender: int, reader: int) -> tuple[Link, ...]:
    """Return the links that a hop from one rank to another occupies.

    >>> links_between(Costs(link_hosts=()), 0, 1), links_between(Costs(link_hosts=(0, 0, 1)), 1, 2)
    ((('rank', 0, 1),), (('out of', 0), ('into', 1)))
    """
    hosts = costs.link_hosts
    assert hosts is not None, "hops that do not share links need none"
    if hosts and hosts[sender] != hosts[reader]:
        return ("out of", hosts[sender]), ("into", hosts[reader])
    return (("rank", sender, reader),)


def run_on_links(
    orders: Sequence[Sequence[int]],
    seconds: Sequence[float],
    needs: Sequence[Sequence[tuple[int, float]]],
    makes: Sequence[Sequence[int]],
    hops: dict[int, Hop],
    busy_s: float,
    latency_s: float,
    limit_s: float = inf,
) -> Times | None:
    """Return when tasks run; None if ranks wait for each other, or a task ends at `limit_s` or later.

    orders: of each rank, numbers of tasks. needs and makes: the values that tasks read (with a number that is not used)
    and write. hops: of values that cross ranks. Links serve hops in the order in which values are written; of those at
    the same time, by rank.
    """
    count = len(seconds)
    start_s, end_s, waits_for = [0.0] * count, [0.0] * count, [NONE] * count
    arrives_s: dict[int, tuple[float, int]] = {}  # of each value on the rank that reads it, and its writer
    free_s: dict[Link, float] = {}
    at, before = [0] * len(orders), [NONE] * len(orders)
    events: list[tuple[float, int, int]] = []  # end, rank, task

    def start_next(rank: int, now_s: float) -> None:
        """Start the rank's next task, at the end of the one before or when what it reads arrives, if that is known."""
        if at[rank] == len(orders[rank]):
            return
        task = orders[rank][at[rank]]
        begin_s, why = now_s, before[rank]
        for value, _ in needs[task]:
            if value not in arrives_s:
                return
            there_s, writer = arrives_s[value]
            if there_s > begin_s:
                begin_s, why = there_s, writer
        start_s[task], end_s[task], waits_for[task] = begin_s, begin_s + seconds[task], why
        is_busy[rank] = True
        heappush(events, (end_s[task], rank, task))

    is_busy, idle_since_s = [False] * len(orders), [0.0] * len(orders)
    for rank in range(len(orders)):
        start_next(rank, 0.0)
    left = count
    while events:
        now_s, rank, task = heappop(events)
        if now_s >= limit_s:
            return None
        left -= 1
        is_busy[rank], idle_since_s[rank], before[rank] = False, now_s, task
        at[rank] += 1
        for value in makes[task]:
            hop = hops.get(value)
            if hop is None:
                arrives_s[value] = now_s, task
                continue
            sent_s = max([now_s, *(free_s.get(link, 0.0) for link in hop.links)]) + busy_s
            for link in hop.links:
                free_s[link] = sent_s
            arrives_s[value] = sent_s + latency_s, task
            if not is_busy[hop.rank]:
                start_next(hop.rank, idle_since_s[hop.rank])
        start_next(rank, now_s)
    return None if left else Times(start_s, end_s, waits_for)


def busiest_link_s(schedule: Schedule, costs: Costs, num_microbatches: int) -> float:
    """Return the seconds in which the busiest link is occupied: less than any makespan.

    >>> from ppctl.schedule.families.one_f_one_b import one_f_one_b
    >>> costs = Costs(transfer_bytes=3.0, transfer_bytes_per_s=1.0, link_hosts=(0, 0, 1, 1))
    >>> busiest_link_s(one_f_one_b(4, 8), costs, 8)
    24.0
    """
    if costs.link_hosts is None:
        return 0.0
    hops = Counter[Link]()
    for a, b in zip(schedule.rank_of, schedule.rank_of[1:], strict=False):
        for sender, reader in ((a, b), (b, a)) if a != b else ():
            hops.update(links_between(costs, sender, reader))
    return max(hops.values(), default=0) * num_microbatches * costs.link_busy_s
