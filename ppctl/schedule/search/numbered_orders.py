"""A schedule's tasks as numbers, so that a search can time thousands of orders of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from ppctl.schedule.costs import Costs
from ppctl.schedule.execution_order import NEVER, Rule
from ppctl.schedule.ir import Schedule
from ppctl.schedule.search.placement_costs import Ledger

Orders = list[list[int]]  # for each rank the numbers of its tasks, in program order
NONE = -1


@dataclass
class TimedOrders:
    """Orders run by free ranks: of each task start, end, and the task whose end set the start."""

    makespan_s: float
    start_s: list[float]
    end_s: list[float]
    waits_for: list[int]  # a task, or NONE

    def critical_path(self) -> list[int]:
        """Return a chain of tasks from 0 to the last end, each waiting for its predecessor."""
        task = max(range(len(self.end_s)), key=self.end_s.__getitem__)
        path: list[int] = []
        while task != NONE:
            path.append(task)
            task = self.waits_for[task]
        return path[::-1]


class Jobs:
    """The tasks of `schedule` as numbers, with their values and costs; `first`: its orders.

    `rank`, `seconds`, `rise` and `change` (of the rank's memory, while a task runs and after it)
    are lists over task numbers, `held` one over ranks. ledger: the units; None: stashes are
    counted. `spent` counts the tasks that runs have timed so far.
    """

    def __init__(self, schedule: Schedule, costs: Costs, ledger: Ledger | None = None):
        self.schedule, self.num_ranks, self.hop_s = schedule, schedule.num_ranks, costs.transfer_s
        self.tasks = [task for tasks in schedule.ranks for task in tasks]
        self.rank = [r for r, tasks in enumerate(schedule.ranks) for _ in tasks]
        chunks = schedule.num_chunks
        self.seconds = [costs.seconds(kind, stage, chunks) for stage, kind, _ in self.tasks]
        ledger = Ledger.counted(schedule) if ledger is None else ledger
        self.held, self.reserve = ledger.held, ledger.reserve
        places = {task[:2] for task in self.tasks}
        rise = {place: ledger.rise(*place) for place in places}
        change = {place: ledger.change(*place) for place in places}
        self.rise = [rise[task[:2]] for task in self.tasks]
        self.change = [change[task[:2]] for task in self.tasks]
        rule = Rule.of(schedule)
        reads, writes, self.num_values = rule.arrivals(self.hop_s), rule.writes, rule.num_values
        self.needs = [[(base + m, hop_s) for base, hop_s in reads[k][s]] for s, k, m in self.tasks]
        self.makes = [[base + m for base in writes[k][s]] for s, k, m in self.tasks]
        self.spent = 0
        numbers = iter(range(len(self.tasks)))
        self.first: Orders = [[next(numbers) for _ in tasks] for tasks in schedule.ranks]

    def run(self, orders: Orders, limit_s: float = float("inf")) -> TimedOrders | None:
        """Return the times of orders; None if ranks block, or a task ends at limit_s or later."""
        # 1. times of tasks and values; of each rank its step, its time, its last task
        needs, makes, seconds, number = self.needs, self.makes, self.seconds, len(self.seconds)
        start_s, end_s, waits_for = [0.0] * number, [0.0] * number, [NONE] * number
        written_s: list[float | None] = [None] * self.num_values
        writer = [NONE] * self.num_values
        at, free_s, before = [0] * self.num_ranks, [0.0] * self.num_ranks, [NONE] * self.num_ranks
        waiting: dict[int, int] = {}
        ready, left, latest_s = list(range(self.num_ranks)), number, 0.0
        # 2. each ready rank goes on until a value is missing
        while ready:
            rank = ready.pop()
            order, step, now_s, last = orders[rank], at[rank], free_s[rank], before[rank]
            while step < len(order):
                task = order[step]
                begin_s, why = now_s, last
                for value, hop_s in needs[task]:
                    arrives_s = written_s[value]
                    if arrives_s is None:
                        waiting[value] = rank  # a value has one reader on another rank
                        break
                    if arrives_s + hop_s > begin_s:
                        begin_s, why = arrives_s + hop_s, writer[value]
                else:
                    now_s = begin_s + seconds[task]
                    if now_s >= limit_s:
                        self.spent += number - left
                        return None
                    start_s[task], end_s[task], waits_for[task], last = begin_s, now_s, why, task
                    for value in makes[task]:
                        written_s[value], writer[value] = now_s, task
                        if value in waiting:
                            ready.append(waiting.pop(value))
                    step, left = step + 1, left - 1
                    continue
                break
            at[rank], free_s[rank], before[rank] = step, now_s, last
            latest_s = max(latest_s, now_s)
        self.spent += number - left
        return None if left else TimedOrders(latest_s, start_s, end_s, waits_for)

    def fits(self, order: Sequence[int], cap: int) -> bool:
        """Return whether a rank that runs its tasks in this order never holds more than `cap`."""
        rise, change = self.rise, self.change
        live = self.held[self.rank[order[0]]]
        for task in order:
            if live + rise[task] > cap:
                return False
            live += change[task]
        return True

    def as_schedule(self, orders: Orders, name: str) -> Schedule:
        """Return the schedule of these orders."""
        ranks = tuple(tuple(self.tasks[task] for task in order) for order in orders)
        return replace(self.schedule, name=name, ranks=ranks)


class ChoosingRanks:
    """Free ranks that choose their next tasks, such as the first of a list that is ready."""

    def __init__(self, jobs: Jobs):
        self.jobs = jobs
        self.written_s = [NEVER] * jobs.num_values
        # ranks to ask again once a value is written, and seconds until it is there
        self.waiting = defaultdict[int, dict[int, float]](dict)

    def ready_s(self, task: int) -> float:
        """Return when all values that a task reads are there; NEVER where one is not written."""
        latest_s = 0.0
        for value, hop_s in self.jobs.needs[task]:
            arrives_s = self.written_s[value] + hop_s
            if arrives_s == NEVER:
                self.waiting[value][self.jobs.rank[task]] = hop_s
                return NEVER
            if arrives_s > latest_s:
                latest_s = arrives_s
        return latest_s

    def run(self, choose: Callable[[int, float], tuple[int | None, float]]) -> Orders | None:
        """Return the orders in which the ranks ran all tasks; None if they got stuck.

        choose(rank, now_s) returns the task that a free rank runs now, or None and when to ask
        again. A rank is asked, by time, then rank, when it is free, and when it received a value
        for which a task was not ready.
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
            for value in jobs.makes[task]:
                self.written_s[value] = end_s
                for reader, hop_s in self.waiting.pop(value, {}).items():
                    heappush(wake, (end_s + hop_s, reader))
            done[rank].append(task)
            left -= 1
        return None if left else done
