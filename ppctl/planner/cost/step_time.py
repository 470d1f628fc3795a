"""The time of a step: op times put together as stages, tasks, and ticks or free-running ranks.

Standard library only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ppctl.planner.cost.op_times import OpTimes
from ppctl.schedule.costs import OF_PARTS, Costs
from ppctl.schedule.ir import Schedule
from ppctl.schedule.lockstep_ticks import Counted, rows_s
from ppctl.schedule.partition.partition import Partition, stage_costs
from ppctl.schedule.remat import Remat
from ppctl.schedule.simulator import free_running, together_s


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: tasks with their bubble, and per-step overhead."""

    pipeline_s: float
    overhead_s: float
    tasks_s: float  # of all devices, in seconds of one that works alone
    width: float  # devices that can work at full speed at the same time

    @property
    def total_s(self) -> float:
        return self.pipeline_s + self.overhead_s

    @property
    def bubble_fraction(self) -> float:
        """The share of the devices' joint capacity that no task uses while tasks run, 0..1."""
        return max(0.0, 1 - self.tasks_s / (self.pipeline_s * self.width))


def costs_of(
    op_times: OpTimes,
    schedule: Schedule,
    partition: Partition,
    remat: Remat,
    layer_costs: Sequence[float] | None = None,
) -> Costs:
    """Return the costs of a schedule's tasks; layer_costs: over their mean, None: all alike."""
    sizes = stage_costs(partition, embed=0.0, head=0.0, layers=layer_costs)
    how = {"keeps_input": remat.keeps_input_only, "split": schedule.is_split}
    return costs_of_stages(op_times, sizes, **how)


def costs_of_stages(
    op_times: OpTimes, sizes: Sequence[float], *, keeps_input: bool, split: bool = False
) -> Costs:
    """Return the costs of each stage's tasks; sizes: its layers, or their relative cost.

    The last stage's forward runs the head forward and backward. With keeps_input (remat=full) it is
    a part of the backward, and the first stage embeds again. split: W is a separate task, not a
    part of B.

    >>> from ppctl.planner.cost.op_times import FREE, PieceTimes
    >>> one, two = (PieceTimes(s, s, s) for s in (1.0, 2.0))
    >>> op_times = OpTimes(FREE, one, two, task_s=0.0, hop_s=0.0, overhead_s=0.0)
    >>> costs_of_stages(op_times, (2, 1), keeps_input=False).forward_s
    (2.0, 7.0)
    """
    last, embed, head = len(sizes) - 1, op_times.embed, op_times.head
    forward, input_grad, weight_grad = list[float](), list[float](), list[float]()

    # 1. layers, with embedding and head at the ends
    for s, n in enumerate(sizes):
        f = op_times.forward_s(n) + op_times.task_s + (embed.forward_s if s == 0 else 0.0)
        i = op_times.input_grad_s(n, keeps_input=keeps_input, split=split) + op_times.task_s
        if s == 0:
            i += embed.input_grad_s + embed.weight_grad_s
            i += embed.forward_s if keeps_input else 0.0
        if s == last and keeps_input and not op_times.parts:
            f, i = 0.0, i + head.all_s
        elif s == last:
            f += head.all_s
        forward.append(f)
        input_grad.append(i)
        weight_grad.append(n * op_times.layer.weight_grad_s + (op_times.task_s if split else 0.0))

    # 2. parts of the vocabulary
    costs = Costs(tuple(forward), tuple(input_grad), tuple(weight_grad), transfer_s=op_times.hop_s)
    return replace(costs, **{OF_PARTS[kind]: s for kind, s in op_times.parts.items()})


def step_time(
    op_times: OpTimes, schedule: Schedule, counted: Counted | None, costs: Costs, copies: int
) -> StepTime:
    """Return the time of a step. copies: the devices of a rank, which do the same at once.

    counted: the rows of ticks, each of which lasts as long as its slowest rank, plus a hop; None:
    ranks run freely. The bubble is the unused share of the ranks' joint `capacity`; if that is
    enough for all, their idle share.
    """
    tasks, chunks = [count for rank in schedule.counts for count in rank], schedule.num_chunks
    tasks_s = sum(number * costs.seconds(kind, s, chunks) for kind, s, number in tasks)
    capacity, hop_s = op_times.capacity / copies, costs.transfer_s
    if counted is None:
        pipeline_s = free_running(schedule, costs, capacity).makespan_s
    else:
        rows = [([s + hop_s for s in row], n) for row, n in rows_s(counted, costs, chunks)]
        pipeline_s = sum(number * together_s(row, capacity) for row, number in rows)
    width = min(schedule.num_ranks, capacity) * copies
    return StepTime(pipeline_s, op_times.overhead_s, tasks_s * copies, width)
