"""A schedule as text: CSV both ways, the grid that errors print, and the lists of tasks in JaxPP's words."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from ppctl.errors import ScheduleError
from ppctl.schedule.grid import grid
from ppctl.schedule.ir import PART_KINDS, Kind, Schedule, Task
from ppctl.schedule.validate import validate

__all__ = ["from_csv", "grid", "task_lists", "task_name", "task_names", "to_csv"]

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
WIDTH = 120
MOST_MISSING = 100_000  # pairs of a stage and a microbatch, among which `validate` looks for the first missing task


def to_csv(ranks: Sequence[Sequence[Task]]) -> str:
    """One line a rank, cells such as 2F0 in program order: what PyTorch's pipelining reads as a compute-only schedule.

    It has no E, S, T and G, the tasks of a divided vocabulary.

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
    ranks: list[tuple[Task, ...]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        tasks: list[Task] = []
        for column, cell in enumerate(line.split(","), start=1):
            if not cell.strip():
                continue
            try:
                tasks.append(Task.parse(cell))
            except ScheduleError as error:
                raise ScheduleError(f"{name}: line {number}, column {column}: {error}") from None
        ranks.append(tuple(tasks))
    rank_of: dict[int, int] = {}
    for rank, program in enumerate(ranks):
        for task in program:
            if task.kind not in PART_KINDS:
                rank_of.setdefault(task.stage, rank)
    if not rank_of:
        raise ScheduleError(f"{name}: the text has no tasks. Write one line a rank, cells such as 2F0.")
    unplaced = next((stage for stage in range(max(rank_of)) if stage not in rank_of), None)
    if unplaced is not None:
        raise ScheduleError(f"{name}: stage {max(rank_of)} has tasks, but no rank has one of stage {unplaced}.")
    num_microbatches = 1 + max(task.microbatch for tasks in ranks for task in tasks)
    num_tasks, num_pairs = sum(map(len, ranks)), num_microbatches * len(rank_of)
    if num_pairs > max(num_tasks, MOST_MISSING):
        raise ScheduleError(
            f"{name}: {num_microbatches} microbatches (the largest is {num_microbatches - 1}) of {len(rank_of)} stages "
            f"are 2*{num_microbatches}*{len(rank_of)} = {2 * num_pairs} tasks or more, but there are {num_tasks}."
        )
    placed = tuple(rank_of[stage] for stage in range(len(rank_of)))
    has_parts = any(task.kind in PART_KINDS for tasks in ranks for task in tasks)
    return validate(Schedule(name, tuple(ranks), placed, num_microbatches, has_parts))


def task_name(task: Task) -> str:
    """A task as JaxPP prints it: WORD_STAGE__MICROBATCH. The halves of a split backward are bwd_i and bwd_w.

    >>> task_name(Task(2, "F", 0)), task_name(Task(0, "W", 3))
    ('fwd_2__0', 'bwd_w_0__3')
    """
    return f"{WORDS[task.kind]}_{task.stage}__{task.microbatch}"


def task_names(tasks: Sequence[Task], num_stages: int) -> list[str]:
    """A rank's tasks in order; on the last stage a forward and its own backward (B or I) right after it are fused.

    >>> task_names([Task(1, "F", 0), Task(1, "B", 0), Task(1, "F", 1)], num_stages=2)
    ['FusedTask(fwd_1__0, bwd_1__0)', 'fwd_1__1']
    """
    names: list[str] = []
    fused: Task | None = None  # the forward that the next task may belong to
    for task in tasks:
        if fused is not None and task.kind in "BI" and task[::2] == fused[::2]:
            names[-1] = f"FusedTask({names[-1]}, {task_name(task)})"
        else:
            names.append(task_name(task))
        fused = task if task.kind == "F" and task.stage == num_stages - 1 else None
    return names


def task_lists(schedule: Schedule) -> str:
    """For each rank a heading with its stages, and the list of its tasks in JaxPP's words."""
    lines: list[str] = []
    for rank, (tasks, stages) in enumerate(zip(schedule.ranks, schedule.stages_of, strict=True)):
        held = f"stage{'s' * (len(stages) > 1)} {' '.join(map(str, stages))}"
        names = task_names(tasks, schedule.num_stages)
        # a fused task is not broken over lines: the wrap knows no other space than these
        atoms = " ".join(name.replace(" ", "\xa0") for name in names)
        wrapped = textwrap.wrap(atoms, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        lines += [f"rank {rank}, {held}: {len(names)} tasks", *(line.replace("\xa0", " ") for line in wrapped)]
    return "\n".join(lines) + "\n"
