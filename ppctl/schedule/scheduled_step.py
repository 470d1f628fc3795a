"""A schedule as an executor runs it."""

from dataclasses import dataclass
from functools import cached_property
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
    """The schedule of a step as one executor runs it."""

    schedule: Schedule
    costs: Costs  # relative costs of the tasks, see `task_costs`
    ticks: Ticks | None = None  # lockstep ticks; None: ranks run freely
    fuses: bool = False  # whether pairs of tasks run as one program, see `fused_order`

    @cached_property
    def order(self) -> list[tuple[Task, ...]]:
        """Return the tasks by start on free-running ranks, each after the tasks it depends on.

        Tasks that run as one program share a tuple.
        """
        if self.fuses:
            return fused_order(self.schedule, self.costs)
        # start_s is in an order that can run; the stable sort keeps it for equal starts
        start_s = simulate(self.schedule, self.costs).start_s
        return [(task,) for task in sorted(start_s, key=start_s.__getitem__)]

    @property
    def num_fused(self) -> int:
        """Return the number of pairs of tasks that run as one program."""
        return sum(len(tasks) > 1 for tasks in self.order) if self.fuses else 0

    @cached_property
    def evaluation(self) -> "ScheduledStep":
        """Return the step of an evaluation: the forwards only."""
        schedule, lowered = forward_only(self.schedule), None
        if self.ticks is not None:
            lowered = ticks(schedule, self.costs, self.ticks.remat)
        return ScheduledStep(schedule, self.costs, lowered)

    def timeline(self, costs: Costs, capacity: float = inf) -> Timeline:
        """Return the timeline at these costs, on ranks that share `capacity` cores."""
        if self.ticks is None:
            return free_running(self.schedule, costs, capacity)
        return lockstep(self.ticks, costs, capacity)

    def bubble_fraction(self, costs: Costs) -> float:
        """Return the idle share of all ranks at these costs, 0..1."""
        if self.ticks is not None:
            return self.ticks.bubble_fraction(costs)
        return simulate(self.schedule, costs).bubble_fraction


def scheduled_step(
    schedule: Schedule,
    engine: EngineTraits,
    remat: Remat,
    trained: float = 1.0,
    *,
    fuses: bool = False,
) -> ScheduledStep:
    """Return the schedule of a step as an executor with these traits runs it.

    trained: the trained share of the layers' weights, see `task_costs`. fuses: whether pairs of
    tasks run as one program, see `fused_order`. ScheduleError if the executor cannot run the
    schedule.
    """
    costs = task_costs(remat, trained)
    lowered = ticks(schedule, costs, remat) if engine.in_ticks else None
    return ScheduledStep(schedule, costs, lowered, fuses)
