"""The simulator: when each task of a schedule runs, how long ranks idle, which tasks wait for which."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ppctl.errors import ConfigError
from ppctl.schedule.activations import memory_steps, peak_activations, peak_bytes
from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import ALL_KINDS, Kind, Schedule, Task, Value, writes
from ppctl.schedule.search.orders import Jobs
from ppctl.schedule.walk import timed_walk, walk

__all__ = ["Timeline", "duration_s", "peak_activations", "simulate"]


@dataclass(frozen=True)
class Timeline:
    """Start and end of every task in seconds, as free-running ranks would execute them, and what follows from them."""

    schedule: Schedule
    costs: Costs
    start_s: dict[Task, float]
    end_s: dict[Task, float]
    is_uneven: bool = False  # measured, on shared cores or in lockstep: tasks that cost the same take not the same time

    @cached_property
    def makespan_s(self) -> float:
        """From the first start to the last end: a step with a barrier before the optimizer."""
        return max(self.end_s.values())

    @cached_property
    def period_s(self) -> float:
        """The longest time any rank takes from its first start to its last end: a step without that barrier."""
        return max(self.end_s[tasks[-1]] - self.start_s[tasks[0]] for tasks in self.schedule.ranks)

    @cached_property
    def bubble_fractions(self) -> tuple[float, ...]:
        """For each rank, the idle share of the makespan, 0..1."""
        busy = (sum(self.end_s[task] - self.start_s[task] for task in tasks) for tasks in self.schedule.ranks)
        return tuple(1 - busy_s / self.makespan_s for busy_s in busy)

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all ranks between 0 and the makespan, 0..1."""
        return sum(self.bubble_fractions) / self.schedule.num_ranks

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """For each rank, the most activations held at once, in units of one microbatch through 1/p of the model."""
        return peak_activations(self.schedule)

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """For each rank, the most bytes of activations held at once."""
        return peak_bytes(self.schedule, self.costs)

    def memory_curve(self, rank: int) -> tuple[tuple[float, float], ...]:
        """(seconds, activations held from then on) whenever that changes on `rank`; units of `peak_activations`."""
        num_chunks = self.schedule.num_chunks
        curve: list[tuple[float, float]] = []
        live = 0
        for task, change in memory_steps(self.schedule.ranks[rank]):
            live += change
            at_s = self.start_s[task] if change > 0 else self.end_s[task]
            curve.append((at_s, live / num_chunks))
        return tuple(curve)

    def waits_for(self, task: Task) -> Task | None:
        """The task whose end set the start of `task`: the one before it on its rank, or one that writes what it reads.

        None for a task that starts at 0. The last of them to end, where the timeline was measured.
        """
        rank_at = self.schedule.rank_at
        if self.start_s[task] == 0:
            return None
        before = self._before.get(task)
        ready_s = {} if before is None else {before: self.end_s[before]}
        for value in self.schedule.reads(task):
            writer = self._writer(value)
            hop_s = 0.0 if rank_at(value) == rank_at(task) else self.costs.hop_s
            ready_s.setdefault(writer, self.end_s[writer] + hop_s)
        found = max(ready_s, key=ready_s.__getitem__, default=None)
        assert self.is_uneven or (found and ready_s[found] == self.start_s[task]), f"{task} starts for no reason"
        return found

    @cached_property
    def critical_path(self) -> tuple[Task, ...]:
        """A chain of tasks from 0 to the makespan, each waiting for the one before it."""
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


def duration_s(task: Task, costs: Costs, num_chunks: int) -> float:
    """Seconds of one task on a rank of `num_chunks` stages."""
    return costs.seconds(task.kind, task.stage, num_chunks)


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Return the timeline of free-running ranks: a task starts when its rank is free and its values have arrived.

    A value that crosses ranks arrives `costs.hop_s` after it was written; hops do not slow each other down, unless
    `costs.link_hosts` says that they queue. ConfigError for costs of each stage that are not as many as the stages.

    >>> from ppctl.schedule.families.one_f_one_b import one_f_one_b
    >>> simulate(one_f_one_b(8, 32), Costs()).makespan_s
    117.0
    """
    costs.check(schedule.num_stages, schedule.num_parts)
    num_chunks = schedule.num_chunks
    if costs.link_hosts is not None and schedule.divides_vocabulary:
        raise ConfigError(
            "costs.link_s: what waits for links is not simulated with schedule.vocab=parallel, whose sums go to all "
            "ranks at once. Use costs.link_s=0."
        )
    if costs.link_hosts is not None:
        return _on_links(schedule, costs)
    start_s: dict[Task, float] = {}
    end_s: dict[Task, float] = {}

    def seconds(kind: Kind, stage: int) -> float:
        return costs.seconds(kind, stage, num_chunks)

    for _, _, task, start, end in timed_walk(schedule, seconds, costs.hop_s):
        start_s[task], end_s[task] = start, end
    return Timeline(schedule, costs, start_s, end_s)


def _on_links(schedule: Schedule, costs: Costs) -> Timeline:
    """Return the timeline of ranks whose hops queue for links."""
    jobs = Jobs(schedule, costs)
    run = jobs.run(jobs.first)
    if run is None:
        for _ in walk(schedule):  # which says what is missing
            pass
    assert run is not None, "ranks that wait for each other do so whatever hops take"
    start_s, end_s = (dict(zip(jobs.tasks, times, strict=True)) for times in (run.start_s, run.end_s))
    return Timeline(schedule, costs, start_s, end_s, is_uneven=True)
