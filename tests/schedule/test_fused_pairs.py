"""Neighbours that run as one: independent, and no longer than allowed by a walk over all paths."""

from collections import Counter
from functools import cache
from itertools import pairwise

import pytest
from support.selection import full_except

from ppctl.schedule.costs import Costs, task_costs
from ppctl.schedule.families.registry import FAMILIES, build
from ppctl.schedule.fused_pairs import MOST_LONGER, fused_order
from ppctl.schedule.ir import writes
from ppctl.schedule.scheduled_step import ScheduledStep


def makespan_s(schedule, costs, order):
    """The longest path through groups of tasks that start and end together."""
    group_of = {task: group for group in order for task in group}
    writer = {value: task for task in group_of for value in writes(task)}
    before = {group: set() for group in order}
    for rank in schedule.ranks:
        for a, b in pairwise(rank):
            before[group_of[b]] |= {group_of[a]} - {group_of[b]}
    for task, group in group_of.items():
        before[group] |= {group_of[writer[value]] for value in schedule.reads(task)}
    assert not any(group in others for group, others in before.items())  # none waits for itself

    @cache
    def end_s(group):
        work_s = sum(costs.seconds(t.kind, t.stage, schedule.num_chunks) for t in group)
        return work_s + max(map(end_s, before[group]), default=0.0)

    for group in order:  # each after its inputs, so that recursion is never deep
        end_s(group)
    return max(map(end_s, order))


def schedule_of(name, num_ranks, num_microbatches):
    return build(name, num_ranks, num_microbatches, **FAMILIES[name].knobs_for(2))


@pytest.mark.parametrize("name", full_except([*FAMILIES], "dualpipe_v", "eager_1f1b", "zb_v"))
@pytest.mark.parametrize("remat", ["none", "layer"])
def test_pairs_are_neighbours_and_the_step_is_hardly_longer(name, remat):
    costs = task_costs(remat)
    for num_ranks, num_microbatches in ((2, 8), (4, 16), (3, 9)):
        schedule = schedule_of(name, num_ranks, num_microbatches)
        order = fused_order(schedule, costs)
        assert Counter(t for group in order for t in group) == Counter(sum(schedule.ranks, ()))
        neighbours = {pair for rank in schedule.ranks for pair in pairwise(rank)}
        pairs = [group for group in order if len(group) > 1]
        assert set(pairs) <= neighbours
        assert {frozenset(task.kind for task in pair) for pair in pairs} <= {
            frozenset("FB"),
            frozenset("FI"),
        }
        alone = [(task,) for group in order for task in group]
        longest_s = MOST_LONGER * makespan_s(schedule, costs, alone)
        assert makespan_s(schedule, costs, order) <= longest_s * (1 + 1e-12)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("gpipe", 0), ("1f1b", 1), ("eager_1f1b", 48), ("interleaved", 96), ("dualpipe_v", 82)],
)
def test_the_steady_states_of_these_are_pairs(name, expected):
    schedule = schedule_of(name, 4, 16)
    step = ScheduledStep(schedule, Costs(), fuses=True)
    assert step.num_fused == expected
    assert ScheduledStep(schedule, Costs()).num_fused == 0
