"""Hill climbing on the critical path: tasks move along their rank's program while it gets shorter.

A step is as long as a chain of tasks that wait for each other. Where two of them are neighbours on
a rank, the second waits for the first's end and not for its values: only moving it ahead, or the
first one back, can shorten the chain on that rank (the neighbourhood of job-shop scheduling, van
Laarhoven et al. 1992, Operations Research 40(1)).
"""

import random
from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

from ppctl.schedule.execution_order import Jobs, Orders, TimedOrders

AHEAD = (1, 2, 3, 4, 6, 9)  # steps by which the second task of a pair moves ahead
BACK = (2, 3, 4, 6, 9, 14)  # steps by which the first one moves back (1 is the second one's 1)
LEAST_GAIN = 1e-9  # relative to the makespan: rounding is no gain
MISSING = -1.0


def climb(jobs: Jobs, orders: Orders, cap: int, budget: int) -> tuple[float, Orders]:
    """Return (makespan, orders) that no move of a task shortens, or after `budget` simulated tasks.

    orders: valid, and within the cap. cap: the most that a rank may hold. The result depends on
    nothing else: it is the same on every process.
    """
    run = jobs.run(orders)
    assert run is not None, "climbing starts from orders that can run"
    choose = random.Random(0)
    until = jobs.spent + budget
    while jobs.spent < until:
        better = _first_better(jobs, orders, run, cap, until, choose)
        if better is None:
            break
        run, orders = better
    return run.makespan_s, orders


def _first_better(
    jobs: Jobs, orders: Orders, run: TimedOrders, cap: int, until: int, choose: random.Random
) -> tuple[TimedOrders, Orders] | None:
    """Return the first neighbour that is shorter, or None."""
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
    # 2. their moves, each tried in part before it is run in full
    trials = Trials(jobs, orders, run)
    for rank, i in neighbours:
        for order, first, last in _moves(orders[rank], i):
            if not jobs.fits(order, cap):
                continue
            if trials.may_be_shorter(rank, order, first, last, limit_s):
                moved = [*orders[:rank], order, *orders[rank + 1 :]]
                found = jobs.run(moved, limit_s)
                if found is not None:
                    return found, moved
            if jobs.spent >= until:
                return None
    return None


def _moves(order: list[int], i: int) -> Iterator[tuple[list[int], int, int]]:
    """Yield (order, first, last changed place) with the task at i+1 moved ahead, or at i back."""
    for by in AHEAD:
        to = i + 1 - by
        if to >= 0:
            yield [*order[:to], order[i + 1], *order[to : i + 1], *order[i + 2 :]], to, i + 1
    for by in BACK:
        if i + by < len(order):
            to = i + by
            yield [*order[:i], *order[i + 1 : to + 1], order[i], *order[to + 1 :]], i, to


class Trials:
    """Whether moving tasks of a rank can shorten a schedule, found by running only the changes.

    Tasks that started before the first changed place run as before. After the last one every chain
    of tasks to the end is unchanged: once a task ends so late that the chain after it ends at the
    limit or later, the move is refused. Most are within a few tasks.
    """

    def __init__(self, jobs: Jobs, orders: Orders, run: TimedOrders):
        self.jobs, self.orders, self.run = jobs, orders, run
        self.starts_s = [[run.start_s[task] for task in order] for order in orders]
        self.written_s = [0.0] * jobs.num_values
        self.began_s = [float("inf")] * jobs.num_values  # when the task began that writes a value
        for task, makes in enumerate(jobs.makes):
            for base in makes:
                value = base + jobs.microbatch[task]
                self.written_s[value], self.began_s[value] = run.end_s[task], run.start_s[task]
        self.tail_s = self._tails_s()

    def _tails_s(self) -> list[float]:
        """Return each task's seconds of the longest chain after it; less if tasks take no time."""
        jobs, run = self.jobs, self.run
        tail_s = [0.0] * len(jobs.tasks)
        before = [-1] * len(jobs.tasks)
        for order in self.orders:
            for one, other in pairwise(order):
                before[other] = one
        writer = [-1] * jobs.num_values
        for task, makes in enumerate(jobs.makes):
            for base in makes:
                writer[base + jobs.microbatch[task]] = task
        ends = list(zip(run.start_s, run.end_s, strict=True))
        for task in sorted(range(len(tail_s)), key=ends.__getitem__, reverse=True):
            through_s = tail_s[task] + jobs.seconds[task]
            one = before[task]
            if one >= 0 and through_s > tail_s[one]:
                tail_s[one] = through_s
            for base, hop_s in jobs.needs[task]:
                one = writer[base + jobs.microbatch[task]]
                if through_s + hop_s > tail_s[one]:
                    tail_s[one] = through_s + hop_s
        return tail_s

    def may_be_shorter(
        self, rank: int, order: list[int], first: int, last: int, limit_s: float
    ) -> bool:
        """Return whether the schedule may end before limit_s with this order on a rank.

        first, last: the places of the rank's order between which it differs.
        """
        # 1. where each rank stands when the first changed place starts
        jobs, orders, run = self.jobs, self.orders, self.run
        needs, makes, seconds, microbatch = jobs.needs, jobs.makes, jobs.seconds, jobs.microbatch
        written_s, began_s, tail_s, start_s = self.written_s, self.began_s, self.tail_s, run.start_s
        from_s = run.end_s[orders[rank][first - 1]] if first else 0.0
        settled_s = start_s[orders[rank][last]]
        at = [bisect_left(starts_s, from_s) for starts_s in self.starts_s]
        free_s = [run.end_s[each[n - 1]] if n else 0.0 for each, n in zip(orders, at, strict=True)]
        left = sum(map(len, orders)) - sum(at)
        # 2. run on from there, until a chain is too long
        again_s: dict[int, float] = {}  # of values that are written again
        waiting: dict[int, int] = {}
        ready = [r for r in range(jobs.num_ranks) if r != rank] + [rank]
        done = 0
        while ready:
            here = ready.pop()
            tasks = order if here == rank else orders[here]
            step, now_s = at[here], free_s[here]
            while step < len(tasks):
                task = tasks[step]
                begin_s, m = now_s, microbatch[task]
                for base, hop_s in needs[task]:
                    value = base + m
                    arrives_s = again_s.get(value, MISSING)
                    if arrives_s < 0.0:
                        if began_s[value] >= from_s:
                            waiting[value] = here
                            break
                        arrives_s = written_s[value]
                    if arrives_s + hop_s > begin_s:
                        begin_s = arrives_s + hop_s
                else:
                    now_s = begin_s + seconds[task]
                    done += 1
                    chain_s = tail_s[task] if start_s[task] > settled_s else 0.0
                    if now_s + chain_s >= limit_s:
                        jobs.spent += done
                        return False
                    for base in makes[task]:
                        value = base + m
                        again_s[value] = now_s
                        if value in waiting:
                            ready.append(waiting.pop(value))
                    step += 1
                    continue
                break
            at[here], free_s[here] = step, now_s
        jobs.spent += done
        return done == left
