"""The timeline of a step ends when its predicted time is over, and no task runs before its
inputs.
"""

import random
from math import inf

import pytest

from ppctl.planner.cost import step_time as timing
from ppctl.schedule.costs import OpTimes, PieceTimes, costs_of_stages
from ppctl.schedule.families.registry import FAMILIES, ON_RING, build
from ppctl.schedule.ir import Task, reads, writes
from ppctl.schedule.scheduled_step import ScheduledStep
from ppctl.schedule.simulator import simulate
from ppctl.schedule.tick_lowering import ticks

CAPACITIES = (0.7, 1.0, 2.5, inf)
NEAR = 1 + 1e-9


def some(family, capacity, *, hop_s=0.0, keeps_input=False, lockstep=True):
    """The arguments of step_time and step_timeline: unequal stages, every price another one, two
    copies.
    """
    choose = random.Random(f"{family} {capacity}")
    piece = lambda: PieceTimes(*(choose.uniform(0.5, 2.0) for _ in range(3)))
    op_times = OpTimes(
        piece(), piece(), piece(), task_s=0.07, hop_s=hop_s, overhead_s=3.0, capacity=2 * capacity
    )
    schedule = build(family, 4, 8)
    sizes = [choose.randint(1, 3) for _ in range(schedule.num_stages)]
    costs = costs_of_stages(op_times, sizes, keeps_input=keeps_input)
    table = ticks(schedule, costs, "full" if keeps_input else "none") if lockstep else None
    return op_times, schedule, table, costs, 2


def step_time(op_times, schedule, table, costs, copies):
    counted = None if table is None else table.counted
    return timing.step_time(op_times, schedule, counted, costs, copies)


def step_timeline(op_times, schedule, table, costs, copies):
    return ScheduledStep(schedule, costs, table).timeline(costs, op_times.capacity / copies)


def check_order(timeline):
    """Every rank runs one task at a time, in its order, after its inputs were written and sent."""
    schedule, num_stages = timeline.schedule, timeline.schedule.num_stages
    written = {value: (at_s, t.stage) for t, at_s in timeline.end_s.items() for value in writes(t)}
    assert set(timeline.start_s) == {task for tasks in schedule.ranks for task in tasks}
    for rank, tasks in enumerate(schedule.ranks):
        free_s = 0.0
        for task in tasks:
            start_s, end_s = timeline.start_s[task], timeline.end_s[task]
            assert free_s <= start_s * NEAR
            assert start_s <= end_s
            for value in reads(task, num_stages):
                at_s, stage = written[value]
                hop_s = 0.0 if schedule.rank_of[stage] == rank else timeline.costs.transfer_s
                assert at_s + hop_s <= start_s * NEAR
            free_s = end_s


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_free_running_ranks_end_where_the_step_does(family, capacity):
    asked = some(family, capacity, hop_s=0.3, lockstep=False)
    timeline = step_timeline(*asked)
    check_order(timeline)
    assert timeline.makespan_s == pytest.approx(step_time(*asked).pipeline_s, rel=1e-12)
    if capacity == inf:
        assert timeline == simulate(asked[1], asked[3])


@pytest.mark.parametrize("family", ON_RING)
@pytest.mark.parametrize("keeps_input", [False, True])
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("hop_s", [0.0, 0.3])
def test_a_chart_of_ticks_has_the_time_and_the_bubble_of_the_step(
    family, keeps_input, capacity, hop_s
):
    """The last tick sends, too: the chart of a plan ends with its transfer."""
    asked = some(family, capacity, keeps_input=keeps_input, hop_s=hop_s)
    timeline, step = step_timeline(*asked), step_time(*asked)
    check_order(timeline)
    assert timeline.makespan_s == timeline.period_s
    assert timeline.makespan_s == pytest.approx(step.pipeline_s, rel=1e-12)
    if capacity == inf:
        assert timeline.bubble_fraction == pytest.approx(step.bubble_fraction, rel=1e-9)


def test_ranks_that_share_a_core_in_a_tick_by_hand():
    free, one = PieceTimes(0.0, 0.0, 0.0), PieceTimes(1.0, 1.0, 1.0)
    op_times = OpTimes(free, one, free, task_s=0.0, hop_s=0.0, overhead_s=0.0, capacity=1.0)
    schedule = build("gpipe", 2, 2)
    costs = costs_of_stages(op_times, (3, 1), keeps_input=False)
    timeline = step_timeline(op_times, schedule, ticks(schedule, costs, "none"), costs, 1)
    # tick 0: only 0F0. Tick 1: 0F1 (3 s) together with 1F0 (1 s), which has half the core until it is
    # done
    span = lambda *task: (timeline.start_s[Task(*task)], timeline.end_s[Task(*task)])
    assert span(0, "F", 0) == (0, 3)
    assert span(1, "F", 0) == (3, 5)
    assert span(0, "F", 1) == (3, 7)
    assert timeline.makespan_s == 2 * 4 * 3
