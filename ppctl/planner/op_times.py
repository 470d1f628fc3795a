"""The time of a step: seconds of the pieces of a model, put together as stages, tasks and ticks.

The seconds come from counting (`planner.analytic`) or from timing (`planner.measure`). Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import NamedTuple

from ppctl.schedule.costs import OF_PARTS, Costs
from ppctl.schedule.ir import Kind, Schedule
from ppctl.schedule.lockstep import Rows, TickCell, rows_s
from ppctl.schedule.shared_cores import free_running_s, together_s
from ppctl.schedule.simulate import duration_s
from ppctl.schedule.ticks import Ticks


@dataclass(frozen=True)
class PieceTimes:
    """Seconds of one microbatch through a piece of the model (embedding, a layer, head) on a device working alone.

    What a backward recomputes is part of the input gradient.
    """

    forward_s: float
    input_grad_s: float
    weight_grad_s: float

    @property
    def all_s(self) -> float:
        return self.forward_s + self.input_grad_s + self.weight_grad_s


class LayerGathers(NamedTuple):
    """Gathers over fsdp of layers that a task reads (executor.gather=layer)."""

    layer_s: float  # of one layer
    is_ahead: bool  # of the next layer while one is computed; otherwise nothing is computed meanwhile
    once_more: bool = False  # layers are scanned: the last one's turn gathers it once more

    def through_s(self, layers: float, layer_s: float) -> float:
        """Return the seconds in which a task passes through so many layers, of layer_s each without their gathers.

        >>> LayerGathers(2.0, is_ahead=True).through_s(3, 5.0), LayerGathers(2.0, is_ahead=False).through_s(3, 5.0)
        (17.0, 21.0)
        """
        if not layers:
            return 0.0
        if not self.is_ahead:
            return layers * layer_s + (layers + self.once_more) * self.layer_s
        last_s = max(layer_s, self.layer_s) if self.once_more else layer_s
        return self.layer_s + (layers - 1) * max(layer_s, self.layer_s) + last_s


@dataclass(frozen=True)
class OpTimes:
    """Seconds of everything that a step is made of, for microbatches of one size and one setting of remat."""

    embed: PieceTimes
    layer: PieceTimes
    head: PieceTimes
    task_s: float  # of a task, besides its layers
    hop_s: float  # from the end of a task until its value can be read on the next rank
    overhead_s: float  # per step: gathering parameters, reducing gradients, the optimizer
    capacity: float = inf  # how many devices can work at full speed at the same time; simulated ones share cores
    cores: float = 1.0  # that a device working alone keeps busy
    overhead_cpu_s: float = 0.0  # the same in CPU seconds, where it was measured
    gathers: LayerGathers | None = None  # of layers in each task; None: they are whole before it

    def forward_s(self, layers: float) -> float:
        """Return the seconds of a forward through so many layers."""
        return self._through_s(layers, self.layer.forward_s)

    def input_grad_s(self, layers: float, *, keeps_input: bool, split: bool) -> float:
        """Return the seconds of a backward through so many layers, without weight gradients.

        keeps_input: it runs the forward first, and its last layer need not be gathered again. split: weight gradients
        are a task of their own, which needs no parameters; otherwise they take their time beside the gathers too.
        """
        if self.gathers is None or not layers:
            return layers * self.layer.input_grad_s
        weight_grad_s = 0.0 if split else self.layer.weight_grad_s
        seconds = self.layer.input_grad_s + weight_grad_s
        if not keeps_input:
            return self._through_s(layers, seconds) - layers * weight_grad_s
        again_s = self.layer.forward_s
        both_s = self._through_s(layers, again_s) + self._through_s(layers, seconds - again_s)
        return both_s - self.gathers.layer_s - layers * weight_grad_s

    def _through_s(self, layers: float, layer_s: float) -> float:
        return layers * layer_s if self.gathers is None else self.gathers.through_s(layers, layer_s)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: tasks with their bubble, and per-step overhead."""

    pipeline_s: float
    overhead_s: float
    work_s: float  # of all devices, in seconds of one that works alone; with what is masked, and transfers of ticks
    tasks_s: float  # of the tasks alone
    width: float  # how many devices can work at full speed at the same time

    @property
    def total_s(self) -> float:
        return self.pipeline_s + self.overhead_s

    @property
    def bubble_fraction(self) -> float:
        """The share of what the devices could do together while tasks run that no task uses, 0..1."""
        return max(0.0, 1 - self.tasks_s / (self.pipeline_s * self.width))


def costs_of_stages(
    op_times: OpTimes, sizes: Sequence[float], *, keeps_input: bool, split: bool = False, num_parts: int = 0
) -> Costs:
    """Return the costs of each stage's tasks; `sizes`: its layers, or their relative cost where they differ.

    The last stage's head runs in its forward, forwards and backwards; with keeps_input (remat=full) its forward is left
    to its backward, and the first stage embeds again. split: W is a task of its own, not a part of B. num_parts: so
    many ranks have a part of the vocabulary each (`seconds_of_part`).

    >>> one, free = PieceTimes(1.0, 1.0, 1.0), PieceTimes(0.0, 0.0, 0.0)
    >>> op_times = OpTimes(free, one, PieceTimes(2.0, 2.0, 2.0), task_s=0.0, hop_s=0.0, overhead_s=0.0)
    >>> costs_of_stages(op_times, (2, 1), keeps_input=False).forward_s
    (2.0, 7.0)
    """
    last, free = len(sizes) - 1, PieceTimes(0.0, 0.0, 0.0)
    embed, head = (free, free) if num_parts else (op_times.embed, op_times.head)
    forward, input_grad, weight_grad = list[float](), list[float](), list[float]()
    for s, n in enumerate(sizes):
        f = op_times.forward_s(n) + op_times.task_s + (embed.forward_s if s == 0 else 0.0)
        i = op_times.input_grad_s(n, keeps_input=keeps_input, split=split) + op_times.task_s
        if s == 0:
            i += embed.input_grad_s + embed.weight_grad_s
            i += embed.forward_s if keeps_input else 0.0
        if s == last and keeps_input and not num_parts:
            f, i = 0.0, i + head.all_s
        elif s == last:
            f += head.all_s
        forward.append(f)
        input_grad.append(i)
        weight_grad.append(n * op_times.layer.weight_grad_s + (op_times.task_s if split else 0.0))
    costs = Costs(tuple(forward), tuple(input_grad), tuple(weight_grad), transfer_s=op_times.hop_s)
    if not num_parts:
        return costs
    return replace(costs, **{OF_PARTS[kind]: each_s for kind, each_s in seconds_of_part(op_times, num_parts).items()})


def seconds_of_part(op_times: OpTimes, num_parts: int) -> dict[Kind, float]:
    """Return the seconds of each kind of task of a part of the vocabulary, of which op_times have one.

    Of the head's three products S makes one, T two; and each task sums an activation over the ranks, round the ring.
    """
    embed, head, summed_s = op_times.embed, op_times.head, 2 * (num_parts - 1) / num_parts * op_times.hop_s
    return {
        "E": embed.forward_s + summed_s,
        "S": head.all_s / 3 + summed_s,
        "T": head.all_s * 2 / 3 + summed_s,
        "G": embed.input_grad_s + embed.weight_grad_s + summed_s,
    }


def step_time(
    op_times: OpTimes, schedule: Schedule, ticks: Ticks | None, costs: Costs, copies: int, *, masked: bool = False
) -> StepTime:
    """Return the time of a step. `copies`: the devices of a rank, which do the same at the same time.

    Free-running ranks where there are no ticks. Otherwise each tick lasts as long as its slowest rank, plus a hop.
    masked (executor.idle=compute): ranks without a task compute too, in ticks of pairs; see `_masked_s`.
    The bubble is of what ranks that share `capacity` could do together: 0 where they always use all of it. With enough
    for all it is the idle share of the ranks.
    """
    assert not masked or (ticks is not None and ticks.program == "fb"), "spmd refuses others"
    if ticks is None:
        return ticking_s(op_times, schedule, None, costs, copies)
    rows = _masked_s(op_times, ticks, costs) if masked else rows_s(ticks.packing.counted, costs, schedule.num_chunks)
    return ticking_s(op_times, schedule, rows, costs, copies)


def ticking_s(op_times: OpTimes, schedule: Schedule, rows: Rows | None, costs: Costs, copies: int) -> StepTime:
    """Return `step_time` of rows of ticks, transfers not counted; None: of free-running ranks."""
    each = [count for rank in schedule.counts for count in rank]
    tasks_s = work_s = sum(number * costs.seconds(kind, s, schedule.num_chunks) for kind, s, number in each)
    capacity = op_times.capacity / copies  # copies do the same at the same time
    if rows is None:
        pipeline_s = free_running_s(schedule, costs, capacity)
    else:
        hop_s = costs.hop_s
        pipeline_s = sum(number * together_s([s + hop_s for s in row], capacity) for row, number in rows)
        work_s = sum(number * (sum(row) + hop_s * len(row)) for row, number in rows)
    width = min(schedule.num_ranks, capacity) * copies
    return StepTime(pipeline_s, op_times.overhead_s, work_s * copies, tasks_s * copies, width)


def _masked_s(op_times: OpTimes, ticks: Ticks, costs: Costs) -> Rows:
    """Return the seconds of every rank in each tick, in which ranks without a task compute too; see `masked_cells`."""
    return [([f + b for f, b in row], 1) for row in masked_cells(op_times, ticks, costs)]


def masked_cells(op_times: OpTimes, ticks: Ticks, costs: Costs) -> list[list[tuple[float, float]]]:
    """Return the seconds of a forward, then of a backward, of every rank in each tick; [tick][rank].

    All run an F in each tick of a segment with forwards, a B in each of one with backwards. Without a task of this kind
    it counts as long as the layers of the largest stage; so does a forward that is left to its backward.
    """
    schedule, layer = ticks.schedule, op_times.layer
    seconds = partial(duration_s, costs=costs, num_chunks=schedule.num_chunks)
    weight_grad_s = max(costs.seconds("W", s, schedule.num_chunks) for s in range(schedule.num_stages))
    if layer.weight_grad_s:
        layers = weight_grad_s / layer.weight_grad_s  # W is of layers alone
    else:  # no layer is trained: I is, but for what the first and the last stage add
        least_s = min(costs.seconds("I", s, schedule.num_chunks) for s in range(schedule.num_stages))
        layers = (least_s - op_times.task_s) / layer.input_grad_s
    idle_f = op_times.forward_s(layers) + op_times.task_s
    idle_b = op_times.input_grad_s(layers, keeps_input=ticks.remat.keeps_input_only, split=False)
    idle_b += layers * layer.weight_grad_s + op_times.task_s

    def cell_s(cell: TickCell, forward: bool, backward: bool) -> tuple[float, float]:
        f = cell.forward is not None and seconds(cell.forward)
        b = cell.backward is not None and seconds(cell.backward)
        return (f or idle_f) * forward, (b or idle_b) * backward

    return [
        [cell_s(cell, forward, backward) for cell in ticks.cells[t]]
        for which, forward, backward in ticks.segments(apart=True)
        for t in which
    ]
