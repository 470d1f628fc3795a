"""Schedules to and from CSV, and the names of task kinds in names of compiled programs."""

from collections.abc import Sequence

from ppctl.errors import ScheduleError
from ppctl.schedule.ir import PART_KINDS, Kind, Schedule, Task
from ppctl.schedule.validation import validate
from ppctl.user_files import lines_of_text

WORDS: dict[Kind, str] = {
    "F": "fwd",
    "B": "bwd",
    "I": "bwd_i",
    "W": "bwd_w",
    "E": "embed",
    "S": "logits",
    "T": "logits_bwd",
    "G": "embed_bwd",
}


def to_csv(ranks: Sequence[Sequence[Task]]) -> str:
    """Return the CSV of a schedule: one line a rank, cells such as 2F0 in program order.

    PyTorch's pipelining reads it as a compute-only schedule if it has no E, S, T or G.

    >>> to_csv([[Task(0, "F", 0), Task(0, "B", 0)]])
    '0F0,0B0\\n'
    """
    return "".join(",".join(map(str, tasks)) + "\n" for tasks in ranks)


def from_csv(text: str, name: str) -> Schedule:
    """Parse the CSV of `to_csv` and validate its schedule. Empty cells (idle steps) are dropped.

    A stage is placed on the first rank that has one of its tasks. The number of microbatches is the
    largest index plus 1. ScheduleError for a malformed cell, with line and column, or an invalid
    schedule.

    >>> from_csv("0F0,,0B0\\n1F0,1B0\\n", "mine").rank_of
    (0, 1)
    """
    # 1. the tasks of each rank
    ranks: list[tuple[Task, ...]] = []
    for number, line in enumerate(lines_of_text(text), start=1):
        tasks: list[Task] = []
        for column, cell in enumerate(line.split(","), start=1):
            if not cell.strip():
                continue
            try:
                tasks.append(Task.parse(cell))
            except ScheduleError as error:
                raise ScheduleError(f"{name}: line {number}, column {column}: {error}") from None
        ranks.append(tuple(tasks))
    # 2. the rank of each stage
    rank_of: dict[int, int] = {}
    for rank, program in enumerate(ranks):
        for task in program:
            if task.kind not in PART_KINDS:
                rank_of.setdefault(task.stage, rank)
    if not rank_of:
        use = "Write one line a rank, cells such as 2F0."
        raise ScheduleError(f"{name}: the text has no tasks. {use}")
    last = max(rank_of)
    unplaced = next((stage for stage in range(last) if stage not in rank_of), None)
    if unplaced is not None:
        what = f"stage {last} has tasks, but no rank has one of stage {unplaced}"
        raise ScheduleError(f"{name}: {what}.")
    # 3. the number of microbatches
    num_microbatches = 1 + max(task.microbatch for tasks in ranks for task in tasks)
    placed = tuple(rank_of[stage] for stage in range(len(rank_of)))
    is_divided = any(task.kind in PART_KINDS for tasks in ranks for task in tasks)
    part_ranks = tuple(range(len(ranks))) if is_divided else ()
    return validate(Schedule(name, tuple(ranks), placed, num_microbatches, part_ranks))
