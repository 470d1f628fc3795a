"""What a step takes: seconds of the pieces of a model, put together as stages, tasks and ticks.

Pieces are priced elsewhere, by counting (`plan.roofline`) or by timing (`runtime.timing`). Standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from ppctl.costs import Costs
from ppctl.schedule.ir import Schedule
from ppctl.schedule.shared import free_running_s, together_s
from ppctl.schedule.simulate import duration_s
from ppctl.schedule.lockstep import Counted


@dataclass(frozen=True)
class Piece:
    """Seconds of one microbatch through a piece of the model (embedding, a layer, head) on a device working alone.

    What a backward recomputes is part of the input gradient.
    """

    forward_s: float
    input_grad_s: float
    weight_grad_s: float

    @property
    def all_s(self) -> float:
        return self.forward_s + self.input_grad_s + self.weight_grad_s


@dataclass(frozen=True)
class Prices:
    """Seconds of everything that a step is made of, for microbatches of one size and one setting of remat."""

    embed: Piece
    layer: Piece
    head: Piece
    task_s: float  # a task beside its layers
    hop_s: float  # from the end of a task until its value can be read on the next rank
    once_s: float  # once a step: gathering parameters, reducing gradients, the optimizer
    capacity: float = inf  # how many devices can work at full speed at the same time; simulated ones share cores
    cores: float = 1.0  # that a device working alone keeps busy


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: tasks with their bubble, and what runs once."""

    pipeline_s: float
    once_s: float
    work_s: float  # of all devices together, in seconds of one that works alone
    bubble_fraction: float  # idle share of the ranks while tasks run, 0..1

    @property
    def total_s(self) -> float:
        return self.pipeline_s + self.once_s


def stage_costs(prices: Prices, sizes: Sequence[int], *, keeps_input: bool) -> Costs:
    """The costs of each stage's tasks; `sizes` are its layers.

    The last stage's head runs in its forward, forwards and backwards; with keeps_input (remat=full) its forward is left
    to its backward, and the first stage embeds again.

    >>> one, free = Piece(1.0, 1.0, 1.0), Piece(0.0, 0.0, 0.0)
    >>> prices = Prices(free, one, Piece(2.0, 2.0, 2.0), task_s=0.0, hop_s=0.0, once_s=0.0)
    >>> stage_costs(prices, (2, 1), keeps_input=False).forward_s
    (2.0, 7.0)
    """
    layer, last = prices.layer, len(sizes) - 1
    forward, input_grad, weight_grad = [], [], []
    for s, n in enumerate(sizes):
        f = n * layer.forward_s + prices.task_s + (prices.embed.forward_s if s == 0 else 0.0)
        i = n * layer.input_grad_s + prices.task_s
        if s == 0:
            i += prices.embed.input_grad_s + prices.embed.weight_grad_s
            i += prices.embed.forward_s if keeps_input else 0.0
        if s == last and keeps_input:
            f, i = 0.0, i + prices.head.all_s
        elif s == last:
            f += prices.head.all_s
        forward.append(f)
        input_grad.append(i)
        weight_grad.append(n * layer.weight_grad_s)
    return Costs(tuple(forward), tuple(input_grad), tuple(weight_grad), transfer_s=prices.hop_s)


def step_time(prices: Prices, schedule: Schedule, ticks: Counted | None, costs: Costs, rows: int) -> StepTime:
    """What a step takes. `rows`: how many copies of the pipeline run at the same time (dp*fsdp).

    Free-running ranks where there are no ticks. Otherwise each tick lasts as long as its slowest rank, plus a hop.
    """
    seconds = partial(duration_s, costs=costs, num_chunks=schedule.num_chunks)
    each = Counter((task.kind, task.stage) for tasks in schedule.ranks for task in tasks)
    work_s = sum(number * costs.seconds(*which, schedule.num_chunks) for which, number in each.items())
    capacity = prices.capacity / rows  # copies do the same at the same time
    if ticks is None:
        pipeline_s = free_running_s(schedule, costs, capacity)
    else:
        pipeline_s = sum(
            number
            * together_s([sum(seconds(task) for task in cell if task is not None) + costs.hop_s for cell in row], capacity)
            for number, row in ticks
        )
        work_s += costs.hop_s * sum(number for number, _ in ticks) * schedule.num_ranks
    bubble = 1 - work_s / (pipeline_s * schedule.num_ranks)
    return StepTime(pipeline_s, prices.once_s, work_s * rows, bubble)
