"""The partition that `ppctl plan` proposes: faster by simulation."""

from __future__ import annotations

from dataclasses import dataclass

from ppctl.schedule.costs import Costs
from ppctl.schedule.partition.cut_layers import improved
from ppctl.schedule.partition.partition import Partition
from ppctl.schedule.simulator import simulate
from ppctl.training.pipeline.pipeline import Pipeline

LARGEST_RATIO = 0.99  # of the requested partition's time: a proposal is at least 1% faster
TASKS_SIMULATED = 2_000_000  # by all simulations together, a few CPU seconds each million
MOST_SIMULATIONS = 1000


@dataclass(frozen=True)
class Proposal:
    """A partition and its time over the requested one's."""

    partition: tuple[int, ...]  # layers of each stage
    time_ratio: float


def propose(pipe: Pipeline) -> Proposal | None:
    """Return the fastest partition found, if it is 1% faster than the requested one.

    Costs of layers, embedding and head are their FLOPs. None if nothing is better, or a simulation
    would take too long.
    """
    costs, ticks, schedule = pipe.task_costs, pipe.ticks, pipe.schedule
    most = min(MOST_SIMULATIONS, TASKS_SIMULATED // sum(map(len, schedule.ranks)))
    if not pipe.execution.is_pipelined or not most:
        return None

    def seconds(partition: Partition) -> float:
        """Return the makespan of a partition, in units of a forward through a layer."""
        units = pipe.relative_costs.of_stages(partition)
        f, i, w = (tuple(costs.seconds(kind, 0, 1) * n for n in units) for kind in "FIW")
        of_stages = Costs(f, i, w)
        if ticks is not None:
            return ticks.makespan_s(of_stages)
        return simulate(schedule, of_stages).makespan_s

    starts = pipe.partition, pipe.relative_costs.balanced(schedule.rank_of)
    best = improved(min(starts, key=seconds), seconds, max_tried=most)
    ratio = seconds(best) / seconds(pipe.partition)
    return None if ratio > LARGEST_RATIO else Proposal(tuple(map(len, best)), ratio)
