"""Validation, from the dependency rule of `ir`.

A schedule that passes `validate` cannot deadlock, computes every gradient once, and reads nothing before it exists.
"""

from __future__ import annotations

from ppctl.errors import ScheduleError
from ppctl.schedule.ir import ALL_KINDS, PART_KINDS, Kind, Schedule, Task, Value, writes
from ppctl.schedule.walk import Rule, fault, walk

__all__ = ["validate", "walk"]


def validate(schedule: Schedule) -> Schedule:
    """`schedule`, or ScheduleError: placement, each value written once and before it is read, nothing missing."""
    for stage, rank in enumerate(schedule.rank_of):
        if not 0 <= rank < schedule.num_ranks:
            raise ScheduleError(
                f"stage {stage} is placed on rank {rank}, but there are ranks 0..{schedule.num_ranks - 1}."
            )
    rule = Rule.of(schedule)
    _check_complete(schedule, rule, _check_tasks(schedule, rule))
    for _ in walk(schedule):
        pass
    return schedule


def _check_tasks(schedule: Schedule, rule: Rule) -> bytearray:
    """Which values are written, by their numbers. ScheduleError for a task in the wrong place or one too many."""
    num_microbatches, places = schedule.num_microbatches, {kind: schedule.places(kind) for kind in ALL_KINDS}
    written = bytearray(rule.num_values)
    for rank, tasks in enumerate(schedule.ranks):
        for step, task in enumerate(tasks):
            stage, kind, m = task
            if not (kind in places and stage in places[kind] and 0 <= m < num_microbatches):
                raise fault(schedule, rank, step, _outside(schedule, task))
            if schedule.rank_at(task) != rank:
                held = "part" if kind in PART_KINDS else "stage"
                what = f"{task} is on rank {rank}, but {held} {stage} is on rank {schedule.rank_at(task)}."
                raise fault(schedule, rank, step, what)
            for base in rule.writes[kind][stage]:
                if written[base + m]:
                    raise _written_twice(schedule, rank, step)
                written[base + m] = 1
    return written


def _outside(schedule: Schedule, task: Task) -> str:
    """Return the message on a task of no stage, part or microbatch."""
    last = f"microbatches 0..{schedule.num_microbatches - 1}."
    if task.kind in PART_KINDS:
        return f"{task} is outside parts 0..{schedule.num_parts - 1} of the vocabulary x {last}"
    return f"{task} is outside stages 0..{schedule.num_stages - 1} x {last}"


def _written_twice(schedule: Schedule, rank: int, step: int) -> ScheduleError:
    """The error for a task that writes what another wrote before it in the order of ranks and steps."""
    task = schedule.ranks[rank][step]
    before = [*(t for tasks in schedule.ranks[:rank] for t in tasks), *schedule.ranks[rank][:step]]
    for value in writes(task):
        for other in before:
            if value in writes(other):
                return fault(schedule, rank, step, f"{task} writes {value}, which {other} writes too.")
    raise AssertionError(f"{task} writes nothing twice")


def _check_complete(schedule: Schedule, rule: Rule, written: bytearray) -> None:
    """Raise ScheduleError for the first forward or weight gradient that no task computes."""
    for stage, rank in enumerate(schedule.rank_of):
        act, pending, wgrad = (rule.base[name, stage] for name in ("act", "pending", "wgrad"))
        for m in range(schedule.num_microbatches):
            if written[act + m] and written[wgrad + m]:
                continue
            backward: Kind = "W" if written[pending + m] else "B"
            name, kind = ("wgrad", backward) if written[act + m] else ("act", "F")
            what = f"the program ends without {Task(stage, kind, m)}, which writes {Value(name, stage, m)}."
            raise fault(schedule, rank, len(schedule.ranks[rank]), what)
    for part in range(schedule.num_parts):
        for kind in PART_KINDS:
            task = Task(part, kind, 0)
            for base, value in zip(rule.writes[kind][part], writes(task), strict=True):
                missing = next((m for m in range(schedule.num_microbatches) if not written[base + m]), None)
                if missing is not None:
                    wanted = f"{task._replace(microbatch=missing)}, which writes {value._replace(microbatch=missing)}"
                    raise fault(schedule, part, len(schedule.ranks[part]), f"the program ends without {wanted}.")
