"""A step from the pieces of a model: nothing is lost or counted twice, and bubbles are the
simulated ones.
"""

import itertools
import random
from dataclasses import replace
from math import inf

import pytest

from ppctl.planner.cost.step_time import step_time
from ppctl.schedule.costs import OpTimes, PieceTimes, costs_of_stages
from ppctl.schedule.families.registry import FAMILIES, ON_RING, build
from ppctl.schedule.simulator import simulate
from ppctl.schedule.tick_lowering import ticks

FREE = PieceTimes(0.0, 0.0, 0.0)
families = pytest.mark.parametrize("family", FAMILIES)
remats = pytest.mark.parametrize("keeps_input", [False, True])


def random_prices(choose, **changes):
    """Every number another one, so that none can stand for another."""
    piece = lambda: PieceTimes(*(choose.uniform(0.5, 2.0) for _ in range(3)))
    return replace(
        OpTimes(piece(), piece(), piece(), task_s=0.07, hop_s=0.0, overhead_s=0.0), **changes
    )


def some(family, *, p=4, m=8, seed=0, **changes):
    """(op_times, schedule, layers of each stage)."""
    choose = random.Random(f"{family} {seed}")
    schedule = build(family, p, m)
    sizes = tuple(choose.randint(1, 3) for _ in range(schedule.num_stages))
    return random_prices(choose, **changes), schedule, sizes


def lowered(schedule, costs, keeps_input):
    return ticks(schedule, costs, "full" if keeps_input else "none")


def tasks_s(schedule, costs):
    return sum(
        costs.seconds(kind, stage, 1) for tasks in schedule.ranks for stage, kind, _ in tasks
    )


# --- tasks of stages ----------------------------------------------------------------------------


@families
@remats
def test_all_tasks_together_are_all_layers_embedding_head_and_the_starts_of_tasks(
    family, keeps_input
):
    op_times, schedule, sizes = some(family)
    is_split = any(task.kind == "W" for tasks in schedule.ranks for task in tasks)
    costs = costs_of_stages(op_times, sizes, keeps_input=keeps_input, split=is_split)
    one = sum(sizes) * op_times.layer.all_s + op_times.embed.all_s + op_times.head.all_s
    number = sum(
        1 + (is_split and task.kind == "B") for tasks in schedule.ranks for task in tasks
    )  # B costs I and W
    # layers of the last stage run forward only in the backward, which counts that; and is no task
    if keeps_input:
        one += op_times.embed.forward_s - sizes[-1] * op_times.layer.forward_s
        number -= schedule.num_microbatches
    expected = schedule.num_microbatches * one + number * op_times.task_s
    assert tasks_s(schedule, costs) == pytest.approx(expected, rel=1e-12)


def test_tasks_by_hand():
    op_times = OpTimes(
        PieceTimes(1, 10, 100),
        PieceTimes(2, 20, 200),
        PieceTimes(3, 30, 300),
        task_s=0.5,
        hop_s=7.0,
        overhead_s=0.0,
    )
    kept = costs_of_stages(op_times, (1, 2, 0), keeps_input=False)
    assert kept.forward_s == (
        1 + 2 + 0.5,
        2 * 2 + 0.5,
        333 + 0.5,
    )  # the head with its gradients is in the forward
    assert kept.input_grad_s == (20 + 110 + 0.5, 2 * 20 + 0.5, 0.5)
    assert kept.weight_grad_s == (200, 400, 0)
    assert kept.transfer_s == 7.0
    full = costs_of_stages(op_times, (1, 2, 0), keeps_input=True, split=True)
    assert full.forward_s == (1 + 2 + 0.5, 2 * 2 + 0.5, 0)  # no such program
    assert full.input_grad_s == (20 + 110 + 1 + 0.5, 2 * 20 + 0.5, 333 + 0.5)
    assert full.weight_grad_s == (200.5, 400.5, 0.5)
    alone = costs_of_stages(op_times, (1,), keeps_input=True)
    assert (alone.forward_s, alone.input_grad_s, alone.weight_grad_s) == (
        (0,),
        (20 + 110 + 1 + 333 + 0.5,),
        (200,),
    )


# --- bubbles ------------------------------------------------------------------------------------


@families
@remats
@pytest.mark.parametrize("hop_s", [0.0, 0.3])
def test_the_bubble_of_free_running_ranks_is_the_simulated_one(family, keeps_input, hop_s):
    op_times, schedule, sizes = some(family, hop_s=hop_s, overhead_s=3.0)
    costs = costs_of_stages(op_times, sizes, keeps_input=keeps_input)
    timeline = simulate(schedule, costs)
    time = step_time(op_times, schedule, None, costs, copies=2)
    assert time.pipeline_s == timeline.makespan_s
    assert time.total_s == timeline.makespan_s + 3.0
    assert time.bubble_fraction == pytest.approx(timeline.bubble_fraction, rel=1e-12)
    assert time.tasks_s == pytest.approx(2 * tasks_s(schedule, costs))


@pytest.mark.parametrize("family", ON_RING)
@remats
@pytest.mark.parametrize("hop_s", [0.0, 0.3])
def test_the_bubble_of_lockstep_is_the_ticks(family, keeps_input, hop_s):
    op_times, schedule, sizes = some(family, hop_s=hop_s)
    costs = costs_of_stages(op_times, sizes, keeps_input=keeps_input)
    table = lowered(schedule, costs, keeps_input)
    time = step_time(op_times, schedule, table.counted, costs, copies=1)
    assert time.pipeline_s == pytest.approx(table.makespan_s(costs), rel=1e-12)
    assert time.bubble_fraction == pytest.approx(table.bubble_fraction(costs), rel=1e-12)
    assert time.tasks_s == pytest.approx(tasks_s(schedule, costs))


@families
@pytest.mark.parametrize("is_lockstep", [False, True])
def test_shared_cores_that_are_never_idle_have_no_bubble(family, is_lockstep):
    op_times, schedule, sizes = some(family)
    costs = costs_of_stages(op_times, sizes, keeps_input=False)
    table = lowered(schedule, costs, keeps_input=False).counted if is_lockstep else None
    before = inf
    for capacity, copies in itertools.product((0.5, 1.0, 2.5, 4.0, inf), (1, 2)):
        time = step_time(
            replace(op_times, capacity=capacity * copies), schedule, table, costs, copies
        )
        assert 0 <= time.bubble_fraction < 1
        if capacity <= 1:
            assert time.bubble_fraction == pytest.approx(0, abs=1e-12)
            assert time.pipeline_s == pytest.approx(tasks_s(schedule, costs) / capacity)
        assert time.pipeline_s <= before * (
            1 + 1e-12
        )  # one copy for each capacity: the number does not matter
        before = time.pipeline_s
