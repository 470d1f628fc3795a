"""ZB-H1, ZB-H2 and interleaved ZB: the papers' closed forms.

p = ranks, m = microbatches, V = chunks a rank, c = seconds of a transfer; F, I, W = seconds of one
microbatch through 1/p of the model.
"""

import pytest
from support.all_families import COSTS, UNIT

from ppctl.schedule.costs import Costs
from ppctl.schedule.families.registry import build
from ppctl.schedule.simulator import simulate

FREE = [Costs(c.forward_s, c.input_grad_s, c.weight_grad_s) for c in COSTS]
SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (p, 2 * p, 4 * p)]


def work_s(costs):
    return costs.forward_s + costs.backward_s


def bubble_s(costs):
    """Of one hop: max(F+I-W, F, I)."""
    f, i, w = costs.forward_s, costs.input_grad_s, costs.weight_grad_s
    return max(f + i - w, f, i)


@pytest.mark.parametrize("costs", FREE, ids=str)
def test_zb_h1_and_interleaved_zb_have_the_published_bubble(costs):
    for p, m in SIZES:
        timeline = simulate(build("zb_h1", p, m), costs)
        assert timeline.makespan_s == pytest.approx(
            m * work_s(costs) + (p - 1) * bubble_s(costs)
        ), (p, m)
        assert (
            timeline.period_s == pytest.approx(timeline.makespan_s)
            or costs.forward_s > costs.input_grad_s
        )


@pytest.mark.parametrize("costs", FREE[:3], ids=str)
def test_interleaved_zb_divides_the_bubble_by_its_chunks(costs):
    for p, m in SIZES:
        for V in (1, 2, 4):
            timeline = simulate(build("interleaved_zb", p, m, num_chunks=V), costs)
            assert timeline.makespan_s == pytest.approx(
                m * work_s(costs) + (p - 1) * bubble_s(costs) / V
            ), (p, m, V)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_ranks_of_zb_h1_hold_p_activations_and_of_zb_h2_2p_less_1(p):
    for m in range(1, 4 * p):
        assert set(simulate(build("zb_h1", p, m), UNIT).peak_activations) == {min(m, p)}
        assert set(simulate(build("zb_h2", p, m), UNIT).peak_activations) == {min(m, 2 * p - 1)}
    for V in (1, 2, 4):
        assert set(
            simulate(build("interleaved_zb", p, 4 * p, num_chunks=V), UNIT).peak_activations
        ) == {p}


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_no_rank_of_zb_h2_idles_between_its_first_and_last_task(p):
    for m in (2 * p - 1, 2 * p, 5 * p):
        timeline = simulate(build("zb_h2", p, m), UNIT)
        assert timeline.period_s == 3 * m
        assert timeline.makespan_s == 3 * m + p - 1


@pytest.mark.parametrize(
    "costs", [UNIT, Costs(1, 1.05, 0.75), Costs(1, 1.2, 0.8), Costs(1, 1.2, 0.8, 0.1)], ids=str
)
def test_zb_h2_has_the_published_period(costs):
    f, i, w, c = costs.forward_s, costs.input_grad_s, costs.weight_grad_s, costs.transfer_s
    for p, m in ((4, 16), (8, 32)):
        hop_s = max(0, f + i - 2 * w, i - f) + 2 * c
        assert simulate(build("zb_h2", p, m), costs).period_s == pytest.approx(
            m * work_s(costs) + (p - 1) * hop_s
        )


@pytest.mark.parametrize(
    ("p", "m", "h1", "h2", "period", "interleaved"),
    [
        (2, 4, 13, 13, 12, 12.5),
        (4, 4, 15, 15, 15, 13.5),
        (4, 8, 27, 27, 24, 25.5),
        (8, 16, 55, 55, 48, 51.5),
        (16, 64, 207, 207, 192, 199.5),
    ],
)
def test_makespans_of_other_sizes_are_the_published_numbers(p, m, h1, h2, period, interleaved):
    assert simulate(build("zb_h1", p, m), UNIT).makespan_s == h1
    timeline = simulate(build("zb_h2", p, m), UNIT)
    assert (timeline.makespan_s, timeline.period_s) == (h2, period)
    assert simulate(build("interleaved_zb", p, m), UNIT).makespan_s == interleaved


def test_zb_h2_with_few_microbatches_is_no_slower_than_zb_h1():
    for p in (2, 4, 8):
        for m in range(1, 3 * p):
            h1, h2 = (simulate(build(family, p, m), UNIT) for family in ("zb_h1", "zb_h2"))
            assert h2.makespan_s <= h1.makespan_s
            assert h2.period_s <= h1.period_s
