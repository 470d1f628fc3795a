"""Validation, from the dependency rule of `ir`.

A schedule that passes `validate` cannot deadlock, computes every gradient once, and reads nothing before it exists.
"""

from __future__ import annotations

from ppctl.errors import ScheduleError
from ppctl.schedule.ir import KINDS, Kind, Schedule, Task, Value, writes
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
    rank_of, num_stages, num_microbatches = schedule.rank_of, schedule.num_stages, schedule.num_microbatches
    written = bytearray(rule.num_values)
    for rank, tasks in enumerate(schedule.ranks):
        for step, task in enumerate(tasks):
            stage, kind, m = task
            if not (0 <= stage < num_stages and 0 <= m < num_microbatches and kind in KINDS):
                what = f"{task} is outside stages 0..{num_stages - 1} x microbatches 0..{num_microbatches - 1}."
                raise fault(schedule, rank, step, what)
            if rank_of[stage] != rank:
                what = f"{task} is on rank {rank}, but stage {stage} is on rank {rank_of[stage]}."
                raise fault(schedule, rank, step, what)
            for base in rule.writes[kind][stage]:
                if written[base + m]:
                    raise _written_twice(schedule, rank, step)
                written[base + m] = 1
    return written


def _written_twice(schedule: Schedule, rank: int, step: int) -> ScheduleError:
    """The error for a task that writes what another wrote before it in the order of ranks and steps."""
    task = schedule.ranks[rank][step]
    before = [*(t for tasks in schedule.ranks[:rank] for t in tasks), *schedule.ranks[rank][:step]]
    for value in writes(task, schedule.num_stages):
        for other in before:
            if value in writes(other, schedule.num_stages):
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
