"""The lowering pass of the spmd executor: a schedule as lockstep ticks, every value in a numbered slot.

Two programs run ticks. Looped schedules of whole backwards run in forward-backward ticks ("fb"): in a tick every rank
may run one F, then one B; afterwards activations move one hop to rank r+1 and gradients one hop to rank r-1, round the
ring. All others run in single-op ticks ("op"), one task of any kind each (`schedule.op_ticks`). A value that crosses
ranks in tick t can be read from tick t+1 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

from ppctl.errors import ScheduleError
from ppctl.schedule import op_ticks
from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import Schedule, Value
from ppctl.schedule.lockstep import (
    Counted,
    Divided,
    Passes,
    Slots,
    TickCell,
    TickShape,
    counted,
    counted_s,
    pack,
    passes_of,
)
from ppctl.schedule.remat import Remat
from ppctl.schedule.simulate import duration_s
from ppctl.schedule.vocabulary import without_vocabulary

FB_COLUMNS = (
    # forward: run?, chunk, microbatch, stage is the first / the last, slot read (act), slot written (stash or grad)
    *("f", "f_chunk", "f_microbatch", "f_first", "f_last", "f_act", "f_stash", "f_grad"),
    # backward: the same; slots read
    *("b", "b_chunk", "b_microbatch", "b_first", "b_last", "b_stash", "b_grad"),
    # after the tick: does an activation / a gradient arrive, and in which slot
    *("act_arrives", "act_slot", "grad_arrives", "grad_slot"),
)
# where the vocabulary is divided: 1 + the microbatch of each of `Passes`, the same on all ranks; 0 for none
PASS_COLUMNS = Passes._fields


class TickPacking(NamedTuple):
    """The tasks of a schedule in ticks of one shape."""

    shape: TickShape
    cells: tuple[tuple[TickCell, ...], ...]  # [tick][rank]
    counted: Counted  # the rows of cells that differ


@dataclass(frozen=True)
class Ticks:
    """A schedule lowered for one setting of remat; only a program with that setting runs them.

    `table[t][r][columns.index(name)]` is a small integer; booleans are 0 and 1.
    """

    schedule: Schedule
    program: Literal["fb", "op"]  # which columns the table has, and so which program runs it
    packing: TickPacking
    table: op_ticks.Table  # [tick][rank][column]
    num_slots: dict[str, int]  # by kind. fb: act, grad, stash; op: value (act or grad), stash, pending
    remat: Remat  # what they were lowered for: it decides which values have slots, and what the last stage's F does

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the table's columns."""
        own = FB_COLUMNS if self.program == "fb" else op_ticks.COLUMNS
        return own + PASS_COLUMNS if self.schedule.divides_vocabulary else own

    @property
    def has_backward(self) -> bool:
        """Return whether any task is more than a forward."""
        return has_backward(self.schedule)

    @property
    def num_ticks(self) -> int:
        """The length of the table."""
        return len(self.cells)

    @property
    def shape(self) -> TickShape:
        """Return whether a rank may run two tasks in a tick, an F and then a B (fb), or one (op)."""
        return self.packing.shape

    @property
    def cells(self) -> tuple[tuple[TickCell, ...], ...]:
        """[tick][rank]"""
        return self.packing.cells

    def segments(self, *, apart: bool) -> tuple[tuple[range, bool, bool], ...]:
        """Scans of forward-backward ticks: (ticks, whether any rank runs a forward in them, whether any a backward).

        All ticks in one, or `apart`: warm-up and cool-down each in one of its own.
        """
        columns = [FB_COLUMNS.index(kind) for kind in "fb"]
        runs = [tuple(any(line[column] for line in row) for column in columns) for row in self.table]
        cuts = {0, len(runs)}
        if apart:
            forwards, backwards = ([t for t, run in enumerate(runs) if run[kind]] for kind in (0, 1))
            cuts |= {*backwards[:1], *(t + 1 for t in forwards[-1:])}
        found: list[tuple[range, bool, bool]] = []
        for low, high in pairwise(sorted(cuts)):
            forward, backward = map(any, zip(*runs[low:high], strict=True))
            found.append((range(low, high), forward, backward))
        return tuple(found)

    def makespan_s(self, costs: Costs) -> float:
        """Seconds of all ticks when each lasts as long as its slowest rank, plus one transfer a tick."""
        return counted_s(self.packing.counted, costs, self.schedule.num_chunks)

    def bubble_fraction(self, costs: Costs) -> float:
        """Idle share of all ranks in lockstep, 0..1."""
        schedule = self.schedule
        busy = sum(duration_s(task, costs, schedule.num_chunks) for tasks in schedule.ranks for task in tasks)
        return 1 - busy / (self.makespan_s(costs) * schedule.num_ranks)


def has_backward(schedule: Schedule) -> bool:
    """Return whether any task is more than a forward."""
    return any(task.kind in "BIW" for tasks in schedule.ranks for task in tasks)


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of `schedule` alone, in its order: the schedule of an evaluation. With E, S and T of each part."""
    ranks = tuple(tuple(task for task in tasks if task.kind in "FEST") for tasks in schedule.ranks)
    return replace(schedule, name=f"{schedule.name} (forward only)", ranks=ranks)


def runs_on_ring(schedule: Schedule) -> bool:
    """Return whether `ticks` can lower `schedule`, that is whether the spmd executor can run it."""
    return op_ticks.why_not(schedule) is None


def runs_in_fb_ticks(schedule: Schedule) -> bool:
    """Return whether placement is looped and every backward whole, so that a tick may run an F, then a B."""
    hops = zip(schedule.rank_of, schedule.rank_of[1:], strict=False)
    is_loop = all(there == (here + 1) % schedule.num_ranks for here, there in hops)
    return is_loop and not any(task.kind in "IW" for tasks in schedule.ranks for task in tasks)


def ticks(schedule: Schedule, costs: Costs, remat: Remat | str = Remat.FULL) -> Ticks:
    """Return `schedule` in the tick shape that is faster for `costs`, with slots for every value.

    With remat=full the stash of a stage is its input, which stays in the slot where it arrived, and the last stage's
    forward is left to its backward, which recomputes it. Otherwise a forward writes a stash of its own, and the last
    stage's also the gradient of its output. A schedule of forwards alone keeps nothing.

    Where the vocabulary is divided, every rank computes its part of the head right after the last stage's forward, in
    the same tick, whatever the schedule's order of S and T: ranks in lockstep meet in every tick, and none waits. So
    the last stage's forward is run in any case, and the gradient of its output has a slot, as the first one's input.
    ScheduleError for a schedule that a ring cannot carry, ConfigError for another remat than none, layer or full.
    """
    packed = packings(schedule)
    shape = fastest({shape: packing.counted for shape, packing in packed.items()}, costs, schedule.num_chunks)
    return in_shape(schedule, packed[shape], Remat.of(remat))


def packings(schedule: Schedule) -> dict[TickShape, TickPacking]:
    """Return `schedule` in each tick shape that its program has. ScheduleError where a ring cannot carry it."""
    reason = op_ticks.why_not(schedule)
    if reason is not None:
        raise ScheduleError(reason)
    shapes: tuple[TickShape, ...] = ("fb", "op") if runs_in_fb_ticks(schedule) else ("op",)
    cells = {shape: pack(without_vocabulary(schedule), shape) for shape in shapes}
    divided = how_divided(schedule)
    return {shape: TickPacking(shape, cells[shape], counted(cells[shape], divided)) for shape in shapes}


def how_divided(schedule: Schedule) -> Divided | None:
    """Return how the ticks of a schedule have the parts of its vocabulary; None where it is whole."""
    if not schedule.divides_vocabulary:
        return None
    kinds = frozenset(kind for rank in schedule.counts for kind, _, _ in rank)
    return Divided(schedule.num_stages, runs_in_fb_ticks(schedule), kinds)


def fastest(rows: Mapping[TickShape, Counted], costs: Costs, num_chunks: int) -> TickShape:
    """Return the tick shape whose rows take least time at these costs."""
    return min(rows, key=lambda shape: counted_s(rows[shape], costs, num_chunks)) if len(rows) > 1 else next(iter(rows))


def in_shape(schedule: Schedule, packing: TickPacking, remat: Remat) -> Ticks:
    """Return `schedule` as it was packed, with slots for every value."""
    is_fb = runs_in_fb_ticks(schedule)
    table, num_slots = (_assign_slots if is_fb else op_ticks.assign_slots)(schedule, packing.cells, remat)
    if schedule.divides_vocabulary:
        table = tuple(_with_passes(rows, cells, schedule) for rows, cells in zip(table, packing.cells, strict=True))
    return Ticks(schedule, "fb" if is_fb else "op", packing, table, num_slots, remat)


def _with_passes(
    lines: tuple[tuple[int, ...], ...], row: tuple[TickCell, ...], schedule: Schedule
) -> tuple[tuple[int, ...], ...]:
    """Return a tick's lines with the columns of its passes."""
    columns = tuple(0 if m is None else 1 + m for m in passes_of(row, schedule.num_stages))
    return tuple(line + columns for line in lines)


def _assign_slots(
    schedule: Schedule, cells: tuple[tuple[TickCell, ...], ...], remat: Remat
) -> tuple[op_ticks.Table, dict[str, int]]:
    """Return (table, number of slots of each kind: act, grad, stash) of forward-backward ticks."""
    num_ranks, last, is_divided = schedule.num_ranks, schedule.num_stages - 1, schedule.divides_vocabulary
    keep_input = has_backward(schedule) and remat.keeps_input_only  # of forwards alone nothing is kept for later
    keep_stash = has_backward(schedule) and not remat.keeps_input_only
    head_in_forward = keep_stash or (has_backward(schedule) and is_divided)
    first = -1 if is_divided else 0  # the last stage whose input no value brings
    acts, grads, stashes = ([Slots() for _ in range(num_ranks)] for _ in range(3))
    table: list[tuple[tuple[int, ...], ...]] = []
    for row in cells:
        lines: list[dict[str, int]] = [{} for _ in range(num_ranks)]
        # within a tick: all forwards, then all backwards, then the transfers
        for rank, (task, _) in enumerate(row):
            if task is None:
                continue
            stage, _, m = task
            line = {
                "f": int(not keep_input or stage < last or is_divided),
                "f_chunk": schedule.chunk_of[stage],
                "f_microbatch": m,
            }
            line |= {"f_first": int(stage == 0), "f_last": int(stage == last)}
            if stage > first:
                value = Value("act", stage - 1, m)
                if stage == 0:  # it was embedded right before
                    acts[rank].put(value)
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
            elif stage > first:
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
        table.append(tuple(tuple(line.get(name, 0) for name in FB_COLUMNS) for line in lines))
    kinds = {"act": acts, "grad": grads, "stash": stashes}
    counts = {name: max(slots.count for slots in of_rank) for name, of_rank in kinds.items()}
    return tuple(table), counts
