"""The simulator: when each task of a schedule runs, how long ranks idle, what tasks wait for."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ppctl.schedule.costs import Costs
from ppctl.schedule.execution_order import Jobs
from ppctl.schedule.ir import ALL_KINDS, Schedule, Task, Value, writes
from ppctl.schedule.search.placement_costs import Placed, peak_activations
from ppctl.schedule.validation import check_order

MOST_TASKS = 500_000  # of one simulation and one chunk a rank, about a second


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
    def critical_path(self) -> tuple[Task, ...]:
        """Return a chain of tasks from 0 to the makespan, each waiting for the one before it."""
        task: Task | None = max(self.end_s, key=self.end_s.__getitem__)
        path: list[Task] = []
        while task is not None:
            path.append(task)
            task = self.waits_for(task)
        return tuple(reversed(path))

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
    tasks = [(jobs.tasks[task], task) for task in jobs.ran]  # tasks may take no time
    start_s, end_s = ({task: each[i] for task, i in tasks} for each in (run.start_s, run.end_s))
    return Timeline(schedule, costs, start_s, end_s)
