"""What speaks against a schedule at given costs: a line with both numbers and the remedy, or None."""

from __future__ import annotations

from ppctl.errors import ConfigError
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.interleaved import interleaved
from ppctl.schedule.families.one_f_one_b import one_f_one_b
from ppctl.schedule.ir import Schedule
from ppctl.schedule.simulate import simulate


def needs_split_backward(schedule: Schedule, costs: Costs) -> str | None:
    """For schedules whose bubble relies on weight gradients that fill gaps: without any, 1F1B is faster."""
    whole = any(task.kind == "B" for tasks in schedule.ranks for task in tasks)
    if not whole and costs.weight_grad_s != 0:
        return None
    if isinstance(costs.forward_s, tuple) or isinstance(costs.input_grad_s, tuple):
        return None  # costs of these stages say nothing of another placement
    rival = one_f_one_b(schedule.num_ranks, schedule.num_microbatches)
    return _slower(schedule, rival, costs, "without weight gradients of their own", "schedule=1f1b")


def interleaved_is_faster(schedule: Schedule, costs: Costs) -> str | None:
    """For schedules that interleaved 1F1B on as many chunks may beat."""
    if schedule.num_microbatches % schedule.num_ranks:
        return None
    rival = interleaved(schedule.num_ranks, schedule.num_microbatches, num_chunks=schedule.num_chunks)
    remedy = f"schedule=interleaved schedule.num_chunks={schedule.num_chunks}"
    return _slower(schedule, rival, costs, "at these costs", remedy)


def _slower(schedule: Schedule, rival: Schedule, costs: Costs, why: str, remedy: str) -> str | None:
    try:
        mine_s, rival_s = simulate(schedule, costs).makespan_s, simulate(rival, costs).makespan_s
    except ConfigError:  # costs of each of another number of stages
        return None
    if mine_s <= rival_s:
        return None
    return (
        f"{schedule.name} takes {mine_s / rival_s:.2f} times as long as {rival.name} {why} "
        f"({mine_s:.4g} s against {rival_s:.4g} s). Use {remedy}."
    )
