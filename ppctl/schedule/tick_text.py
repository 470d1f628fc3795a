"""The ticks of a schedule as people read them: each rank's tasks, and where their output goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ppctl.schedule.ir import PART_KINDS, Task
from ppctl.schedule.lockstep_ticks import phases
from ppctl.schedule.tick_lowering import Ticks, how_divided
from ppctl.schedule.tick_table import HOPS

FB_OUTPUTS = (("f", "act", 1), ("b", "grad", -1))  # column of a task, of what it sends, hop
LEGEND = (
    "2F0>3: task 2F0 (stage, kind, microbatch), its output goes to rank 3; =: stays here; (3F0): "
    "left to its B or I"
)


class TickTask(NamedTuple):
    """A task in a tick of a program's table."""

    task: Task
    is_run: bool  # or left to its backward
    to: int | None  # the rank that receives its output

    def text(self, rank: int) -> str:
        """Return the task in the form of `LEGEND`.

        >>> TickTask(Task(2, "F", 0), True, 3).text(2)
        '2F0>3'
        """
        if not self.is_run:
            return f"({self.task})"
        to = "" if self.to is None else "=" if self.to == rank else f">{self.to}"
        return f"{self.task}{to}"


def tick_tasks(ticks: Ticks) -> list[list[tuple[TickTask, ...]]]:
    """Return the tasks of each tick and rank, as the table has them."""
    ranks = range(ticks.schedule.num_ranks)
    return [[tuple(_of_cell(ticks, t, r)) for r in ranks] for t in range(ticks.num_ticks)]


def _of_cell(ticks: Ticks, t: int, rank: int) -> Iterator[TickTask]:
    row, num_ranks, column = ticks.table[t], ticks.schedule.num_ranks, ticks.columns.index
    forward, backward = ticks.cells[t][rank]
    if ticks.program == "fb":
        for task, (name, what, step) in zip((forward, backward), FB_OUTPUTS, strict=True):
            there = (rank + step) % num_ranks
            if task is not None:
                arrives = row[there][column(f"{what}_arrives")]
                yield TickTask(task, bool(row[rank][column(name)]), there if arrives else None)
        return
    task = forward or backward
    if task is not None:
        ends: dict[int, str] = {}  # of each rank the first hop that leads there
        for hop, step in HOPS.items():
            ends.setdefault((rank + step) % num_ranks, f"{hop}_arrives")
        to = next((there for there, name in ends.items() if row[there][column(name)]), None)
        yield TickTask(task, bool(row[rank][column("kind")]), to)


def tick_text(ticks: Ticks) -> str:
    """Return the table: a line for each tick, a column for each rank."""
    tasks = tick_tasks(ticks)
    cells = [[" ".join(one.text(r) for one in cell) for r, cell in enumerate(row)] for row in tasks]
    header = ["tick", *(f"rank {r}" for r in range(ticks.schedule.num_ranks))]
    divided = how_divided(ticks.schedule)
    if divided is not None:
        header.append("each rank's part of the vocabulary")
        for row, of_ranks in zip(cells, ticks.cells, strict=True):
            first = (task for phase in phases(of_ranks, divided) for task in phase[0])
            parts = (task for task in first if task.kind in PART_KINDS)
            row.append(" ".join(f"{task.kind}{task.microbatch}" for task in parts))
    lines = [header, *([str(t), *row] for t, row in enumerate(cells))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = [list(map(str.ljust, line, widths)) for line in lines]
    text = ["  ".join([line[0].strip().rjust(widths[0]), *line[1:]]) for line in cells]
    return "\n".join(line.rstrip() for line in [*text, "", LEGEND]) + "\n"
