"""Validation, from the dependency rule of `ir`.

A schedule that passes `validate` cannot deadlock, computes every gradient once, and reads nothing
before it exists.
"""

from __future__ import annotations

from ppctl.errors import ScheduleError
from ppctl.schedule.execution_order import Rule, check_order
from ppctl.schedule.ir import ALL_KINDS, PART_KINDS, Kind, Schedule, Task, Value, writes
from ppctl.schedule.schedule_faults import fault


def validate(schedule: Schedule) -> Schedule:
    """Return `schedule`, or raise ScheduleError: misplaced, missing, doubled or blocked tasks."""
    for stage, rank in enumerate(schedule.rank_of):
        if not 0 <= rank < schedule.num_ranks:
            ranks = f"there are ranks 0..{schedule.num_ranks - 1}"
            raise ScheduleError(f"stage {stage} is placed on rank {rank}, but {ranks}.")
    rule = Rule.of(schedule)
    _check_complete(schedule, rule, _check_tasks(schedule, rule))
    check_order(schedule)
    return schedule


def _check_tasks(schedule: Schedule, rule: Rule) -> bytearray:
    """Return which values are written, by number. ScheduleError for a misplaced or doubled task."""
    places = {kind: schedule.places(kind) for kind in ALL_KINDS}
    num_microbatches, written = schedule.num_microbatches, bytearray(rule.num_values)
    for rank, tasks in enumerate(schedule.ranks):
        for step, task in enumerate(tasks):
            stage, kind, m = task
            if not (kind in places and stage in places[kind] and 0 <= m < num_microbatches):
                raise fault(schedule, rank, step, _outside(schedule, task))
            holder = schedule.rank_at(task)
            if holder != rank:
                held = f"{'part' if kind in PART_KINDS else 'stage'} {stage} is on rank {holder}"
                raise fault(schedule, rank, step, f"{task} is on rank {rank}, but {held}.")
            for base in rule.writes[kind][stage]:
                if written[base + m]:
                    raise _written_twice(schedule, rank, step)
                written[base + m] = 1
    return written


def _outside(schedule: Schedule, task: Task) -> str:
    """Return the message on a task of no stage, part or microbatch."""
    last = f"microbatches 0..{schedule.num_microbatches - 1}."
    if task.kind in PART_KINDS:
        return f"{task} is outside parts 0..{schedule.vocab_parts - 1} of the vocabulary x {last}"
    return f"{task} is outside stages 0..{schedule.num_stages - 1} x {last}"


def _written_twice(schedule: Schedule, rank: int, step: int) -> ScheduleError:
    """Return the error for a task that writes a value that an earlier rank or step writes."""
    task = schedule.ranks[rank][step]
    before = [*(t for tasks in schedule.ranks[:rank] for t in tasks), *schedule.ranks[rank][:step]]
    for value in writes(task):
        for other in before:
            if value in writes(other):
                what = f"{task} writes {value}, which {other} writes too."
                return fault(schedule, rank, step, what)
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
            raise _missing(schedule, rank, Task(stage, kind, m), Value(name, stage, m))
    for part in range(schedule.vocab_parts):
        for kind in PART_KINDS:
            task = Task(part, kind, 0)
            for base, value in zip(rule.writes[kind][part], writes(task), strict=True):
                for m in range(schedule.num_microbatches):
                    if not written[base + m]:
                        task, value = task._replace(microbatch=m), value._replace(microbatch=m)
                        raise _missing(schedule, part, task, value)


def _missing(schedule: Schedule, rank: int, task: Task, value: Value) -> ScheduleError:
    """Return the error for a program without `task`, which writes `value`."""
    what = f"the program ends without {task}, which writes {value}."
    return fault(schedule, rank, len(schedule.ranks[rank]), what)
