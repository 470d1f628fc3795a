"""When each task of a step runs, by the op times and rules of `op_times.step_time`. Standard library only."""

from __future__ import annotations

from ppctl.planner.op_times import OpTimes, masked_cells
from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import Schedule
from ppctl.schedule.simulate import Timeline
from ppctl.schedule.ticks import Ticks
from ppctl.schedule.timeline import lockstep, timeline_at


def step_timeline(
    op_times: OpTimes, schedule: Schedule, ticks: Ticks | None, costs: Costs, copies: int, *, masked: bool = False
) -> Timeline:
    """Return the timeline of a step whose seconds are `step_time(...).pipeline_s`; arguments as there.

    In lockstep the last tick ends with a transfer, after the last task.
    """
    capacity = op_times.capacity / copies
    if ticks is None or not masked:
        return timeline_at(schedule, ticks, costs, capacity)
    return lockstep(ticks, costs, masked_cells(op_times, ticks, costs), capacity)
