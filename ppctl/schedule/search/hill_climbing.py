"""Hill climbing: move tasks of the critical path within a rank's program if this shortens the step.

The critical path is a chain of tasks, each waiting for the one before, that lasts the whole step.
If two successive tasks of the chain are neighbours on a rank, the second waits for the rank, not
for a value. Only moving this second task ahead, or the first one back, can shorten the chain on the
rank (van Laarhoven et al. 1992, Operations Research 40(1), on job shops).
"""

import random
from collections.abc import Iterator
from itertools import pairwise

from ppctl.schedule.execution_order import Jobs, Orders, TimedOrders

AHEAD = (1, 2, 3, 4, 6, 9)  # moves of a pair's second task to an earlier place, in steps
BACK = (2, 3, 4, 6, 9, 14)  # moves of its first task to a later place, in steps; 1 equals 1 ahead
LEAST_GAIN = 1e-9  # gain relative to the makespan; less is rounding


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
    """Return (times, orders) after the first move that shortens the step.

    None if no move does, or once jobs.spent >= until.
    """
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
