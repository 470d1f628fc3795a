"""No schedule beats its lower bound, and the optimal ones meet it."""

import pytest
from support.all_families import COSTS, FUSED, REAL, UNIT, cases, make
from support.selection import full

from ppctl.schedule.costs import Costs
from ppctl.schedule.families.registry import FAMILIES, build
from ppctl.schedule.lower_bounds import makespan_bound_s, peak_activations_bound, period_bound_s
from ppctl.schedule.simulator import simulate


def whole_makespan_bound_s(p, m, num_chunks, costs):
    """With whole backwards and equal stages: m(F+B) + (p-1)((F+B)/V + 2c)."""
    work_s = costs.seconds("F", 0, 1) + costs.backward_s
    return m * work_s + (p - 1) * (work_s / num_chunks + 2 * costs.transfer_s)


def split_makespan_bound_s(p, m, num_chunks, costs):
    """With split backwards: m(F+I+W) + (p-1)(F/V + c). A rank may end with weight gradients."""
    forward_s = costs.seconds("F", 0, 1)
    hops_s = (p - 1) * (forward_s / num_chunks + costs.transfer_s)
    return m * (forward_s + costs.backward_s) + hops_s


@pytest.mark.parametrize("ranks", [(1, 2, 3, 4), full(((8,),))], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_schedule_beats_its_bounds(family, ranks):
    for case in cases(ranks):
        if case[0] != family:
            continue
        schedule = make(case)
        p, m, V = schedule.num_ranks, schedule.num_microbatches, schedule.num_chunks
        for costs in COSTS:
            timeline = simulate(schedule, costs)
            assert timeline.makespan_s >= makespan_bound_s(schedule, costs) - 1e-9, (case, costs)
            assert timeline.period_s >= period_bound_s(schedule, costs) - 1e-9, (case, costs)
            is_split = FAMILIES[family].is_split
            bound = split_makespan_bound_s if is_split else whole_makespan_bound_s
            assert timeline.makespan_s >= bound(p, m, V, costs) - 1e-9, (case, costs)
            least = peak_activations_bound(schedule, costs, timeline.period_s)
            for peak, bound in zip(timeline.peak_activations, least, strict=True):
                assert peak >= bound - 1e-9, (case, costs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_short_schedule_bounds_a_longer_one_of_its_family(family):
    for p in (1, 2, 3, 8):
        short = build(family, p, 2 * p)
        for m in (2 * p, 5 * p, 16 * p):
            long = build(family, p, m)
            for costs in COSTS:
                bound_s = makespan_bound_s(short, costs, m)
                assert bound_s == pytest.approx(makespan_bound_s(long, costs), rel=1e-12), (
                    p,
                    m,
                    costs,
                )


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 32)])
def test_optimal_schedules_meet_their_bound(p, m):
    for family in ("gpipe", "1f1b", "eager_1f1b", "interleaved", "looped_bfs"):
        schedule = build(family, p, m)
        assert simulate(schedule, FUSED).makespan_s == makespan_bound_s(schedule, FUSED)
        assert makespan_bound_s(schedule, FUSED) == whole_makespan_bound_s(
            p, m, schedule.num_chunks, FUSED
        )
    for family in ("zb_h2", "zb_v", "interleaved_zb", "dualpipe_v"):
        schedule = build(family, p, m)
        assert simulate(schedule, UNIT).makespan_s == makespan_bound_s(schedule, UNIT)
        assert makespan_bound_s(schedule, UNIT) == split_makespan_bound_s(
            p, m, schedule.num_chunks, UNIT
        )


def test_the_bounds_are_the_published_numbers():
    assert (split_makespan_bound_s(8, 32, 1, UNIT), split_makespan_bound_s(8, 32, 2, UNIT)) == (
        103,
        99.5,
    )
    assert (whole_makespan_bound_s(8, 32, 1, UNIT), whole_makespan_bound_s(8, 32, 2, UNIT)) == (
        117,
        106.5,
    )
    assert split_makespan_bound_s(8, 32, 1, REAL) == pytest.approx(97.3)
    assert split_makespan_bound_s(8, 32, 2, REAL) == pytest.approx(93.8, abs=0.051)
    assert period_bound_s(build("zb_v", 8, 32), REAL) == pytest.approx(89.6)


def test_without_bubble_a_v_holds_a_third_of_p_and_a_loop_two_thirds():
    p, m = 30, 300
    v, loop = build("v_min", p, m), build("zb_h1", p, m)
    assert max(peak_activations_bound(v, UNIT, 3 * m)) == pytest.approx((2 * p + 2) / 6)
    assert max(peak_activations_bound(loop, UNIT, 3 * m)) == pytest.approx((2 * p + 1) / 3)


def test_bounds_hold_for_stages_of_unequal_cost():
    times = Costs((1.0, 2.0, 0.5, 3.0), (1.0, 2.5, 0.5, 3.0), (1.0, 1.5, 0.5, 2.0), 0.25)
    for family in FAMILIES:
        V = build(family, 2, 4).num_chunks
        if V == 2:
            schedule = build(family, 2, 4)
            assert simulate(schedule, times).makespan_s >= makespan_bound_s(schedule, times)
            assert simulate(schedule, times).period_s >= period_bound_s(schedule, times)
