"""Free ranks that choose their next tasks: the run of greedy orders, building blocks and parts."""

from collections import defaultdict
from collections.abc import Callable
from heapq import heappop, heappush

from ppctl.schedule.execution_order import NEVER, Jobs, Orders


class ChoosingRanks:
    """Free ranks that choose their next tasks, such as the first of a list that is ready."""

    def __init__(self, jobs: Jobs):
        self.jobs = jobs
        self.written_s = [NEVER] * jobs.num_values
        # ranks to ask again once a value is written, and seconds until it is there
        self.waiting = defaultdict[int, dict[int, float]](dict)

    def ready_s(self, task: int) -> float:
        """Return when all values that a task reads are there; NEVER where one is not written."""
        latest_s, m = 0.0, self.jobs.microbatch[task]
        for base, hop_s in self.jobs.needs[task]:
            arrives_s = self.written_s[base + m] + hop_s
            if arrives_s == NEVER:
                self.waiting[base + m][self.jobs.rank[task]] = hop_s
                return NEVER
            if arrives_s > latest_s:
                latest_s = arrives_s
        return latest_s

    def run(self, choose: Callable[[int, float], tuple[int | None, float]]) -> Orders | None:
        """Return the orders in which the ranks ran all tasks; None if they got stuck.

        choose(rank, now_s) returns the task that a free rank runs now, or None and when to ask
        again: once the next of the tasks in question is ready. A rank is asked, by time, then rank,
        when it is free, and when it received a value that was not written when it was asked.
        """
        jobs, left = self.jobs, len(self.jobs.tasks)
        done: Orders = [[] for _ in range(jobs.num_ranks)]
        free_s = [0.0] * jobs.num_ranks
        wake = [(0.0, rank) for rank in range(jobs.num_ranks)]
        while wake:
            now_s, rank = heappop(wake)
            if free_s[rank] > now_s:
                continue
            task, later_s = choose(rank, now_s)
            if task is None:
                if later_s < NEVER:
                    heappush(wake, (later_s, rank))
                continue
            free_s[rank] = end_s = now_s + jobs.seconds[task]
            heappush(wake, (end_s, rank))
            for base in jobs.makes[task]:
                value = base + jobs.microbatch[task]
                self.written_s[value] = end_s
                for reader, hop_s in self.waiting.pop(value, {}).items():
                    heappush(wake, (end_s + hop_s, reader))
            done[rank].append(task)
            left -= 1
        return None if left else done
