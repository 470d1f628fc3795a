"""Why ranks of a schedule wait for each other for ever: the tasks whose order makes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ppctl.schedule.ir import PART_KINDS, Kind, Schedule, Task, Value, writes

# the tasks of a rank's part that must have run before another of it, for the same microbatch
_BEFORE_PART = {"E": "", "S": "E", "T": "ES", "G": "EST"}
_BACKWARDS: tuple[Kind, ...] = ("B", "I")


def order_that_blocks(schedule: Schedule, at: Sequence[int]) -> str:
    """Return which tasks stand in the wrong order, where ranks can go no further than these steps; "" if not known.

    A task that stands before one that it depends on is wrong on any account. Else ranks wait for each other in a
    circle, and what each has the wrong way round is named.
    """
    for rank, tasks in enumerate(schedule.ranks):
        step_of = {task: step for step, task in enumerate(tasks)}
        for step, task in enumerate(tasks[at[rank] :], at[rank]):
            for needed in _needed(task, schedule, rank):
                if step_of.get(needed, -1) > step:
                    return f"Rank {rank} has {task} before {needed}, on which it depends."
    pairs = [f"rank {rank} has {first} before {later}" for rank, first, later in sorted(_circle(schedule, at))]
    return f"R{', and '.join(pairs)[1:]}: each waits for the other." if pairs else ""


def _circle(schedule: Schedule, at: Sequence[int]) -> list[tuple[int, Task, Task]]:
    """Return (rank, the task at which it stands, the later one that is waited for) for each rank of the circle."""
    places = {task: (rank, step) for rank, tasks in enumerate(schedule.ranks) for step, task in enumerate(tasks)}
    writer = {value: task for task in places for value in writes(task)}
    done = {task for tasks, step in zip(schedule.ranks, at, strict=True) for task in tasks[:step]}

    def missing(task: Task) -> Value:
        return next(value for value in schedule.reads(task) if writer.get(value) not in done)

    rank = next(rank for rank, tasks in enumerate(schedule.ranks) if at[rank] < len(tasks))
    task, seen = schedule.ranks[rank][at[rank]], dict[Task, int]()
    pairs: list[tuple[int, Task, Task]] = []
    while task not in seen:
        seen[task] = len(pairs)
        needed = writer.get(missing(task))
        if needed is None:
            return []  # it is in no program
        rank, step = places[needed]
        task = schedule.ranks[rank][at[rank]]
        if step != at[rank]:
            pairs.append((rank, task, needed))
    return pairs[seen[task] :]


def _needed(task: Task, schedule: Schedule, rank: int) -> Iterator[Task]:
    """Yield the tasks of a rank that must have run before one: forwards to the last stage, backwards from there."""
    stage, kind, m = task
    before = _BEFORE_PART[kind] if kind in PART_KINDS else ("E" if kind == "F" else "EST")
    if schedule.divides_vocabulary:
        yield from (Task(rank, part_kind, m) for part_kind in PART_KINDS if part_kind in before)
    if kind in PART_KINDS:
        yield from (Task(s, "F", m) for s in schedule.stages_of[rank] if kind != "E")
        yield from (Task(s, each, m) for s in schedule.stages_of[rank] for each in _BACKWARDS if kind == "G")
        return
    for s in range(schedule.num_stages):
        if schedule.rank_of[s] == rank:
            if s < stage or kind != "F":
                yield Task(s, "F", m)
            if kind != "F" and s > stage:
                yield from (Task(s, "B", m), Task(s, "I", m))
    if kind == "W":
        yield Task(stage, "I", m)
