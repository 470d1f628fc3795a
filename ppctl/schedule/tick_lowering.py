"""The lowering pass of executor=spmd: a schedule in lockstep ticks, each value in a slot.

Two programs run ticks (`schedule.tick_table`). Looped schedules with unsplit backwards run in
forward-backward ticks ("fb"), all others in single-op ticks ("op"). `tick_text` prints the ticks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ppctl.errors import ScheduleError
from ppctl.schedule import lockstep_ticks as lockstep, tick_table
from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import PART_KINDS, Schedule, Task
from ppctl.schedule.lower_bounds import rank_work_s
from ppctl.schedule.remat import Remat
from ppctl.schedule.validation import check_places

# columns for a vocabulary divided over ranks, one for each pass (see `Passes`). A value is the
# pass's microbatch + 1, or 0 if the tick has no such pass; all ranks have the same values
PASS_COLUMNS = lockstep.Passes._fields


class TickPacking(NamedTuple):
    """The tasks of a schedule in ticks of one shape."""

    shape: lockstep.TickShape
    cells: lockstep.Cells
    counted: lockstep.Counted  # distinct phases with their numbers of occurrences


@dataclass(frozen=True)
class Ticks:
    """A schedule lowered to lockstep ticks, for one setting of remat."""

    schedule: Schedule
    program: tick_table.TickProgram  # program that runs the ticks; it sets the columns
    shape: lockstep.TickShape
    cells: lockstep.Cells  # tasks of each tick and rank
    counted: lockstep.Counted  # distinct phases with their numbers of occurrences
    table: tick_table.Table  # integers table[t][r][columns.index(name)]; booleans are 0 and 1
    num_slots: dict[str, int]  # slots of act, grad, stash (fb); value, stash, pending (op)
    remat: Remat  # setting that decides the slots, and whether the last stage's F runs

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the table's columns."""
        columns = tick_table.FB_COLUMNS if self.program == "fb" else tick_table.COLUMNS
        return columns + PASS_COLUMNS if self.schedule.vocab_parts else columns

    @property
    def has_backward(self) -> bool:
        """Return whether any task is a B, I or W."""
        return self.schedule.has_backward

    @property
    def num_ticks(self) -> int:
        """Return the number of ticks."""
        return len(self.cells)

    def makespan_s(self, costs: Costs) -> float:
        """Return the seconds of all phases; each takes its slowest rank's time and one transfer."""
        return lockstep.counted_s(self.counted, costs, self.schedule.num_chunks)

    def bubble_fraction(self, costs: Costs) -> float:
        """Return the idle share of all ranks in lockstep, 0..1."""
        busy_s = sum(rank_work_s(self.schedule, costs))
        return 1 - busy_s / (self.makespan_s(costs) * self.schedule.num_ranks)


def forward_only(schedule: Schedule) -> Schedule:
    """Return the schedule of an evaluation: the F, E, S and T of `schedule`."""
    ranks = tuple(tuple(task for task in tasks if task.kind in "FEST") for tasks in schedule.ranks)
    return replace(schedule, name=f"{schedule.name} (forward only)", ranks=ranks)


def ticks(schedule: Schedule, costs: Costs, remat: Remat | str = Remat.FULL) -> Ticks:
    """Lower `schedule` to ticks of the faster shape, with a slot for every value.

    With remat=full the stash of a stage is its input, which stays in the slot where it arrived. The
    last stage then skips its forward, which its backward recomputes. Otherwise a forward writes a
    separate stash, and the last stage's forward writes the gradient of its output too. A schedule
    without backwards keeps no stash.

    With a divided vocabulary every rank computes its part of the head right after the last stage's
    forward, in the same tick. The schedule's order of S and T is ignored, as ranks synchronize in
    every tick. The last stage's forward always runs; the gradient of its output, and the first
    stage's input, have slots.

    Args:
        schedule: the same number of stages on every rank; consecutive stages on equal or adjacent
            ranks.
        costs: seconds of the tasks, which decide the faster shape.
        remat: none, layer or full; ConfigError for another one.

    Raises:
        ScheduleError: if the ring cannot run the schedule.
    """
    check_places(schedule)
    packed = packings(schedule)
    return in_shape(schedule, fastest(packed, costs, schedule.num_chunks), Remat.of(remat))


@lru_cache(8)  # few, because a packing stores all ticks of all ranks
def packings(schedule: Schedule) -> tuple[TickPacking, ...]:
    """Return `schedule` packed in each possible shape. ScheduleError if a ring cannot run it."""
    reason = tick_table.why_not(schedule)
    if reason is not None:
        raise ScheduleError(reason)
    shapes: tuple[lockstep.TickShape, ...] = (
        ("fb", "op") if lockstep.runs_in_fb_ticks(schedule) else ("op",)
    )

    def packed(shape: lockstep.TickShape) -> TickPacking:
        cells = lockstep.pack(schedule, shape)
        return TickPacking(shape, cells, lockstep.counted(schedule, cells))

    return tuple(map(packed, shapes))


def fastest(packed: Sequence[TickPacking], costs: Costs, num_chunks: int) -> TickPacking:
    """Return the packing with the shortest time at these costs."""
    return min(packed, key=lambda each: lockstep.counted_s(each.counted, costs, num_chunks))


@lru_cache(4)  # the config's schedule and the pipeline's are lowered once, whatever their costs
def in_shape(schedule: Schedule, packing: TickPacking, remat: Remat) -> Ticks:
    """Return a packing lowered to ticks: its tasks, with a slot for every value."""
    program: tick_table.TickProgram = "fb" if lockstep.runs_in_fb_ticks(schedule) else "op"
    table, num_slots = tick_table.assign_slots(schedule, packing.cells, remat, program)
    if schedule.vocab_parts:
        passes = (lockstep.passes_of(row, schedule.num_stages) for row in packing.cells)
        columns = (tuple(0 if m is None else 1 + m for m in each) for each in passes)
        rows = zip(table, columns, strict=True)
        table = tuple(tuple(line + more for line in lines) for lines, more in rows)
    return Ticks(schedule, program, *packing, table, num_slots, remat)


LEGEND = (
    "2F0>3: task 2F0 (stage, kind, microbatch), output sent to rank 3; =: output stays on its "
    "rank; (3F0): skipped, recomputed by its B or I"
)


class TickTask(NamedTuple):
    """A task in a tick of a program's table."""

    task: Task
    is_run: bool  # False: skipped, its backward recomputes it
    to: int | None  # rank that receives the output

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
    """Return the tasks of each tick and rank."""
    schedule, last = ticks.schedule, ticks.schedule.num_stages - 1
    is_left = tick_table.leaves_last_forward(schedule, ticks.remat)
    # in op ticks the last stage's F sends the gradient of its output to a slot on the same rank
    keeps_grad = ticks.program == "op" and schedule.has_backward and not is_left
    sent = tick_table.receivers(schedule).items()
    to = {place: schedule.rank_of[stage] for place, (_, stage) in sent}
    if keeps_grad:
        to[last, "F"] = schedule.rank_of[last]

    def shown(task: Task) -> TickTask:
        is_run = not (is_left and task.kind == "F" and task.stage == last)
        return TickTask(task, is_run, to.get(task[:2]))

    return [[tuple(shown(t) for t in cell if t is not None) for cell in row] for row in ticks.cells]


def tick_text(ticks: Ticks) -> str:
    """Return the ticks as text: a line for each tick, a column for each rank."""
    tasks = tick_tasks(ticks)
    cells = [[" ".join(one.text(r) for one in cell) for r, cell in enumerate(row)] for row in tasks]
    header = ["tick", *(f"rank {r}" for r in range(ticks.schedule.num_ranks))]
    if ticks.schedule.part_ranks:
        header.append("each rank's part of the vocabulary")
        of_ticks = lockstep.tick_phases(ticks.schedule, ticks.cells)
        for row, phases in zip(cells, of_ticks, strict=True):
            parts = (task for phase in phases for task in phase[0] if task.kind in PART_KINDS)
            row.append(" ".join(f"{task.kind}{task.microbatch}" for task in parts))
    lines = [header, *([str(t), *row] for t, row in enumerate(cells))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = [list(map(str.ljust, line, widths)) for line in lines]
    text = ["  ".join([line[0].strip().rjust(widths[0]), *line[1:]]) for line in cells]
    return "\n".join(line.rstrip() for line in [*text, "", LEGEND]) + "\n"
