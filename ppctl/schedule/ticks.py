"""The lowering pass of the spmd executor: a schedule as lockstep ticks, every value in a numbered slot.

In a tick every rank may run one F, then one B; afterwards activations move one hop to rank r+1 and gradients one hop to
rank r-1, round the ring. A value that crosses ranks in tick t can be read from tick t+1 on.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ppctl.costs import Costs
from ppctl.errors import ScheduleError
from ppctl.schedule.ir import Schedule, Task, Value, reads, writes
from ppctl.schedule.simulate import duration_s
from ppctl.schedule.validate import walk

Shape = Literal["one", "pair"]  # one task a tick | an F, then a B


class Cell(NamedTuple):
    """What one rank does in one tick."""

    forward: Task | None
    backward: Task | None


COLUMNS = (
    # forward: run?, chunk, microbatch, stage is the first / the last, slot read (act), slot written (stash or grad)
    *("f", "f_chunk", "f_microbatch", "f_first", "f_last", "f_act", "f_stash", "f_grad"),
    # backward: the same; slots read
    *("b", "b_chunk", "b_microbatch", "b_first", "b_last", "b_stash", "b_grad"),
    # after the tick: does an activation / a gradient arrive, and in which slot
    *("act_arrives", "act_slot", "grad_arrives", "grad_slot"),
)


@dataclass(frozen=True)
class Ticks:
    """A lowered schedule. `table[t][r][COLUMNS.index(name)]` is a small integer; booleans are 0 and 1."""

    schedule: Schedule
    shape: Shape
    cells: tuple[tuple[Cell, ...], ...]  # [tick][rank]
    table: tuple[tuple[tuple[int, ...], ...], ...]  # [tick][rank][column]
    num_act_slots: int
    num_grad_slots: int
    num_stash_slots: int

    @property
    def has_backward(self) -> bool:
        return has_backward(self.schedule)

    @property
    def num_ticks(self) -> int:
        return len(self.cells)

    def makespan_s(self, costs: Costs) -> float:
        """Seconds of all ticks when each lasts as long as its slowest rank, plus one transfer a tick."""
        return lockstep_s(self.cells, costs, self.schedule.num_chunks)

    def bubble_fraction(self, costs: Costs) -> float:
        """Idle share of all ranks in lockstep, 0..1."""
        schedule = self.schedule
        busy = sum(duration_s(task, costs, schedule.num_chunks) for tasks in schedule.ranks for task in tasks)
        return 1 - busy / (self.makespan_s(costs) * schedule.num_ranks)


def has_backward(schedule: Schedule) -> bool:
    """Whether any task is more than a forward."""
    return any(task.kind != "F" for tasks in schedule.ranks for task in tasks)


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of `schedule` alone, in its order: the schedule of an evaluation."""
    ranks = tuple(tuple(task for task in tasks if task.kind == "F") for tasks in schedule.ranks)
    return replace(schedule, name=f"{schedule.name} (forward only)", ranks=ranks)


def lockstep_s(cells: tuple[tuple[Cell, ...], ...], costs: Costs, num_chunks: int) -> float:
    """Seconds of ticks in lockstep: each lasts as long as its slowest rank, plus one transfer."""

    def cell_s(cell: Cell) -> float:
        return sum(duration_s(task, costs, num_chunks) for task in cell if task is not None)

    return sum(max(map(cell_s, row)) + costs.hop_s for row in cells)


def runs_on_ring(schedule: Schedule) -> bool:
    """Whether `ticks` can lower `schedule`, that is whether the spmd executor can run it: looped, whole backwards."""
    return _why_not_on_ring(schedule) is None


def _why_not_on_ring(schedule: Schedule) -> str | None:
    num_ranks = schedule.num_ranks
    for stage, (here, there) in enumerate(zip(schedule.rank_of, schedule.rank_of[1:], strict=False)):
        if there != (here + 1) % num_ranks:
            return (
                f"{schedule.name}: stages {stage} and {stage + 1} are on ranks {here} and {there}, but the spmd ring "
                f"goes from rank {here} to {(here + 1) % num_ranks}. "
                "Use executor=mpmd, or a schedule with looped placement."
            )
    split = next((task for tasks in schedule.ranks for task in tasks if task.kind in "IW"), None)
    if split is not None:
        return (
            f"{schedule.name}: {split} splits the backward, and the spmd executor runs whole ones (B). "
            "Use executor=mpmd, or a schedule of F and B alone, such as interleaved."
        )
    return None


def ticks(schedule: Schedule, costs: Costs, *, keep_input: bool = True, head_in_forward: bool = False) -> Ticks:
    """`schedule` in the tick shape that is faster for `costs`, with slots for every value.

    keep_input: the stash of a stage is its input and stays in the slot where it arrived, and the last stage's forward
    is left to its backward, which recomputes it; otherwise the forward writes a stash of its own.
    head_in_forward: the last stage's forward also writes the gradient of its output.
    A schedule of forwards alone keeps nothing.
    ScheduleError for a schedule that a ring cannot carry, or that splits its backward.
    """
    reason = _why_not_on_ring(schedule)
    if reason is not None:
        raise ScheduleError(reason)
    shapes: tuple[Shape, ...] = ("pair", "one")
    packed = {shape: pack(schedule, shape) for shape in shapes}
    shape = min(shapes, key=lambda name: lockstep_s(packed[name], costs, schedule.num_chunks))
    return _assign_slots(schedule, shape, packed[shape], keep_input, head_in_forward)


def pack(schedule: Schedule, shape: Shape) -> tuple[tuple[Cell, ...], ...]:
    """The tasks of every rank in ticks, in program order and as early as the ring allows; [tick][rank].

    ScheduleError when the ranks wait for each other.
    """
    num_stages = schedule.num_stages
    written: dict[Value, int] = {}  # value -> tick
    at = [0] * schedule.num_ranks
    cells: list[tuple[Cell, ...]] = []

    def take(rank: int, kind: str, tick: int) -> Task | None:
        """The rank's next task, if it is of this kind and all it reads is there; a stash is there at once."""
        tasks = schedule.ranks[rank]
        if at[rank] == len(tasks) or tasks[at[rank]].kind != kind:
            return None
        task = tasks[at[rank]]
        for value in reads(task, num_stages):
            if written.get(value, tick) >= tick and not (value.name == "stash" and value in written):
                return None
        at[rank] += 1
        written.update(dict.fromkeys(writes(task, num_stages), tick))
        return task

    while any(i < len(tasks) for i, tasks in zip(at, schedule.ranks, strict=True)):
        row = []
        for rank in range(schedule.num_ranks):
            forward = take(rank, "F", len(cells))
            backward = take(rank, "B", len(cells)) if forward is None or shape == "pair" else None
            row.append(Cell(forward, backward))
        if not any(map(any, row)):  # what is missing now would be missing for ever: the walk says what it is
            for _ in walk(schedule):
                pass
        cells.append(tuple(row))
    return tuple(cells)


class _Slots:
    """Slots of one kind on one rank: the lowest free number is taken, so the count is the peak of live values."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.count = 0
        self.of: dict[Value, int] = {}

    def put(self, value: Value) -> int:
        if self.free:
            slot = heapq.heappop(self.free)
        else:
            slot, self.count = self.count, self.count + 1
        self.of[value] = slot
        return slot

    def drop(self, value: Value) -> int:
        slot = self.of.pop(value)
        heapq.heappush(self.free, slot)
        return slot


def _assign_slots(
    schedule: Schedule, shape: Shape, cells: tuple[tuple[Cell, ...], ...], keep_input: bool, head_in_forward: bool
) -> Ticks:
    num_ranks, last = schedule.num_ranks, schedule.num_stages - 1
    if not has_backward(schedule):  # nothing is kept for later
        keep_input = keep_stash = head_in_forward = False
    else:
        keep_stash = not keep_input
    acts, grads, stashes = ([_Slots() for _ in range(num_ranks)] for _ in range(3))
    table = []
    for row in cells:
        lines: list[dict[str, int]] = [{} for _ in range(num_ranks)]
        # within a tick: all forwards, then all backwards, then the transfers
        for rank, (task, _) in enumerate(row):
            if task is None:
                continue
            stage, _, m = task
            line = {"f": int(not keep_input or stage < last), "f_chunk": schedule.chunk_of[stage], "f_microbatch": m}
            line |= {"f_first": int(stage == 0), "f_last": int(stage == last)}
            if stage > 0:
                value = Value("act", stage - 1, m)
                line["f_act"] = acts[rank].of[value] if keep_input else acts[rank].drop(value)
            if keep_stash:
                line["f_stash"] = stashes[rank].put(Value("stash", stage, m))
            if head_in_forward and stage == last:
                line["f_grad"] = grads[rank].put(Value("grad", stage + 1, m))
            lines[rank] |= line
        for rank, (_, task) in enumerate(row):
            if task is None:
                continue
            stage, _, m = task
            line = {"b": 1, "b_chunk": schedule.chunk_of[stage], "b_microbatch": m}
            line |= {"b_first": int(stage == 0), "b_last": int(stage == last)}
            if keep_stash:
                line["b_stash"] = stashes[rank].drop(Value("stash", stage, m))
            elif stage > 0:
                line["b_stash"] = acts[rank].drop(Value("act", stage - 1, m))
            if stage < last or head_in_forward:
                line["b_grad"] = grads[rank].drop(Value("grad", stage + 1, m))
            lines[rank] |= line
        for forward, backward in row:
            if forward is not None and forward.stage < last:
                rank = schedule.rank_of[forward.stage + 1]
                slot = acts[rank].put(Value("act", forward.stage, forward.microbatch))
                lines[rank] |= {"act_arrives": 1, "act_slot": slot}
            if backward is not None and backward.stage > 0:
                rank = schedule.rank_of[backward.stage - 1]
                slot = grads[rank].put(Value("grad", backward.stage, backward.microbatch))
                lines[rank] |= {"grad_arrives": 1, "grad_slot": slot}
        table.append(tuple(tuple(line.get(name, 0) for name in COLUMNS) for line in lines))
    counts = (max(slots.count for slots in kind) for kind in (acts, grads, stashes))
    return Ticks(schedule, shape, cells, tuple(table), *counts)
