"""Passes from schedule to schedule."""

from __future__ import annotations

from dataclasses import replace

from ppctl.schedule.ir import Schedule, Task


def split_backward(schedule: Schedule) -> Schedule:
    """Return `schedule` with split backwards: each B becomes an I and, at once, its W.

    >>> whole = Schedule("mine", ((Task(0, "B", 0),),), (0,), 1)
    >>> [str(task) for task in split_backward(whole).ranks[0]]
    ['0I0', '0W0']
    """

    def split(task: Task) -> tuple[Task, ...]:
        is_whole = task.kind == "B"
        return (task._replace(kind="I"), task._replace(kind="W")) if is_whole else (task,)

    ranks = tuple(tuple(half for t in tasks for half in split(t)) for tasks in schedule.ranks)
    return replace(schedule, ranks=ranks)
