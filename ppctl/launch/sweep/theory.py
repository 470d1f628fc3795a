"""The bubble that the theory of a schedule predicts, over numbers of microbatches."""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.config import Config
from ppctl.config.schedule_from_config import trained_share
from ppctl.errors import ScheduleError
from ppctl.schedule import FAMILIES, build
from ppctl.schedule.costs import Costs, task_costs
from ppctl.schedule.families.registry import makespan_formula_s
from ppctl.schedule.search.extrapolate import MOST_TASKS
from ppctl.schedule.simulate import simulate

NUM_POINTS = 64  # of a curve, at most


def bubble_curve(config: Config, sizes: Sequence[int]) -> list[tuple[float, float]]:
    """Return (microbatches, idle share 0..1) from the smallest to the largest of `sizes`, on ranks that run freely.

    By the closed form at the relative costs of the executor's tasks; where it holds nowhere, of the schedule itself,
    simulated at `sizes`. Nothing without a pipeline, or for a schedule that is no family.
    """
    schedule, ranks, family = config.schedule, config.mesh.pp, config.schedule.name
    if family not in FAMILIES or not config.executor.IS_PIPELINED:
        return []
    costs = _costs(config)
    work_s = sum(costs.seconds(kind, 0, 1) for kind in "FIW")
    low, high = min(sizes), max(sizes)
    between = {round(low * (high / low) ** (k / (NUM_POINTS - 1))) for k in range(NUM_POINTS)}
    curve = []
    for num in sorted(between | set(sizes)):
        makespan_s = makespan_formula_s(family, ranks, num, costs, **schedule.knobs())
        if makespan_s is not None:
            curve.append((float(num), 1 - num * work_s / makespan_s))
    return curve if len(curve) > 1 else _simulated(config, sorted(set(sizes)))


def _costs(config: Config) -> Costs:
    return task_costs(config.executor.remat, trained_share(config.model, config.optim))


def _simulated(config: Config, sizes: Sequence[int]) -> list[tuple[float, float]]:
    settings, costs, found = config.schedule, _costs(config), []
    for num in sizes:
        try:
            schedule = build(settings.name, config.mesh.pp, num, **settings.knobs())
        except ScheduleError:
            continue  # a size that the family cannot serve: that job has failed
        if sum(map(len, schedule.ranks)) <= MOST_TASKS:
            found.append((float(num), simulate(schedule, costs).bubble_fraction))
    return found
