"""The closed forms against the simulator: equal wherever they claim to hold."""

import pytest
from support.all_families import COSTS, REAL, cases, make

from ppctl.schedule.costs import Costs
from ppctl.schedule.families.registry import FAMILIES
from ppctl.schedule.placement_costs import peak_activations
from ppctl.schedule.simulator import simulate

HOPS = [
    Costs(1, 1, 1, 0.1),
    Costs(1, 0.5, 0.5, 0.3),
    Costs(0.7, 0.4, 0.3, 0.21),
    Costs(1, 1, 1, 0.9),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_formula_equals_the_makespan_within_its_domain(family):
    told = 0
    for case in cases():
        name, p, m, knobs = case
        if name != family:
            continue
        schedule = make(case)
        for costs in (*COSTS, *HOPS):
            formula_s = FAMILIES[family].makespan_s(p, m, costs, **knobs)
            if formula_s is not None:
                told += 1
                assert formula_s == pytest.approx(
                    simulate(schedule, costs).makespan_s, rel=1e-12
                ), (case, costs)
    assert told


@pytest.mark.parametrize("family", FAMILIES)
def test_a_formula_equals_the_peak_within_its_domain(family):
    told = 0
    for case in cases():
        name, p, m, knobs = case
        if (
            name == family
            and (peak := FAMILIES[family].peak_activations(p, m, **knobs)) is not None
        ):
            told += 1
            assert peak == max(peak_activations(make(case))), case
    assert told


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_formulas_at_eight_ranks_and_32_microbatches(family):
    record = FAMILIES[family]
    knobs = record.knobs_for(2)
    assert any(record.makespan_s(8, 32, costs, **knobs) is not None for costs in COSTS)
    assert record.peak_activations(8, 32, **knobs) is not None


def test_latency_is_outside_most_formulas_and_costs_of_each_stage_outside_all():
    assert FAMILIES["zb_v"].makespan_s(8, 32, REAL) is None
    assert FAMILIES["gpipe"].makespan_s(8, 32, REAL) == pytest.approx(110.6)
    assert FAMILIES["gpipe"].makespan_s(2, 4, Costs(forward_s=(1.0, 2.0))) is None
