"""A schedule's tasks as numbers, so that a search can time thousands of orders of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import KINDS, Schedule, Task
from ppctl.schedule.search.ledger import Ledger
from ppctl.schedule.shared_links import Hop, links_between, run_on_links
from ppctl.schedule.walk import Rule

Orders = list[list[int]]  # for each rank the numbers of its tasks, in program order
NONE = -1


@dataclass
class TimedOrders:
    """Orders run by free ranks. Lists over task numbers: start, end, and the task whose end set the start (or NONE)."""

    makespan_s: float
    start_s: list[float]
    end_s: list[float]
    waits_for: list[int]

    def period_s(self, orders: Orders) -> float:
        """The longest time from a rank's first start to its last end."""
        return max(self.end_s[order[-1]] - self.start_s[order[0]] for order in orders)

    def critical_path(self, task: int | None = None) -> list[int]:
        """A chain of tasks from 0 to the end of `task` (of the last one), each waiting for the one before it."""
        task = max(range(len(self.end_s)), key=self.end_s.__getitem__) if task is None else task
        path: list[int] = []
        while task != NONE:
            path.append(task)
            task = self.waits_for[task]
        return path[::-1]


class Jobs:
    """The tasks of `schedule` with what they read, write and last; `first` is the schedule's own orders.

    `rank`, `seconds`, `rise` and `change` (of what the rank holds, while a task runs and after it) are lists over task
    numbers, `held` one over ranks. ledger: in which units; None: stashes are counted. `spent` counts the tasks that
    runs have timed so far.
    """

    def __init__(self, schedule: Schedule, costs: Costs, ledger: Ledger | None = None):
        self.schedule, self.num_ranks, self.hop_s = schedule, schedule.num_ranks, costs.hop_s
        self.tasks = [task for tasks in schedule.ranks for task in tasks]
        self.rank = [r for r, tasks in enumerate(schedule.ranks) for _ in tasks]
        self.seconds = [costs.seconds(task.kind, task.stage, schedule.num_chunks) for task in self.tasks]
        ledger = Ledger.counted(schedule) if ledger is None else ledger
        self.held, self.reserve = ledger.held, ledger.reserve
        rise, change = (
            {(s, kind): of(s, kind) for s in range(schedule.num_stages) for kind in KINDS}
            for of in (ledger.rise, ledger.change)
        )
        self.rise = [rise[task.stage, task.kind] for task in self.tasks]
        self.change = [change[task.stage, task.kind] for task in self.tasks]
        rule = Rule.of(schedule)
        arrivals = rule.arrivals(costs.hop_s)
        self.num_values = rule.num_values
        self.needs = [[(base + t.microbatch, hop_s) for base, hop_s in arrivals[t.kind][t.stage]] for t in self.tasks]
        self.makes = [[base + t.microbatch for base in rule.writes[t.kind][t.stage]] for t in self.tasks]
        self.costs = costs
        self.hops = None if costs.link_hosts is None else self._hops()
        self.spent = 0
        numbers = iter(range(len(self.tasks)))
        self.first: Orders = [[next(numbers) for _ in tasks] for tasks in schedule.ranks]

    def run(self, orders: Orders, limit_s: float = float("inf")) -> TimedOrders | None:
        """Return the times of these orders; None if ranks wait for each other, or a task ends at `limit_s` or later."""
        if self.hops is not None:
            return self._run_on_links(orders, limit_s, self.hops)
        needs, makes, seconds = self.needs, self.makes, self.seconds
        start_s, end_s, waits_for = [0.0] * len(seconds), [0.0] * len(seconds), [NONE] * len(seconds)
        written_s: list[float | None] = [None] * self.num_values
        writer = [NONE] * self.num_values
        at, free_s, before = [0] * self.num_ranks, [0.0] * self.num_ranks, [NONE] * self.num_ranks
        waiting: dict[int, int] = {}
        ready, left, latest_s = list(range(self.num_ranks)), len(seconds), 0.0
        while ready:
            rank = ready.pop()
            order, step, now_s, last = orders[rank], at[rank], free_s[rank], before[rank]
            while step < len(order):
                task = order[step]
                begin_s, why = now_s, last
                for value, hop_s in needs[task]:
                    arrives_s = written_s[value]
                    if arrives_s is None:
                        waiting[value] = rank  # each value has one reader that is not its writer's own rank
                        break
                    if arrives_s + hop_s > begin_s:
                        begin_s, why = arrives_s + hop_s, writer[value]
                else:
                    now_s = begin_s + seconds[task]
                    if now_s >= limit_s:
                        self.spent += len(seconds) - left
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
        self.spent += len(seconds) - left
        return None if left else TimedOrders(latest_s, start_s, end_s, waits_for)

    def _hops(self) -> dict[int, Hop]:
        """The values that cross ranks, with the links that they occupy."""
        made_on = {value: self.rank[task] for task, makes in enumerate(self.makes) for value in makes}
        reads = ((value, self.rank[task]) for task, needs in enumerate(self.needs) for value, _ in needs)
        return {v: Hop(r, links_between(self.costs, made_on[v], r)) for v, r in reads if made_on.get(v, r) != r}

    def _run_on_links(self, orders: Orders, limit_s: float, hops: dict[int, Hop]) -> TimedOrders | None:
        self.spent += len(self.seconds)
        how = self.costs.link_busy_s, self.costs.transfer_s, limit_s
        found = run_on_links(orders, self.seconds, self.needs, self.makes, hops, *how)
        return None if found is None else TimedOrders(max(found.end_s), *found)

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
        """The schedule of these orders."""
        ranks: tuple[tuple[Task, ...], ...] = tuple(tuple(self.tasks[task] for task in order) for order in orders)
        return replace(self.schedule, name=name, ranks=ranks)
