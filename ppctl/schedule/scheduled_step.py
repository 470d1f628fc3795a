"""A schedule as an executor runs it: made once, and carried by all that run, time or draw it."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf

from ppctl.schedule.costs import Costs, task_costs
from ppctl.schedule.engine_traits import EngineTraits
from ppctl.schedule.fused_pairs import fused_order
from ppctl.schedule.ir import Schedule, Task
from ppctl.schedule.remat import Remat
from ppctl.schedule.simulator import Timeline, free_running, lockstep, simulate
from ppctl.schedule.tick_lowering import Ticks, forward_only, ticks


@dataclass(frozen=True)
class ScheduledStep:
    """The schedule of a step, as one executor runs it."""

    schedule: Schedule
    costs: Costs  # relative, of its tasks, see `task_costs`
    ticks: Ticks | None = None  # None where ranks run freely
    fuses: bool = False  # whether pairs of neighbours run as one, see `fused_order`

    @cached_property
    def order(self) -> list[tuple[Task, ...]]:
        """The tasks by their start on free-running ranks, each after those that it reads.

        Tasks that run as one program are together.
        """
        if self.fuses:
            return fused_order(self.schedule, self.costs)
        start_s = simulate(self.schedule, self.costs).start_s  # ranks can run it: ties keep it
        return [(task,) for task in sorted(start_s, key=start_s.__getitem__)]

    @property
    def num_fused(self) -> int:
        """The number of pairs of tasks that run as one program."""
        return sum(len(tasks) > 1 for tasks in self.order) if self.fuses else 0

    @cached_property
    def evaluation(self) -> "ScheduledStep":
        """The forwards of the step, for an evaluation."""
        schedule, lowered = forward_only(self.schedule), None
        if self.ticks is not None:
            lowered = ticks(schedule, self.costs, self.ticks.remat)
        return ScheduledStep(schedule, self.costs, lowered)

    def timeline(self, costs: Costs, capacity: float = inf) -> Timeline:
        """Return when each task runs at these costs, on ranks that share `capacity`."""
        if self.ticks is None:
            return free_running(self.schedule, costs, capacity)
        return lockstep(self.ticks, costs, capacity)

    def bubble_fraction(self, costs: Costs) -> float:
        """Return the idle share of all ranks at these costs, 0..1."""
        if self.ticks is not None:
            return self.ticks.bubble_fraction(costs)
        return simulate(self.schedule, costs).bubble_fraction


@lru_cache(4)
def scheduled_step(
    schedule: Schedule,
    engine: EngineTraits,
    remat: Remat,
    trained: float = 1.0,
    *,
    fuses: bool = False,
) -> ScheduledStep:
    """Return the schedule of a step; trained: the share of the layers' weights, see `task_costs`.

    ScheduleError for a schedule that the executor cannot run.
    """
    costs = task_costs(remat, trained)
    lowered = ticks(schedule, costs, remat) if engine.in_ticks else None
    return ScheduledStep(schedule, costs, lowered, fuses)
