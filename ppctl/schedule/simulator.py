"""Simulate a schedule: start and end of each task, idle time, the cause of each wait.

`simulate`: ranks run freely. `free_running`: ranks run freely and share CPU cores, as simulated
devices do; with c cores, each of k busy ranks runs at speed min(1, c/k). `lockstep`: ranks
synchronize in every tick of one SPMD program.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, chain, pairwise
from math import inf

from ppctl.schedule.costs import Costs
from ppctl.schedule.execution_order import Jobs
from ppctl.schedule.ir import ALL_KINDS, Schedule, Task, writes
from ppctl.schedule.lockstep_ticks import tick_phases
from ppctl.schedule.placement_costs import Placed, peak_activations
from ppctl.schedule.tick_lowering import Ticks
from ppctl.schedule.validation import check_order, check_places

ROUNDING = 1e-12  # relative rounding error of a time


@dataclass(frozen=True)
class Timeline:
    """Start and end of every task; makespan, bubble and memory follow from them."""

    schedule: Schedule
    costs: Costs
    start_s: dict[Task, float]  # seconds after the step's start
    end_s: dict[Task, float]  # seconds after the step's start
    is_uneven: bool = False  # whether equal tasks may take unequal times: measured, shared cores
    ticks_s: float | None = None  # seconds of all ticks with their transfers; None: no lockstep

    @cached_property
    def makespan_s(self) -> float:
        """Return the step time, in seconds, with a barrier at its end: first start to last end.

        The last tick ends with its transfer.
        """
        return max(self.end_s.values()) if self.ticks_s is None else self.ticks_s

    @cached_property
    def period_s(self) -> float:
        """Return the step time in seconds without a barrier: the longest span of a rank's tasks.

        Ranks in lockstep have a barrier after every tick.
        """
        if self.ticks_s is not None:
            return self.ticks_s
        return max(self.end_s[tasks[-1]] - self.start_s[tasks[0]] for tasks in self.schedule.ranks)

    @cached_property
    def bubble_fractions(self) -> tuple[float, ...]:
        """Return each rank's idle share of the makespan, 0..1."""
        end_s, start_s = self.end_s, self.start_s
        busy_s = [sum(end_s[t] - start_s[t] for t in tasks) for tasks in self.schedule.ranks]
        return tuple(1 - rank_s / self.makespan_s for rank_s in busy_s)

    @property
    def bubble_fraction(self) -> float:
        """Return the mean idle share of the ranks, 0..1."""
        return sum(self.bubble_fractions) / self.schedule.num_ranks

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """Return each rank's peak activations, in microbatches through 1/p of the model."""
        return peak_activations(self.schedule)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Return each rank's peak bytes of activations."""
        return Placed(self.costs).ledger(self.schedule).peaks(self.schedule)

    def memory_curve(self, rank: int) -> tuple[tuple[float, float], ...]:
        """Return (seconds, activations after it) of each change, in units of `peak_activations`."""
        num_chunks = self.schedule.num_chunks
        curve: list[tuple[float, float]] = []
        live = 0
        for task in self.schedule.ranks[rank]:
            if task.kind in "FBW":
                live += 1 if task.kind == "F" else -1
                at_s = self.start_s[task] if task.kind == "F" else self.end_s[task]
                curve.append((at_s, live / num_chunks))
        return tuple(curve)

    def waits_for(self, task: Task) -> Task | None:
        """Return the task whose end set the start of `task`; None if it starts at 0.

        It is the task before it on its rank or a writer of one of its values, whichever ended, or
        delivered its value, last.
        """
        rank_at = self.schedule.rank_at
        if self.start_s[task] == 0:
            return None
        before = self._before.get(task)
        ready_s = {} if before is None else {before: self.end_s[before]}
        for value in self.schedule.reads(task):
            writers = (Task(value.stage, kind, value.microbatch) for kind in ALL_KINDS)
            writer = next(t for t in writers if t in self.end_s and value in writes(t))
            hop_s = 0.0 if rank_at(value) == rank_at(task) else self.costs.transfer_s
            ready_s.setdefault(writer, self.end_s[writer] + hop_s)
        last = max(ready_s, key=ready_s.__getitem__, default=None)
        is_reason = self.is_uneven or (last and ready_s[last] == self.start_s[task])
        assert is_reason, f"{task} starts for no reason"
        return last

    @cached_property
    def _before(self) -> dict[Task, Task]:
        return {task: before for tasks in self.schedule.ranks for before, task in pairwise(tasks)}


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Return the timeline of free-running ranks: a task starts once its rank and values are ready.

    A value that crosses ranks arrives `costs.transfer_s` after it was written. Transfers do not
    slow each other down.

    Args:
        schedule: a valid schedule; ScheduleError if its ranks wait for each other.
        costs: seconds and bytes of the tasks; ConfigError if a tuple has a wrong length.

    >>> from ppctl.schedule.families.one_f_one_b import one_f_one_b
    >>> simulate(one_f_one_b(8, 32), Costs()).makespan_s
    117.0
    """
    check_places(schedule)
    costs.check(schedule.num_stages, schedule.vocab_parts)
    jobs = Jobs(schedule, costs)
    run = jobs.run(jobs.first)
    if run is None:
        check_order(schedule)  # raises the error that names the missing value
    assert run is not None, "orders block at any costs"
    # The dicts list tasks in an order that can run. So a stable sort by start can run too: it keeps
    # this order for tasks that start together.
    tasks = [jobs.tasks[task] for task in jobs.ran]
    times = (map(each.__getitem__, jobs.ran) for each in (run.start_s, run.end_s))
    start_s, end_s = (dict(zip(tasks, each, strict=True)) for each in times)
    return Timeline(schedule, costs, start_s, end_s)


def together_s(works_s: Sequence[float], capacity: float) -> float:
    """Return the seconds that tasks take together if all start at 0 on `capacity` shared cores.

    works_s: seconds of each task without sharing.

    >>> together_s([1.0, 1.0, 3.0], capacity=2.0)
    3.5
    """
    left = len(works_s)
    if left <= capacity:
        return max(works_s, default=0.0)
    done = elapsed = 0.0
    for work in sorted(works_s):
        elapsed += (work - done) * max(1.0, left / capacity)
        done, left = work, left - 1
    return elapsed


def free_running(schedule: Schedule, costs: Costs, capacity: float = inf) -> Timeline:
    """Return the timeline of free-running ranks on `capacity` shared cores; transfers use none.

    >>> from ppctl.schedule.families.one_f_one_b import one_f_one_b
    >>> free_running(one_f_one_b(2, 4), Costs(), capacity=1.0).makespan_s
    24.0
    """
    if capacity >= schedule.num_ranks:
        return simulate(schedule, costs)
    costs.check(schedule.num_stages, schedule.vocab_parts)
    jobs, now = Jobs(schedule, costs), 0.0
    # the next step of each rank, and the write time of each value in seconds
    at, written_s = [0] * schedule.num_ranks, [inf] * jobs.num_values
    left: dict[int, float] = {}  # remaining seconds, at full speed, of each busy rank's task
    start_s, end_s = dict[Task, float](), dict[Task, float]()
    while True:
        # 1. start the next task of every idle rank whose values have arrived
        arrives_s = inf  # seconds of the first awaited arrival
        for rank, order in enumerate(jobs.first):
            if rank in left or at[rank] == len(order):
                continue
            task = order[at[rank]]
            m, needs = jobs.microbatch[task], jobs.needs[task]
            ready = max((written_s[base + m] + after for base, after in needs), default=0.0)
            if ready <= now * (1 + ROUNDING):
                left[rank], start_s[jobs.tasks[task]] = jobs.seconds[task], now
            else:
                arrives_s = min(arrives_s, ready)
        if not left and arrives_s == inf:
            break
        # 2. advance all busy ranks until a task ends or a value arrives
        speed = min(1.0, capacity / len(left)) if left else 1.0
        until = min(*(seconds / speed for seconds in left.values()), arrives_s - now, inf)
        now += until
        for rank in list(left):
            left[rank] -= until * speed
            if left[rank] <= ROUNDING * now:
                del left[rank]
                task = jobs.first[rank][at[rank]]
                end_s[jobs.tasks[task]] = now
                for base in jobs.makes[task]:
                    written_s[base + jobs.microbatch[task]] = now
                at[rank] += 1
    if len(end_s) < len(jobs.tasks):
        check_order(schedule)  # raises the error that names the missing value
    return Timeline(schedule, costs, start_s, end_s, is_uneven=True)


def lockstep(ticks: Ticks, costs: Costs, capacity: float) -> Timeline:
    """Return the timeline of ticks in lockstep: ranks synchronize after each phase of a tick.

    Ranks share `capacity` cores evenly: at any time all unfinished ranks have done the same work.
    """
    start_s, end_s = dict[Task, float](), dict[Task, float]()
    now, chunks = 0.0, ticks.schedule.num_chunks
    for phase in chain.from_iterable(tick_phases(ticks.schedule, ticks.cells)):
        of_ranks = [[costs.seconds(t.kind, t.stage, chunks) for t in tasks] for tasks in phase]
        works_s = [sum(seconds) + costs.transfer_s for seconds in of_ranks]

        @cache
        def after(work_s: float, works_s: list[float] = works_s) -> float:
            """Return the seconds of this phase until a rank has done work_s seconds of work."""
            return together_s([min(each, work_s) for each in works_s], capacity)

        for tasks, seconds in zip(phase, of_ranks, strict=True):
            at_s = [now + after(done_s) for done_s in accumulate(seconds, initial=0.0)]
            for task, span in zip(tasks, pairwise(at_s), strict=True):
                start_s[task], end_s[task] = span
        now += after(max(works_s))
    return Timeline(ticks.schedule, costs, start_s, end_s, is_uneven=True, ticks_s=now)
