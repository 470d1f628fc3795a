"""The walk over a schedule: tasks in an order that ranks can run, with start and end times.

The dependency rule of `ir` is the same for every microbatch, so it is evaluated once for each stage
and kind, and the walk runs on integers. It takes a fraction of a second for 131,072 tasks; a search
times thousands of orders of one schedule. In `ChoosingRanks` ranks choose their next tasks instead.
`free_running` cannot use either of them, since it slows ranks down.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate, pairwise

from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import WRITES, Kind, Schedule, Task, writes
from ppctl.schedule.placement_costs import Ledger

NEVER = float("inf")
Orders = list[list[int]]  # task numbers of each rank, in program order
# (tasks that a free rank runs together, their start in seconds), or ((), time of the next choice)
Chosen = tuple[tuple[int, ...], float]
NONE = -1


@dataclass(frozen=True)
class Rule:
    """The dependency rule on integers: value (name, stage, m) has number base[name, stage] + m.

    Tasks are keyed by (stage or vocabulary part, kind). `reads`: the base of each value that the
    task reads, and whether the value crosses ranks. `writes`: the base of each value written.
    """

    num_values: int
    base: dict[tuple[str, int], int]
    reads: dict[tuple[int, Kind], tuple[tuple[int, bool], ...]]
    writes: dict[tuple[int, Kind], tuple[int, ...]]

    @staticmethod
    def of(schedule: Schedule) -> Rule:
        values = dict.fromkeys(name for made in WRITES.values() for name in made)
        names = [(name, at) for name in values for at in range(len(schedule.ranks_of(name)))]
        base = {place: i * schedule.num_microbatches for i, place in enumerate(names)}
        places: list[tuple[int, Kind]]
        places = [(at, kind) for kind in WRITES for at in range(len(schedule.ranks_of(kind)))]
        reads = dict[tuple[int, Kind], tuple[tuple[int, bool], ...]]()
        for place in places:
            task, rank_at = Task(*place, 0), schedule.rank_at
            needs = schedule.reads(task)
            reads[place] = tuple((base[v[:2]], rank_at(v) != rank_at(task)) for v in needs)
        makes = {place: tuple(base[v[:2]] for v in writes(Task(*place, 0))) for place in places}
        return Rule(len(names) * schedule.num_microbatches, base, reads, makes)


@dataclass
class TimedOrders:
    """Start and end of each task number, on free-running ranks that follow given orders."""

    makespan_s: float
    start_s: list[float]
    end_s: list[float]
    waits_for: list[int]  # task whose end set the start, or NONE

    def critical_path(self) -> list[int]:
        """Return the chain of tasks from 0 s to the last end, each waiting for the one before."""
        task = max(range(len(self.end_s)), key=self.end_s.__getitem__)
        path: list[int] = []
        while task != NONE:
            path.append(task)
            task = self.waits_for[task]
        return path[::-1]


class Jobs:
    """The tasks of a schedule as numbers, with their values, costs and memory.

    Lists over task numbers: `rank`, `microbatch`, `seconds`, `needs` (base and transfer seconds of
    each value read), `makes` (bases of values written), `rise` and `change` (memory). A base is a
    value's number for microbatch 0, see `Rule`. `first`: the orders of `schedule`. `spent`: number
    of tasks that `run` has timed so far. ledger: memory of the tasks; None: one unit a stash.
    """

    def __init__(self, schedule: Schedule, costs: Costs, ledger: Ledger | None = None):
        self.schedule, self.num_ranks = schedule, schedule.num_ranks
        self.tasks = [task for tasks in schedule.ranks for task in tasks]
        self.rank = [r for r, tasks in enumerate(schedule.ranks) for _ in tasks]
        self.microbatch = [microbatch for _, _, microbatch in self.tasks]
        bounds = accumulate(map(len, schedule.ranks), initial=0)
        self.first: Orders = [list(range(*each)) for each in pairwise(bounds)]
        chunks = schedule.num_chunks
        seconds = {
            (stage, kind): costs.seconds(kind, stage, chunks)
            for of_rank in schedule.counts
            for kind, stage, _ in of_rank
        }
        self.seconds = [seconds[task[:2]] for task in self.tasks]
        rule = Rule.of(schedule)
        hop_s, self.num_values = costs.transfer_s, rule.num_values
        needs = {
            place: tuple((base, hop_s if crosses else 0.0) for base, crosses in reads)
            for place, reads in rule.reads.items()
        }
        self.needs = [needs[task[:2]] for task in self.tasks]
        self.makes = [rule.writes[task[:2]] for task in self.tasks]
        self.ledger = Ledger.counted(schedule) if ledger is None else ledger
        self.held, self.reserve = self.ledger.held, self.ledger.reserve
        self.spent = 0

    @cached_property
    def rise(self) -> list[int]:
        """Return the memory that each task adds on its rank while it runs."""
        return [self.ledger.rise(stage, kind) for stage, kind, _ in self.tasks]

    @cached_property
    def change(self) -> list[int]:
        """Return the change of the rank's memory from before each task to after it."""
        return [self.ledger.change(stage, kind) for stage, kind, _ in self.tasks]

    def run(self, orders: Orders, limit_s: float = float("inf")) -> TimedOrders | None:
        """Return the times of `orders`; None if ranks block, or a task ends at limit_s or later.

        Sets `at`, the step that each rank reached, and `ran`, the tasks in an order that can run.
        """
        # 1. times of tasks and values; step, time and last task of each rank
        needs, makes, seconds, number = self.needs, self.makes, self.seconds, len(self.seconds)
        microbatch = self.microbatch
        start_s, end_s, waits_for = [0.0] * number, [0.0] * number, [NONE] * number
        written_s: list[float | None] = [None] * self.num_values
        writer = [NONE] * self.num_values
        at, free_s, before = [0] * self.num_ranks, [0.0] * self.num_ranks, [NONE] * self.num_ranks
        self.at, self.ran, waiting = at, list[int](), dict[int, list[int]]()
        ran = self.ran.append
        ready, left, latest_s = list(range(self.num_ranks)), number, 0.0
        # 2. advance each ready rank until a value is missing
        while ready:
            rank = ready.pop()
            order, step, now_s, last = orders[rank], at[rank], free_s[rank], before[rank]
            while step < len(order):
                task = order[step]
                begin_s, why, m = now_s, last, microbatch[task]
                for base, hop_s in needs[task]:
                    arrives_s = written_s[base + m]
                    if arrives_s is None:
                        waiting.setdefault(base + m, []).append(rank)
                        break
                    if arrives_s + hop_s > begin_s:
                        begin_s, why = arrives_s + hop_s, writer[base + m]
                else:
                    now_s = begin_s + seconds[task]
                    if now_s >= limit_s:
                        self.spent += number - left
                        return None
                    start_s[task], end_s[task], waits_for[task], last = begin_s, now_s, why, task
                    ran(task)
                    for base in makes[task]:
                        written_s[base + m], writer[base + m] = now_s, task
                        if base + m in waiting:
                            ready.extend(waiting.pop(base + m))
                    step, left = step + 1, left - 1
                    continue
                break
            at[rank], free_s[rank], before[rank] = step, now_s, last
            latest_s = max(latest_s, now_s)
        self.spent += number - left
        return None if left else TimedOrders(latest_s, start_s, end_s, waits_for)

    def fits(self, order: Sequence[int], cap: int) -> bool:
        """Return whether a rank that runs its tasks in this order never holds more than `cap`.

        order: task numbers of one rank. cap: maximum memory, in the ledger's units.
        """
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
    """Simulated free-running ranks. A function, passed to `run`, chooses each rank's next task."""

    def __init__(self, jobs: Jobs):
        self.jobs = jobs
        self.written_s = [NEVER] * jobs.num_values
        # ranks that wait for each unwritten value, with the seconds of its transfer
        self.waiting = defaultdict[int, dict[int, float]](dict)

    def ready_s(self, task: int) -> float:
        """Return the time in seconds when a task can start; NEVER if a value is unwritten."""
        latest_s, m = 0.0, self.jobs.microbatch[task]
        for base, hop_s in self.jobs.needs[task]:
            arrives_s = self.written_s[base + m] + hop_s
            if arrives_s == NEVER:
                self.waiting[base + m][self.jobs.rank[task]] = hop_s
                return NEVER
            if arrives_s > latest_s:
                latest_s = arrives_s
        return latest_s

    def run(self, choose: Callable[[int, float], Chosen]) -> Orders | None:
        """Run all tasks and return the orders of the ranks; None if ranks get stuck.

        choose(rank, now_s) is called when a rank is free, and when a value that it waits for
        arrives.
        """
        jobs, left = self.jobs, len(self.jobs.tasks)
        done: Orders = [[] for _ in range(jobs.num_ranks)]
        free_s = [0.0] * jobs.num_ranks
        wake = [(0.0, rank) for rank in range(jobs.num_ranks)]
        while wake:
            now_s, rank = heappop(wake)
            if free_s[rank] > now_s:
                continue
            tasks, at_s = choose(rank, now_s)
            if not tasks:
                if at_s < NEVER:
                    heappush(wake, (at_s, rank))
                continue
            free_s[rank] = end_s = at_s + sum(jobs.seconds[task] for task in tasks)
            heappush(wake, (end_s, rank))
            made = (base + jobs.microbatch[task] for task in tasks for base in jobs.makes[task])
            for value in made:
                self.written_s[value] = end_s
                for reader, hop_s in self.waiting.pop(value, {}).items():
                    heappush(wake, (end_s + hop_s, reader))
            done[rank] += tasks
            left -= len(tasks)
        return None if left else done
