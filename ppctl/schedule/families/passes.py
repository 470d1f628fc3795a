"""Passes from schedule to schedule."""

from __future__ import annotations

from dataclasses import replace

from ppctl.schedule.ir import Schedule, Task


def merge_backward(schedule: Schedule) -> Schedule:
    """`schedule` with whole backwards: each I becomes a B, each W is dropped.

    >>> tasks = (Task(0, "F", 0), Task(0, "I", 0), Task(0, "W", 0))
    >>> [str(task) for task in merge_backward(Schedule("mine", (tasks,), (0,), 1)).ranks[0]]
    ['0F0', '0B0']
    """
    ranks = tuple(
        tuple(Task(s, "B" if kind == "I" else kind, m) for s, kind, m in tasks if kind != "W")
        for tasks in schedule.ranks
    )  # fmt: skip
    return replace(schedule, ranks=ranks)


def split_backward(schedule: Schedule) -> Schedule:
    """`schedule` with split backwards: each B becomes an I and, at once, its W.

    >>> [str(task) for task in split_backward(Schedule("mine", ((Task(0, "B", 0),),), (0,), 1)).ranks[0]]
    ['0I0', '0W0']
    """
    ranks = tuple(
        tuple(Task(s, k, m) for s, kind, m in tasks for k in (("I", "W") if kind == "B" else (kind,)))
        for tasks in schedule.ranks
    )  # fmt: skip
    return replace(schedule, ranks=ranks)  # type: ignore[arg-type]
