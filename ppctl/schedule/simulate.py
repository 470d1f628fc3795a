"""What a schedule costs: when each task runs, how long ranks idle, how many activations they hold."""

from __future__ import annotations

from dataclasses import dataclass

from ppctl.costs import Costs
from ppctl.schedule.ir import Schedule, Task, Value, reads, writes
from ppctl.schedule.validate import walk


@dataclass(frozen=True)
class Timeline:
    """Start and end of every task in seconds, as free-running ranks would execute them."""

    schedule: Schedule
    start_s: dict[Task, float]
    end_s: dict[Task, float]

    @property
    def makespan_s(self) -> float:
        return max(self.end_s.values())

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all ranks between 0 and the makespan, 0..1."""
        busy = sum(self.end_s[task] - start for task, start in self.start_s.items())
        return 1 - busy / (self.makespan_s * self.schedule.num_ranks)


def duration_s(task: Task, costs: Costs, num_chunks: int) -> float:
    """Seconds of one task. `costs` are those of 1/p of the model; a chunk costs 1/V of them."""
    by_kind = {"F": costs.forward_s, "B": costs.backward_s, "I": costs.input_grad_s, "W": costs.weight_grad_s}
    return by_kind[task.kind] / num_chunks


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline of free-running ranks: a task starts when its rank is free and its values have arrived.

    A value that crosses ranks arrives `costs.transfer_s` after it was written.
    """
    written_s: dict[Value, float] = {}
    start_s: dict[Task, float] = {}
    end_s: dict[Task, float] = {}
    free_s = [0.0] * schedule.num_ranks
    rank_of, num_stages = schedule.rank_of, schedule.num_stages
    for rank, _, task in walk(schedule):
        start = free_s[rank]
        for value in reads(task, num_stages):
            hop_s = costs.transfer_s if rank_of[value.stage] != rank else 0.0
            start = max(start, written_s[value] + hop_s)
        end = start + duration_s(task, costs, schedule.num_chunks)
        start_s[task], end_s[task], free_s[rank] = start, end, end
        for value in writes(task, num_stages):
            written_s[value] = end
    return Timeline(schedule, start_s, end_s)


def peak_activations(schedule: Schedule) -> tuple[float, ...]:
    """For each rank, the most activations held at once, in units of one microbatch through 1/p of the model.

    A chunk's stash counts 1/V from its forward to the end of its full or weight-gradient backward.
    """
    peaks = []
    for tasks in schedule.ranks:
        live = peak = 0
        for task in tasks:
            live += task.kind == "F"
            peak = max(peak, live)
            live -= task.kind in "BW"
        peaks.append(peak / schedule.num_chunks)
    return tuple(peaks)
