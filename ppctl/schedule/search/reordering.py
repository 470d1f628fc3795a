"""Reordered schedules at given costs and under a memory cap: greedy runs, and hill climbing.

In a greedy run each rank follows its order. If its next task has to wait, it runs a later task that
is ready, if memory allows.

Hill climbing moves tasks of the critical path within a rank's program if this shortens the step.
The critical path is a chain of tasks, each waiting for the one before, that lasts the whole step.
If two successive tasks of the chain are neighbours on a rank, the second waits for the rank, not
for a value. Only moving this second task ahead, or the first one back, can shorten the chain on the
rank (van Laarhoven et al. 1992, Operations Research 40(1), on job shops).
"""

import random
from collections.abc import Iterator
from itertools import pairwise

from ppctl.schedule.execution_order import NEVER, ChoosingRanks, Chosen, Jobs, Orders, TimedOrders

WINDOW = 48  # next tasks that a greedy rank searches for a ready one
AHEAD = (1, 2, 3, 4, 6, 9)  # moves of a pair's second task to an earlier place, in steps
BACK = (2, 3, 4, 6, 9, 14)  # moves of its first task to a later place, in steps; 1 equals 1 ahead
LEAST_GAIN = 1e-9  # gain relative to the makespan; less is rounding


def fill(
    jobs: Jobs, orders: Orders, cap: int, patience: float = 0.0, *, weight_grads_last: bool = False
) -> Orders | None:
    """Return the orders of a greedy run with priorities `orders`; None if ranks get stuck.

    cap: maximum memory of a rank, in the units of the jobs' ledger; `orders` may exceed it, the
    result does not. patience: largest delay of an overtaken task, as a share of the overtaking
    task's time. weight_grads_last: any other ready task overtakes a weight gradient.
    """
    greedy = _Greedy(jobs, orders, cap, patience, weight_grads_last)
    return greedy.ranks.run(greedy.choose)


class _Greedy:
    """The state of a greedy run: remaining tasks and memory of each rank."""

    def __init__(
        self, jobs: Jobs, orders: Orders, cap: int, patience: float, weight_grads_last: bool
    ):
        self.jobs, self.ranks, self.cap = jobs, ChoosingRanks(jobs), cap
        self.patience, self.weight_grads_last = patience, weight_grads_last
        self.fits = [jobs.fits(order, cap) for order in orders]
        self.rest = [list(order) for order in orders]
        self.live = list(jobs.held)

    def choose(self, rank: int, now_s: float) -> Chosen:
        """Return the task to run now, or the time in seconds when one can run."""
        place, later_s = self._place(rank, now_s) if self.rest[rank] else (None, NEVER)
        if place is None:
            return (), later_s
        task = self.rest[rank].pop(place)
        self.live[rank] += self.jobs.change[task]
        return (task,), now_s

    def _place(self, rank: int, now_s: float) -> tuple[int | None, float]:
        """Return (index in rest[rank], now_s), or (None, time in seconds when a task can run)."""
        jobs, order, rise = self.jobs, self.rest[rank], self.jobs.rise
        ready_s = self.ranks.ready_s
        # 1. the first task, unless it has to wait
        head = order[0]
        head_s = ready_s(head)
        blocked = not self._has_room(rank, head)
        may_start = head_s <= now_s and not blocked
        if may_start and not (self.weight_grads_last and jobs.tasks[head].kind == "W"):
            return 0, now_s
        # 2. the first later task that is ready and delays the first within `patience`
        ahead = most = 0  # memory that the overtaken tasks add: at their end, at their peak
        later_s = NEVER if blocked else head_s
        for place, task in enumerate(order[:WINDOW]):
            overtakes = place > 0 and not (may_start and jobs.tasks[task].kind == "W")
            if overtakes and (not rise[task] or self._has_room(rank, task, most)):
                task_s = ready_s(task)
                late_s, seconds = now_s + jobs.seconds[task] - head_s, jobs.seconds[task]
                if task_s > now_s:
                    later_s = min(later_s, task_s)
                elif may_start or blocked or late_s <= self.patience * seconds:
                    return place, now_s
            most = max(most, ahead + rise[task])
            ahead += jobs.change[task]
        return (0, now_s) if may_start else (None, later_s)

    def _has_room(self, rank: int, task: int, most: int = 0) -> bool:
        """Return whether a task fits ahead of overtaken tasks that add `most` at their peak.

        If the rank's order exceeds the cap, forwards leave room for an I; otherwise ranks could
        get stuck.
        """
        jobs, takes = self.jobs, self.jobs.rise[task]
        if self.fits[rank]:
            takes = max(takes, jobs.change[task] + most) if jobs.change[task] > 0 else takes
        elif jobs.tasks[task].kind == "F":
            takes += jobs.reserve
        return self.live[rank] + takes <= self.cap


def climb(jobs: Jobs, orders: Orders, cap: int, budget: int) -> tuple[float, Orders]:
    """Return (makespan in seconds, orders) when no move shortens it or `budget` tasks were timed.

    orders: a valid start, within the cap on each rank's memory. The result is the same on every
    process.
    """
    run = jobs.run(orders)
    assert run is not None, "climbing starts from orders that can run"
    choose, until = random.Random(0), jobs.spent + budget
    while (better := _first_better(jobs, orders, run, cap, until, choose)) is not None:
        run, orders = better
    return run.makespan_s, orders


def _first_better(
    jobs: Jobs, orders: Orders, run: TimedOrders, cap: int, until: int, choose: random.Random
) -> tuple[TimedOrders, Orders] | None:
    """Return (times, orders) of the first move that shortens the step; None: no move, no budget."""
    # 1. pairs of neighbours on the critical path
    limit_s = run.makespan_s * (1 - LEAST_GAIN)
    step = [0] * len(jobs.tasks)
    for order in orders:
        for i, task in enumerate(order):
            step[task] = i
    neighbours = [
        (jobs.rank[a], step[a])
        for a, b in pairwise(run.critical_path())
        if jobs.rank[a] == jobs.rank[b] and step[b] == step[a] + 1
    ]
    choose.shuffle(neighbours)
    # 2. their moves
    for rank, i in neighbours:
        for order in _moves(orders[rank], i):
            if jobs.spent >= until:
                return None
            if jobs.fits(order, cap):
                moved = [*orders[:rank], order, *orders[rank + 1 :]]
                found = jobs.run(moved, limit_s)
                if found is not None:
                    return found, moved
    return None


def _moves(order: list[int], i: int) -> Iterator[list[int]]:
    """Yield orders with the task at i+1 moved ahead, or the task at i moved back."""
    for by in AHEAD:
        to = i + 1 - by
        if to >= 0:
            yield [*order[:to], order[i + 1], *order[to : i + 1], *order[i + 2 :]]
    for by in BACK:
        if i + by < len(order):
            to = i + by
            yield [*order[:i], *order[i + 1 : to + 1], order[i], *order[to + 1 :]]
