"""When each task of a schedule runs, how long ranks idle, what tasks wait for.

Ranks run freely (`simulate`), share cores as simulated devices do (`free_running`: with a capacity
of c, k ranks at work go on at the speed min(1, c/k) each), or meet in every tick of one program.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, chain, pairwise
from math import inf

from ppctl.schedule.costs import Costs
from ppctl.schedule.execution_order import Jobs
from ppctl.schedule.ir import ALL_KINDS, Schedule, Task, Value, writes
from ppctl.schedule.lockstep_ticks import tick_phases
from ppctl.schedule.search.placement_costs import Placed, peak_activations
from ppctl.schedule.tick_lowering import Ticks
from ppctl.schedule.validation import check_order

MOST_TASKS = 500_000  # of one simulation and one chunk a rank, about a second
ROUNDING = 1e-12  # relative


@dataclass(frozen=True)
class Timeline:
    """Start and end of every task in seconds on free-running ranks, and what follows from them."""

    schedule: Schedule
    costs: Costs
    start_s: dict[Task, float]
    end_s: dict[Task, float]
    is_uneven: bool = False  # equal tasks take unequal times: measured, shared cores or lockstep

    @cached_property
    def makespan_s(self) -> float:
        """Return the time from the first start to the last end: steps with a barrier between."""
        return max(self.end_s.values())

    @cached_property
    def period_s(self) -> float:
        """Return the longest time from a rank's first start to its last end: without a barrier."""
        return max(self.end_s[tasks[-1]] - self.start_s[tasks[0]] for tasks in self.schedule.ranks)

    @cached_property
    def bubble_fractions(self) -> tuple[float, ...]:
        """Return the idle share of the makespan of each rank, 0..1."""
        end_s, start_s = self.end_s, self.start_s
        busy_s = [sum(end_s[t] - start_s[t] for t in tasks) for tasks in self.schedule.ranks]
        return tuple(1 - rank_s / self.makespan_s for rank_s in busy_s)

    @property
    def bubble_fraction(self) -> float:
        """Return the idle share of all ranks between 0 and the makespan, 0..1."""
        return sum(self.bubble_fractions) / self.schedule.num_ranks

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """Return each rank's most activations at once, in microbatches through 1/p of the model."""
        return peak_activations(self.schedule)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Return the most bytes of activations that each rank holds at once."""
        return Placed(self.costs).ledger(self.schedule).peaks(self.schedule)

    def memory_curve(self, rank: int) -> tuple[tuple[float, float], ...]:
        """Return (seconds, activations from then on) at each change; units: `peak_activations`."""
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
        """Return the task whose end set the start of `task`: its predecessor, or a value's writer.

        None for a task that starts at 0. The last of them to end, where the timeline was measured.
        """
        rank_at = self.schedule.rank_at
        if self.start_s[task] == 0:
            return None
        before = self._before.get(task)
        ready_s = {} if before is None else {before: self.end_s[before]}
        for value in self.schedule.reads(task):
            writer = self._writer(value)
            hop_s = 0.0 if rank_at(value) == rank_at(task) else self.costs.transfer_s
            ready_s.setdefault(writer, self.end_s[writer] + hop_s)
        last = max(ready_s, key=ready_s.__getitem__, default=None)
        is_reason = self.is_uneven or (last and ready_s[last] == self.start_s[task])
        assert is_reason, f"{task} starts for no reason"
        return last

    @cached_property
    def _before(self) -> dict[Task, Task]:
        return {task: before for tasks in self.schedule.ranks for before, task in pairwise(tasks)}

    def _writer(self, value: Value) -> Task:
        tasks = (Task(value.stage, kind, value.microbatch) for kind in ALL_KINDS)
        return next(t for t in tasks if t in self.end_s and value in writes(t))


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Return the times of free ranks: a task starts when its rank is free and its values arrived.

    A value that crosses ranks arrives `costs.transfer_s` after it was written; hops do not slow
    each other down. ConfigError unless costs of each stage are as many as the stages.

    >>> from ppctl.schedule.families.one_f_one_b import one_f_one_b
    >>> simulate(one_f_one_b(8, 32), Costs()).makespan_s
    117.0
    """
    costs.check(schedule.num_stages, schedule.vocab_parts)
    jobs = Jobs(schedule, costs)
    run = jobs.run(jobs.first)
    if run is None:
        check_order(schedule)  # raises the error that names the missing value
    assert run is not None, "orders block at any costs"
    tasks = [jobs.tasks[task] for task in jobs.ran]  # as they ran: some may take no time
    times = (map(each.__getitem__, jobs.ran) for each in (run.start_s, run.end_s))
    start_s, end_s = (dict(zip(tasks, each, strict=True)) for each in times)
    return Timeline(schedule, costs, start_s, end_s)


def together_s(works_s: Sequence[float], capacity: float) -> float:
    """Return the seconds until all of `works_s`, which start together, are done.

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
    """Return the timeline of free ranks that share `capacity`; transfers take none.

    >>> from ppctl.schedule.families.one_f_one_b import one_f_one_b
    >>> free_running(one_f_one_b(2, 4), Costs(), capacity=1.0).makespan_s
    24.0
    """
    if capacity >= schedule.num_ranks:
        return simulate(schedule, costs)
    costs.check(schedule.num_stages, schedule.vocab_parts)
    jobs, now = Jobs(schedule, costs), 0.0
    at, written_s = [0] * schedule.num_ranks, [inf] * jobs.num_values  # each rank's step
    left: dict[int, float] = {}  # seconds at full speed left of each working rank's task
    start_s, end_s = dict[Task, float](), dict[Task, float]()
    while True:
        # 1. every idle rank begins its next task, if all that it reads is there
        arrives_s = inf  # the first of the values that ranks wait for
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
        # 2. all at work go on until one is done, or a value arrives
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
    """Return the timeline of ticks in lockstep: ranks meet after each phase of a tick.

    Those that share `capacity` go on alike: all have done the same seconds of work, or have ended.
    """
    start_s, end_s = dict[Task, float](), dict[Task, float]()
    now, chunks = 0.0, ticks.schedule.num_chunks
    for phase in chain.from_iterable(tick_phases(ticks.schedule, ticks.cells)):
        of_ranks = [[costs.seconds(t.kind, t.stage, chunks) for t in tasks] for tasks in phase]
        works_s = [sum(seconds) + costs.transfer_s for seconds in of_ranks]

        @cache
        def after(work_s: float, works_s: list[float] = works_s) -> float:
            """Return the seconds until a rank of this phase has done work_s of its work."""
            return together_s([min(each, work_s) for each in works_s], capacity)

        for tasks, seconds in zip(phase, of_ranks, strict=True):
            at_s = [now + after(done_s) for done_s in accumulate(seconds, initial=0.0)]
            for task, span in zip(tasks, pairwise(at_s), strict=True):
                start_s[task], end_s[task] = span
        now += after(max(works_s))
    return Timeline(ticks.schedule, costs, start_s, end_s, is_uneven=True)
