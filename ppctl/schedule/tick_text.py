"""The program that ticks lower to, as people read it: what each rank runs in a tick, and where its output goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ppctl.schedule.ir import PART_KINDS, Task
from ppctl.schedule.lockstep import phases
from ppctl.schedule.op_ticks import HOPS
from ppctl.schedule.ticks import Ticks, how_divided

FB_OUTPUTS = (("f", "act", 1), ("b", "grad", -1))  # column of a task, of what it sends, hop
LEGEND = (
    "2F0>3: task 2F0 (stage, kind, microbatch), its output goes to rank 3; =: stays here; (3F0): left to its B or I"
)


class TickTask(NamedTuple):
    """A task in a tick of the table that the program reads."""

    task: Task
    is_run: bool  # otherwise its backward does its work
    to: int | None  # the rank that its output goes to, its own included

    def text(self, rank: int) -> str:
        """As `LEGEND` says.

        >>> TickTask(Task(2, "F", 0), True, 3).text(2)
        '2F0>3'
        """
        if not self.is_run:
            return f"({self.task})"
        return f"{self.task}" + ("" if self.to is None else "=" if self.to == rank else f">{self.to}")


def tick_tasks(ticks: Ticks) -> list[list[tuple[TickTask, ...]]]:
    """[tick][rank]: the tasks in it, as its table has them."""
    return [[tuple(_of_cell(ticks, t, r)) for r in range(ticks.schedule.num_ranks)] for t in range(ticks.num_ticks)]


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
        ends: dict[int, str] = {}
        for hop, step in HOPS.items():  # of two ranks either is next to the other: the first hop that leads there
            ends.setdefault((rank + step) % num_ranks, f"{hop}_arrives")
        to = next((there for there, name in ends.items() if row[there][column(name)]), None)
        yield TickTask(task, bool(row[rank][column("kind")]), to)


def tick_text(ticks: Ticks) -> str:
    """The table: a line for each tick, a column for each rank."""
    cells = [[" ".join(one.text(r) for one in cell) for r, cell in enumerate(row)] for row in tick_tasks(ticks)]
    header = ["tick", *(f"rank {r}" for r in range(ticks.schedule.num_ranks))]
    divided = how_divided(ticks.schedule)
    if divided is not None:
        header.append("each rank's part of the vocabulary")
        for row, of_ranks in zip(cells, ticks.cells, strict=True):
            first = [task for phase in phases(of_ranks, divided) for task in phase[0] if task.kind in PART_KINDS]
            row.append(" ".join(f"{task.kind}{task.microbatch}" for task in first))
    lines = [header, *([str(t), *row] for t, row in enumerate(cells))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(
            [line[0].rjust(widths[0]), *(cell.ljust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    ]
    return "\n".join(line.rstrip() for line in [*text, "", LEGEND]) + "\n"
