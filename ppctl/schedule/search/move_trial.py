"""Whether moving tasks of a rank can shorten a schedule, found by running only the changes.

Tasks that started before the first changed place run as before. After the last one every chain of
tasks to the end is unchanged: once a task ends so late that the chain after it ends at the limit or
later, the move is refused. Most are within a few tasks.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

from ppctl.schedule.search.numbered_orders import Jobs, Orders, TimedOrders

MISSING = -1.0


class Trials:
    """Moves tried on orders and their run."""

    def __init__(self, jobs: Jobs, orders: Orders, run: TimedOrders):
        self.jobs, self.orders, self.run = jobs, orders, run
        self.starts_s = [[run.start_s[task] for task in order] for order in orders]
        self.written_s = [0.0] * jobs.num_values
        self.began_s = [float("inf")] * jobs.num_values  # when the task began that writes a value
        for task, makes in enumerate(jobs.makes):
            for value in makes:
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
            for value in makes:
                writer[value] = task
        ends = list(zip(run.start_s, run.end_s, strict=True))
        for task in sorted(range(len(tail_s)), key=ends.__getitem__, reverse=True):
            through_s = tail_s[task] + jobs.seconds[task]
            one = before[task]
            if one >= 0 and through_s > tail_s[one]:
                tail_s[one] = through_s
            for value, hop_s in jobs.needs[task]:
                one = writer[value]
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
        needs, makes, seconds = jobs.needs, jobs.makes, jobs.seconds
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
                begin_s = now_s
                for value, hop_s in needs[task]:
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
                    for value in makes[task]:
                        again_s[value] = now_s
                        if value in waiting:
                            ready.append(waiting.pop(value))
                    step += 1
                    continue
                break
            at[here], free_s[here] = step, now_s
        jobs.spent += done
        return done == left
