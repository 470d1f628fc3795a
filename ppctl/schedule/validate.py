"""Validation and the one walk over a schedule, both from the dependency rule of `ir`.

A schedule that passes `validate` cannot deadlock, computes every gradient once, and reads nothing before it exists.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ppctl.errors import ScheduleError
from ppctl.schedule.ir import Kind, Schedule, Task, Value, reads, writes
from ppctl.schedule.text import grid


def walk(schedule: Schedule) -> Iterator[tuple[int, int, Task]]:
    """(rank, step, task) in an order that the ranks can really run: program order on a rank, reads after writes.

    ScheduleError, with the grid and an arrow, when no rank can go on although tasks are left.
    """
    num_stages = schedule.num_stages
    done: set[Value] = set()
    waiting: dict[Value, list[int]] = defaultdict(list)
    at = [0] * schedule.num_ranks
    ready = list(range(schedule.num_ranks))
    while ready:
        rank = ready.pop()
        tasks = schedule.ranks[rank]
        while at[rank] < len(tasks):
            task = tasks[at[rank]]
            missing = next((v for v in reads(task, num_stages) if v not in done), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            yield rank, at[rank], task
            at[rank] += 1
            for value in writes(task, num_stages):
                done.add(value)
                ready.extend(waiting.pop(value, ()))
    for rank, tasks in enumerate(schedule.ranks):
        if at[rank] < len(tasks):
            task = tasks[at[rank]]
            missing = next(v for v in reads(task, num_stages) if v not in done)
            raise _fault(schedule, rank, at[rank], f"{task} waits for {missing}, which no rank can write any more.")


def validate(schedule: Schedule) -> Schedule:
    """`schedule`, or ScheduleError: placement, each value written once and before it is read, nothing missing."""
    num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
    for stage, rank in enumerate(schedule.rank_of):
        if not 0 <= rank < schedule.num_ranks:
            raise ScheduleError(
                f"stage {stage} is placed on rank {rank}, but there are ranks 0..{schedule.num_ranks - 1}."
            )
    written: dict[Value, Task] = {}
    for rank, tasks in enumerate(schedule.ranks):
        for step, task in enumerate(tasks):
            if not (0 <= task.stage < num_stages and 0 <= task.microbatch < num_microbatches):
                what = f"{task} is outside stages 0..{num_stages - 1} x microbatches 0..{num_microbatches - 1}."
                raise _fault(schedule, rank, step, what)
            if schedule.rank_of[task.stage] != rank:
                what = f"{task} is on rank {rank}, but stage {task.stage} is on rank {schedule.rank_of[task.stage]}."
                raise _fault(schedule, rank, step, what)
            for value in writes(task, num_stages):
                if value in written:
                    raise _fault(schedule, rank, step, f"{task} writes {value}, which {written[value]} writes too.")
                written[value] = task
    for stage, rank in enumerate(schedule.rank_of):
        for m in range(num_microbatches):
            backward: Kind = "W" if Value("pending", stage, m) in written else "B"
            needs: tuple[tuple[str, Kind], ...] = (("act", "F"), ("wgrad", backward))
            for name, kind in needs:
                if Value(name, stage, m) not in written:
                    what = f"the program ends without {Task(stage, kind, m)}, which writes {Value(name, stage, m)}."
                    raise _fault(schedule, rank, len(schedule.ranks[rank]), what)
    for _ in walk(schedule):
        pass
    return schedule


def _fault(schedule: Schedule, rank: int, step: int, what: str) -> ScheduleError:
    return ScheduleError(f"{schedule.name}: rank {rank}, step {step}: {what}\n{grid(schedule.ranks, (rank, step))}")
