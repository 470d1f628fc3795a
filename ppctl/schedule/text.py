"""A schedule as text: CSV both ways, and the grid that errors print. One row a rank, one column a step."""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.errors import ScheduleError
from ppctl.schedule.grid import grid
from ppctl.schedule.ir import Schedule, Task
from ppctl.schedule.validate import validate

__all__ = ["from_csv", "grid", "to_csv"]


def to_csv(ranks: Sequence[Sequence[Task]]) -> str:
    """One line a rank, cells such as 2F0 in program order: what PyTorch's pipelining reads as a compute-only schedule.

    >>> to_csv([[Task(0, "F", 0), Task(0, "B", 0)]])
    '0F0,0B0\\n'
    """
    return "".join(",".join(map(str, tasks)) + "\n" for tasks in ranks)


def from_csv(text: str, name: str) -> Schedule:
    """The validated schedule of such a text; an empty cell is an idle step and is dropped.

    A stage is placed on the first rank that names it; the number of microbatches is the largest named, plus one.
    ScheduleError for a cell that names no task (with line and column), and for whatever `validate` refuses.

    >>> from_csv("0F0,,0B0\\n1F0,1B0\\n", "mine").rank_of
    (0, 1)
    """
    ranks = []
    for number, line in enumerate(text.splitlines(), start=1):
        tasks = []
        for column, cell in enumerate(line.split(","), start=1):
            if not cell.strip():
                continue
            try:
                tasks.append(Task.parse(cell))
            except ScheduleError as error:
                raise ScheduleError(f"{name}: line {number}, column {column}: {error}") from None
        ranks.append(tuple(tasks))
    rank_of: dict[int, int] = {}
    for rank, tasks in enumerate(ranks):
        for task in tasks:
            rank_of.setdefault(task.stage, rank)
    if not rank_of:
        raise ScheduleError(f"{name}: the text has no tasks. Write one line a rank, cells such as 2F0.")
    unplaced = next((stage for stage in range(max(rank_of)) if stage not in rank_of), None)
    if unplaced is not None:
        raise ScheduleError(f"{name}: stage {max(rank_of)} has tasks, but no rank has one of stage {unplaced}.")
    num_microbatches = 1 + max(task.microbatch for tasks in ranks for task in tasks)
    placed = tuple(rank_of[stage] for stage in range(len(rank_of)))
    return validate(Schedule(name, tuple(ranks), placed, num_microbatches))
