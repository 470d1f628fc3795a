"""Ranks that share cores: against stepping through time, against free-running ranks, and between
bounds.
"""

import itertools
import random

import pytest
from support.all_families import GROUPED, knob_choices

from ppctl.errors import ConfigError, ScheduleError
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.registry import FAMILIES, build
from ppctl.schedule.ir import Schedule, Task, reads, writes
from ppctl.schedule.simulator import free_running, simulate, together_s


def free_running_s(*request):
    return free_running(*request).makespan_s


CAPACITIES = (0.4, 1.0, 1.7, 2.0, 3.5)
families = pytest.mark.parametrize("family", FAMILIES)


def schedules(family, ranks=(2, 3, 4)):
    """A schedule of each size and knob, small ones."""
    for p, knobs in itertools.product(ranks, knob_choices(family)):
        yield build(family, p, p if family in GROUPED else p + 1, **knobs)


def random_costs(choose, num_stages, hop_s):
    """Unequal stages; some forwards take no time, as where they are left to their backward."""
    tasks = [tuple(choose.uniform(0.2, 2.0) for _ in range(num_stages)) for _ in "FIW"]
    forward_s = (*tasks[0][:-1], choose.choice((0.0, 1.0)))
    return Costs(forward_s, *tasks[1:], transfer_s=hop_s)


def work_s(schedule, costs):
    return sum(
        costs.seconds(task.kind, task.stage, schedule.num_chunks)
        for tasks in schedule.ranks
        for task in tasks
    )


def stepped_s(schedule, costs, capacity, step_s):
    """The makespan by small steps of time: in each, the ranks with a task share the capacity."""
    now, written, at = 0.0, {}, [0] * schedule.num_ranks
    left = [None] * schedule.num_ranks  # seconds of the task at work
    while any(i < len(tasks) for i, tasks in zip(at, schedule.ranks, strict=True)):
        for rank, tasks in enumerate(schedule.ranks):
            if left[rank] is None and at[rank] < len(tasks):
                task = tasks[at[rank]]
                arrives = [
                    written.get(value, float("inf"))
                    + costs.transfer_s * (schedule.rank_of[value.stage] != rank)
                    for value in reads(task, schedule.num_stages)
                ]
                if all(each <= now for each in arrives):
                    left[rank] = costs.seconds(task.kind, task.stage, schedule.num_chunks)
        working = [rank for rank, seconds in enumerate(left) if seconds is not None]
        now += step_s
        for rank in working:
            left[rank] -= step_s * min(1.0, capacity / len(working))
            if left[rank] <= 0:
                task = schedule.ranks[rank][at[rank]]
                written |= dict.fromkeys(writes(task), now)
                left[rank], at[rank] = None, at[rank] + 1
    return now


@pytest.mark.parametrize("capacity", [0.7, 1.5, 2.5])
@pytest.mark.parametrize("family", ["1f1b", "interleaved", "zb_h1", "zb_v"])
def test_sharing_equals_stepping_through_time(family, capacity):
    choose = random.Random(f"{family} {capacity}")
    for hop_s in (0.0, 0.3):
        schedule = build(family, 3, 3)
        costs = random_costs(choose, schedule.num_stages, hop_s)
        step_s = 0.002
        expected = stepped_s(schedule, costs, capacity, step_s)
        rounded_s = step_s * 3 * len(schedule.ranks[0])  # each task and hop ends up to a step late
        assert expected - rounded_s <= free_running_s(schedule, costs, capacity) <= expected + 1e-9


@families
def test_with_a_core_for_each_rank_it_is_the_simulation(family):
    choose = random.Random(family)
    for schedule in schedules(family):
        for hop_s in (0.0, 0.25):
            costs = random_costs(choose, schedule.num_stages, hop_s)
            expected = simulate(schedule, costs).makespan_s
            assert free_running_s(schedule, costs) == expected
            assert free_running_s(schedule, costs, schedule.num_ranks) == expected
            almost = free_running_s(
                schedule, costs, schedule.num_ranks * (1 - 1e-10)
            )  # by the other program
            assert almost == pytest.approx(expected, rel=1e-8)


@families
def test_more_capacity_never_takes_longer_and_all_bounds_hold(family):
    choose = random.Random(family)
    for schedule in schedules(family):
        hop_s = choose.choice((0.0, 0.4))
        costs = random_costs(choose, schedule.num_stages, hop_s)
        free_s = simulate(schedule, costs).makespan_s
        times = [free_running_s(schedule, costs, capacity) for capacity in CAPACITIES]
        for before, after in itertools.pairwise([*times, free_s]):
            assert after <= before * (1 + 1e-9)
        for capacity, time_s in zip(CAPACITIES, times, strict=True):
            assert time_s >= work_s(schedule, costs) / capacity * (1 - 1e-9)
            assert time_s <= free_s * max(1.0, schedule.num_ranks / capacity) * (1 + 1e-9)


@families
def test_a_core_that_is_always_busy_takes_the_sum_of_the_work(family):
    choose = random.Random(family)
    for schedule in schedules(family):
        costs = random_costs(
            choose, schedule.num_stages, hop_s=0.0
        )  # so there always is a task that can run
        for capacity in (0.3, 1.0):
            expected = work_s(schedule, costs) / capacity
            assert free_running_s(schedule, costs, capacity) == pytest.approx(expected, rel=1e-9)


def test_a_transfer_takes_its_time_at_any_capacity():
    costs = Costs(1.0, 1.0, 1.0, transfer_s=5.0)  # seconds of each rank's half of the model
    assert free_running_s(build("gpipe", 2, 1), costs, 0.5) == pytest.approx(
        2 * (2 * 3.0) + 2 * 5.0
    )


@pytest.mark.parametrize("capacity", [1.0, 4.0])
def test_a_deadlock_is_shown_with_its_task(capacity):
    stuck = Schedule(
        "stuck", ((Task(0, "B", 0), Task(0, "F", 0)), (Task(1, "F", 0), Task(1, "B", 0))), (0, 1), 1
    )
    with pytest.raises(ScheduleError, match="stuck: rank 0, step 0: 0B0 waits for") as found:
        free_running_s(stuck, Costs(), capacity)
    assert "0B0" in str(found.value).split("\n", 1)[1]


@pytest.mark.parametrize("capacity", [1.0, 4.0])
def test_costs_of_another_number_of_stages_are_refused(capacity):
    with pytest.raises(ConfigError, match="forward_s has 3 entries for 2 stages"):
        free_running_s(build("gpipe", 2, 2), Costs(forward_s=(1.0, 1.0, 1.0)), capacity)


# --- works that start together ------------------------------------------------------------------


def test_shared_works_equal_stepping_through_time():
    choose = random.Random(0)
    for _ in range(30):
        works = [choose.choice((0.0, choose.uniform(0, 3))) for _ in range(choose.randint(1, 6))]
        capacity, step_s, now = choose.uniform(0.3, 7), 0.001, 0.0
        left = [work for work in works if work > 0]
        while left:
            share = step_s * min(1.0, capacity / len(left))
            left, now = [work - share for work in left if work > share], now + step_s
        assert together_s(works, capacity) == pytest.approx(now, abs=step_s * 8)


def test_shared_works_take_the_longest_or_the_sum():
    assert together_s([1.0, 5.0, 2.0], capacity=3.0) == 5.0
    assert together_s([1.0, 5.0, 2.0], capacity=1.0) == 8.0
    assert together_s([1.0, 5.0, 2.0], 0.5) == 16.0
    assert together_s([], capacity=1.0) == 0.0
