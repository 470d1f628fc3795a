"""ZB-V, V-Half, V-Min and DualPipeV: two chunks a rank, down and back up."""

import pytest
from support.all_families import REAL, UNIT
from support.selection import full

from ppctl.schedule.costs import Costs
from ppctl.schedule.families.registry import build
from ppctl.schedule.families.stage_placement import v_shape, waves
from ppctl.schedule.simulator import simulate


@pytest.mark.parametrize("p", range(1, 9))
def test_a_v_goes_down_and_back_up(p):
    assert v_shape(p) == tuple(min(s, 2 * p - 1 - s) for s in range(2 * p))
    assert waves(p, 3) == v_shape(p) * 3
    for family in ("zb_v", "v_half", "v_min", "dualpipe_v"):
        assert build(family, p, 2 * p).rank_of == v_shape(p)


@pytest.mark.parametrize("p", [*range(1, 11), full(11), full(12)])
def test_zb_v_is_optimal_from_p_microbatches_on_and_has_no_bubble_from_2p_less_1(p):
    for m in range(1, 4 * p):
        timeline = simulate(build("zb_v", p, m), UNIT)
        assert max(timeline.peak_activations) == min(m, p)
        if m >= p:
            assert timeline.makespan_s == 3 * m + (p - 1) / 2
        if m >= 2 * p - 1:
            assert timeline.period_s == 3 * m


def test_the_period_of_zb_v_grows_with_the_difference_of_input_and_weight_gradients():
    for p, m in ((4, 16), (8, 32)):
        period_s = simulate(build("zb_v", p, m), Costs(1, 1.05, 0.75)).period_s
        assert period_s == pytest.approx(m * 2.8 + (p - 1) * 0.3)


@pytest.mark.parametrize("p", range(4, 17))
def test_v_half_and_v_min_have_the_published_bubble_and_memory(p):
    for m in (p, 2 * p, 3 * p + 1):
        half, least = (simulate(build(family, p, m), UNIT) for family in ("v_half", "v_min"))
        assert max(half.peak_activations) <= (p + 2) // 2
        assert max(least.peak_activations) <= (p + 4) // 3
        if p % 2 == 0:
            assert half.makespan_s == 3 * m + (3 * p - 7) / 2
        assert least.makespan_s <= 3 * m + 2 * p - (3.5 if p % 3 == 0 else 2.5)


@pytest.mark.parametrize("family", ["v_half", "v_min"])
def test_every_small_size_has_an_order_within_its_memory(family):
    cap = {"v_half": lambda p: (p + 2) // 2, "v_min": lambda p: (p + 4) // 3}[family]
    for p in range(1, 10):
        for m in range(1, 3 * p):
            assert max(simulate(build(family, p, m), UNIT).peak_activations) <= cap(p)


@pytest.mark.parametrize(
    ("p", "m", "zb_v", "half", "least"),
    [
        (2, 4, 12.5, 12.5, 13.5),
        (4, 4, 13.5, 17, 17.5),
        (4, 8, 25.5, 26.5, 29.5),
        (8, 16, 51.5, 56.5, 61.5),
        (16, 64, 199.5, 212.5, 221.5),
    ],
)
def test_makespans_of_other_sizes_are_at_most_the_published_numbers(p, m, zb_v, half, least):
    assert simulate(build("zb_v", p, m), UNIT).makespan_s == zb_v
    assert simulate(build("v_half", p, m), UNIT).makespan_s <= half
    assert simulate(build("v_min", p, m), UNIT).makespan_s <= least


@pytest.mark.parametrize("p", range(1, 9))
def test_dualpipe_v_holds_p_and_a_half_and_ends_when_zb_v_does(p):
    for m in (2 * p, 2 * p + 1, 5 * p):
        timeline = simulate(build("dualpipe_v", p, m), UNIT)
        assert max(timeline.peak_activations) == p + 0.5
        assert timeline.makespan_s == 3 * m + (p - 1) / 2
    for m in range(1, 2 * p):
        assert max(simulate(build("dualpipe_v", p, m), UNIT).peak_activations) <= min(m, p + 0.5)


def test_memory_orders_the_v_shaped_schedules_against_time():
    timelines = [simulate(build(family, 8, 32), REAL) for family in ("v_min", "v_half", "zb_v")]
    peaks = [max(timeline.peak_activations) for timeline in timelines]
    assert peaks == [4, 5, 8]
    spans = [timeline.makespan_s for timeline in timelines]
    assert spans == sorted(spans, reverse=True)
