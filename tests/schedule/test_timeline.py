"""Timelines: waiting, held activations over time, bytes, costs of each stage, bandwidth."""

from itertools import pairwise

import pytest
from support.all_families import COSTS, UNIT, cases, make

from ppctl.errors import ConfigError
from ppctl.schedule.costs import Costs
from ppctl.schedule.execution_order import Rule
from ppctl.schedule.families.registry import FAMILIES, build
from ppctl.schedule.ir import KINDS, Task, reads, writes
from ppctl.schedule.simulator import simulate

SMALL = cases(ranks=(1, 3, 4), microbatches=lambda p: (1, p, 2 * p + 1, 3 * p))


def critical_path(timeline):
    """A chain of tasks from 0 to the makespan, each waiting for the one before it."""
    path = [max(timeline.end_s, key=timeline.end_s.__getitem__)]
    while (before := timeline.waits_for(path[0])) is not None:
        path.insert(0, before)
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_the_critical_path_has_no_gap_from_0_to_the_makespan(family):
    for case in SMALL:
        if case[0] != family:
            continue
        for costs in (UNIT, Costs(1, 1.05, 0.75, 0.1)):
            schedule = make(case)
            timeline = simulate(schedule, costs)
            path = critical_path(timeline)
            assert timeline.start_s[path[0]] == 0
            assert timeline.end_s[path[-1]] == timeline.makespan_s
            for before, task in pairwise(path):
                gap_s = timeline.start_s[task] - timeline.end_s[before]
                crosses = schedule.rank_of[before.stage] != schedule.rank_of[task.stage]
                assert gap_s == pytest.approx(costs.transfer_s if crosses else 0, abs=1e-9)
                assert timeline.waits_for(task) == before
            assert timeline.waits_for(path[0]) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_memory_curves_peak_at_the_peaks_and_end_at_zero(family):
    for case in SMALL:
        if case[0] != family:
            continue
        timeline = simulate(make(case), UNIT)
        for rank, peak in enumerate(timeline.peak_activations):
            curve = timeline.memory_curve(rank)
            assert max(held for _, held in curve) == peak
            assert curve[-1][1] == 0
            assert [at for at, _ in curve] == sorted(at for at, _ in curve)


def test_bubble_fractions_are_the_idle_shares_of_the_makespan():
    timeline = simulate(build("zb_h2", 4, 8), Costs((1, 2, 1, 1), 1, (1, 1, 1, 3)))
    for rank, fraction in enumerate(timeline.bubble_fractions):
        busy_s = sum(
            timeline.end_s[task] - timeline.start_s[task] for task in timeline.schedule.ranks[rank]
        )
        assert fraction == pytest.approx(1 - busy_s / timeline.makespan_s)
    assert timeline.bubble_fraction == pytest.approx(sum(timeline.bubble_fractions) / 4)


def test_bytes_are_activations_times_their_size():
    schedule = build("interleaved", 4, 8)
    timeline = simulate(schedule, Costs(activation_bytes=1000.0))
    assert timeline.peak_bytes == tuple(1000 * peak for peak in timeline.peak_activations)
    of_each = simulate(schedule, Costs(activation_bytes=(500.0,) * 8))
    assert of_each.peak_bytes == timeline.peak_bytes
    heavy_head = simulate(schedule, Costs(activation_bytes=(0.0,) * 7 + (10.0,)))
    assert heavy_head.peak_bytes[:3] == (0, 0, 0)
    assert heavy_head.peak_bytes[3] > 0


def test_costs_of_each_stage_are_seconds_of_that_stage():
    costs = Costs((1.0, 2.0), 3.0, (4.0, 5.0))
    assert [costs.seconds(kind, 1, 2) for kind in "FIWB"] == [2.0, 1.5, 5.0, 6.5]
    even = Costs((0.5,) * 8, (0.5,) * 8, (0.5,) * 8)
    for family in ("interleaved", "zb_v", "hanayo"):
        schedule = build(family, 4, 8)
        assert simulate(schedule, even).end_s == simulate(schedule, UNIT).end_s


def test_a_slow_stage_stretches_every_schedule():
    for family in ("gpipe", "1f1b", "zb_h1"):
        schedule = build(family, 4, 16)
        slow = simulate(schedule, Costs((1.0, 1.0, 1.0, 2.0)))
        assert slow.makespan_s > simulate(schedule, UNIT).makespan_s
        assert slow.makespan_s >= 16 * 4


def test_costs_that_cannot_be_are_refused():
    with pytest.raises(ConfigError) as error:
        simulate(build("1f1b", 4, 4), Costs(forward_s=(1.0, 2.0)))
    assert str(error.value) == (
        "forward_s has 2 entries for 4 stages. Give one for each stage, or a number for 1/p of "
        "the model."
    )
    with pytest.raises(ConfigError, match=r"^forward_s=-1\.0 is not a time"):
        Costs(forward_s=(1.0, -1.0))
    with pytest.raises(ConfigError, match=r"^activation_bytes=-1 is not a size"):
        Costs(activation_bytes=-1)


def test_the_rule_in_integers_is_the_rule():
    schedule = build("zb_v", 3, 5)
    rule, num_stages = Rule.of(schedule), schedule.num_stages
    for stage in range(num_stages):
        for kind in KINDS:
            for m in range(5):
                task = Task(stage, kind, m)
                assert all(
                    value.microbatch == m for value in (*reads(task, num_stages), *writes(task))
                )
                assert [base for base, _ in rule.reads[stage, kind]] == [
                    rule.base[value.name, value.stage] for value in reads(task, num_stages)
                ]
                assert list(rule.writes[stage, kind]) == [
                    rule.base[value.name, value.stage] for value in writes(task)
                ]


def test_costs_scale_every_time():
    for case in SMALL[::5]:
        schedule = make(case)
        for costs in COSTS:
            times = (costs.forward_s, costs.input_grad_s, costs.weight_grad_s, costs.transfer_s)
            twice = simulate(schedule, Costs(*(2 * seconds for seconds in times)))
            assert twice.makespan_s == pytest.approx(2 * simulate(schedule, costs).makespan_s)
