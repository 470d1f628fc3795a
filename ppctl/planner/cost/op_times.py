"""The time of a step: seconds of the pieces of a model, put together as stages, tasks and ticks.

They are counted (`counted_costs`), or measured by a rehearsal. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from ppctl.schedule.costs import OF_PARTS, Costs
from ppctl.schedule.ir import Kind, Schedule
from ppctl.schedule.lockstep_ticks import Rows, rows_s
from ppctl.schedule.tick_lowering import Ticks
from ppctl.schedule.timeline import free_running, together_s


@dataclass(frozen=True)
class PieceTimes:
    """Seconds of a microbatch through embedding, a layer or head, on a device working alone.

    Recomputation is part of the input gradient.
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
    is_ahead: bool  # the next layer is gathered while one is computed; else nothing is meanwhile
    once_more: bool = False  # layers are scanned: the last one's turn gathers it once more

    def through_s(self, layers: float, layer_s: float) -> float:
        """Return the seconds of a task through so many layers, layer_s each without gathers.

        >>> [LayerGathers(2.0, is_ahead).through_s(3, 5.0) for is_ahead in (True, False)]
        [17.0, 21.0]
        """
        if not layers:
            return 0.0
        if not self.is_ahead:
            return layers * layer_s + (layers + self.once_more) * self.layer_s
        last_s = max(layer_s, self.layer_s) if self.once_more else layer_s
        return self.layer_s + (layers - 1) * max(layer_s, self.layer_s) + last_s


@dataclass(frozen=True)
class OpTimes:
    """Seconds of all pieces of a step, for one size of microbatch and one setting of remat."""

    embed: PieceTimes
    layer: PieceTimes
    head: PieceTimes
    task_s: float  # of a task, besides its layers
    hop_s: float  # from the end of a task until its value can be read on the next rank
    overhead_s: float  # per step: gathering parameters, reducing gradients, the optimizer
    capacity: float = inf  # devices at full speed at the same time; simulated ones share cores
    gathers: LayerGathers | None = None  # of layers in each task; None: they are whole before it

    def forward_s(self, layers: float) -> float:
        """Return the seconds of a forward through so many layers."""
        return self._through_s(layers, self.layer.forward_s)

    def input_grad_s(self, layers: float, *, keeps_input: bool, split: bool) -> float:
        """Return the seconds of a backward through so many layers, without weight gradients.

        keeps_input: it runs the forward first, and its last layer need not be gathered again.
        split: weight gradients are a separate task without parameters; else they too overlap with
        gathers.
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
    work_s: float  # of all devices, in seconds of one that works alone; with transfers of ticks
    tasks_s: float  # likewise, only of tasks
    width: float  # devices that can work at full speed at the same time

    @property
    def total_s(self) -> float:
        return self.pipeline_s + self.overhead_s

    @property
    def bubble_fraction(self) -> float:
        """The share of the devices' joint capacity that no task uses while tasks run, 0..1."""
        return max(0.0, 1 - self.tasks_s / (self.pipeline_s * self.width))


def costs_of_stages(
    op_times: OpTimes,
    sizes: Sequence[float],
    *,
    keeps_input: bool,
    split: bool = False,
    num_parts: int = 0,
) -> Costs:
    """Return the costs of each stage's tasks; sizes: its layers, or their relative cost.

    The last stage's forward runs the head forward and backward. With keeps_input (remat=full) it is
    a part of the backward, and the first stage embeds again. split: W is a separate task, not a
    part of B. num_parts: ranks with a part of the vocabulary each (`seconds_of_part`).

    >>> free, one, two = (PieceTimes(s, s, s) for s in (0.0, 1.0, 2.0))
    >>> op_times = OpTimes(free, one, two, task_s=0.0, hop_s=0.0, overhead_s=0.0)
    >>> costs_of_stages(op_times, (2, 1), keeps_input=False).forward_s
    (2.0, 7.0)
    """
    last, free = len(sizes) - 1, PieceTimes(0.0, 0.0, 0.0)
    embed, head = (free, free) if num_parts else (op_times.embed, op_times.head)
    forward, input_grad, weight_grad = list[float](), list[float](), list[float]()

    # 1. layers, with embedding and head at the ends
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

    # 2. parts of the vocabulary
    costs = Costs(tuple(forward), tuple(input_grad), tuple(weight_grad), transfer_s=op_times.hop_s)
    parts = seconds_of_part(op_times, num_parts) if num_parts else {}
    return replace(costs, **{OF_PARTS[kind]: each_s for kind, each_s in parts.items()})


def seconds_of_part(op_times: OpTimes, num_parts: int) -> dict[Kind, float]:
    """Return the seconds of each kind of task of a vocabulary part; op_times are those of one part.

    Of the head's three products S makes one, T two; and each task sums an activation over the
    ranks, round the ring.
    """
    embed, head = op_times.embed, op_times.head
    summed_s = 2 * (num_parts - 1) / num_parts * op_times.hop_s
    return {
        "E": embed.forward_s + summed_s,
        "S": head.all_s / 3 + summed_s,
        "T": head.all_s * 2 / 3 + summed_s,
        "G": embed.input_grad_s + embed.weight_grad_s + summed_s,
    }


def step_time(
    op_times: OpTimes, schedule: Schedule, ticks: Ticks | None, costs: Costs, copies: int
) -> StepTime:
    """Return the time of a step. copies: the devices of a rank, which do the same at once.

    Ranks run freely if there are no ticks. Otherwise each tick lasts as long as its slowest rank,
    plus a hop. The bubble is the unused share of the ranks' joint `capacity`; if that is enough for
    all, their idle share.
    """
    rows = None if ticks is None else rows_s(ticks.packing.counted, costs, schedule.num_chunks)
    return ticking_s(op_times, schedule, rows, costs, copies)


def ticking_s(
    op_times: OpTimes, schedule: Schedule, rows: Rows | None, costs: Costs, copies: int
) -> StepTime:
    """Return `step_time` of rows of ticks, transfers not counted; None: of free-running ranks."""
    tasks, chunks = [count for rank in schedule.counts for count in rank], schedule.num_chunks
    tasks_s = work_s = sum(number * costs.seconds(kind, s, chunks) for kind, s, number in tasks)
    capacity, hop_s = op_times.capacity / copies, costs.transfer_s
    if rows is None:
        pipeline_s = free_running(schedule, costs, capacity).makespan_s
    else:
        ticks = [([s + hop_s for s in row], number) for row, number in rows]
        pipeline_s = sum(number * together_s(row, capacity) for row, number in ticks)
        work_s = sum(number * (sum(row) + hop_s * len(row)) for row, number in rows)
    width = min(schedule.num_ranks, capacity) * copies
    return StepTime(pipeline_s, op_times.overhead_s, work_s * copies, tasks_s * copies, width)
