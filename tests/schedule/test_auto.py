"""schedule=auto: against brute force where that is possible, against every published schedule
elsewhere.
"""

from itertools import product

import pytest
from support.all_families import COSTS, FUSED, REAL, UNIT
from support.orders import orders_of
from support.selection import full

from ppctl.errors import ScheduleError
from ppctl.schedule.costs import Costs
from ppctl.schedule.execution_order import Jobs
from ppctl.schedule.families.stage_placement import loop
from ppctl.schedule.ir import Schedule
from ppctl.schedule.placement_costs import peak_activations
from ppctl.schedule.search.auto_search import choose, published
from ppctl.schedule.simulator import simulate
from ppctl.schedule.tick_lowering import ticks
from ppctl.schedule.tick_table import why_not
from ppctl.schedule.validation import validate

SIZES = [(2, 4, 1.5), (3, 5, 2), (4, 4, 3)]  # ranks, microbatches, cap
PAIRS = [Costs(1, 1, 1), REAL, Costs(1, 0.5, 2, 0.3), Costs(2, 1, 0.25)]


@pytest.mark.parametrize("costs", PAIRS, ids=str)
@pytest.mark.parametrize(("p", "m", "cap"), [(2, 2, 1), (2, 2, 2), (3, 2, 1), (3, 2, 2)])
def test_one_chunk_a_rank_is_as_short_as_brute_force(p, m, cap, costs):
    jobs = Jobs(
        Schedule("any", tuple(orders_of(r, m, cap)[0] for r in range(p)), loop(p), m), costs
    )
    number = {task: i for i, task in enumerate(jobs.tasks)}
    every = [[[number[task] for task in order] for order in orders_of(r, m, cap)] for r in range(p)]
    shortest_s = float("inf")
    for orders in product(*every):
        run = jobs.run(list(orders), shortest_s)
        if run is not None:
            shortest_s = run.makespan_s
    assert choose(p, m, costs, cap, max_chunks=1).best.length_s == pytest.approx(
        shortest_s, rel=1e-12
    )


CASES = [(*size, costs) for costs in COSTS for size in SIZES]


@pytest.mark.parametrize(
    ("p", "m", "cap", "costs"), [each if i % 2 else full(each) for i, each in enumerate(CASES)]
)
def test_auto_is_valid_within_the_cap_and_never_worse_than_a_published_schedule(p, m, cap, costs):
    choice = choose(p, m, costs, cap, max_chunks=2)
    best = choice.best
    validate(best.schedule)
    assert max(peak_activations(best.schedule)) <= cap
    assert (
        simulate(best.schedule, costs).makespan_s == best.length_s == choice.candidates[0].length_s
    )
    assert best.length_s >= choice.lower_bound_s * (1 - 1e-12)
    fit = [schedule for _, schedule in published(p, m, 2) if max(peak_activations(schedule)) <= cap]
    shortest_s = min(
        (simulate(schedule, costs).makespan_s for schedule in fit), default=float("inf")
    )
    assert best.length_s <= shortest_s
    assert choice.best_published is None or choice.best_published.length_s == pytest.approx(
        shortest_s
    )
    makespans = [candidate.length_s for candidate in choice.candidates[:-1]]
    assert makespans == sorted(makespans)


def test_auto_finds_the_same_schedule_every_time():
    assert choose(3, 4, REAL, 2).best == choose(3, 4, REAL, 2).best


def test_eight_ranks_32_microbatches_at_unit_costs_are_answered_by_interleaved_zb_and_proven():
    choice = choose(8, 32, UNIT, 8)
    assert (choice.best.length_s, choice.is_proven, choice.best.is_published) == (97.75, True, True)
    assert choice.best.label == "interleaved_zb (num_chunks=4)"
    assert choice.lower_bound_s == 3 * 32 + 7 / 4  # m(F+I+W) + (p-1)F/V
    assert choose(8, 32, UNIT) == choice  # the default cap is what 1F1B holds


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(("cap", "most_s"), [(4, 124.1), (5, 104.2), (6, 101.3), (8, 96.2)])
def test_real_costs_are_answered_better_than_by_the_enumeration_of_the_paper(cap, most_s):
    choice = choose(8, 32, REAL, cap)
    assert choice.best.length_s <= most_s
    assert max(peak_activations(choice.best.schedule)) <= cap


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(("cap", "most_s"), [(4, 107.5), (5, 104.5), (6, 101.5), (7, 100.5)])
def test_every_cap_between_v_min_and_zb_v_has_its_schedule(cap, most_s):
    assert choose(8, 32, UNIT, cap, max_chunks=2).best.length_s <= most_s


def test_costs_of_each_stage_choose_among_schedules_of_as_many_stages():
    costs = Costs(forward_s=(0.5,) * 7 + (1.5,), input_grad_s=(0.5,) * 8, weight_grad_s=(0.5,) * 8)
    choice = choose(4, 8, costs, 4)
    assert choice.best.schedule.num_stages == 8
    assert choice.best.length_s <= min(c.length_s for c in choice.candidates if c.is_published)


def test_costs_of_each_stage_without_a_v_leave_the_blocks_out_and_without_any_schedule_are_refused():
    choice = choose(4, 8, Costs(forward_s=(1.0, 1.0, 1.0, 2.0)), 3)
    assert (choice.best.schedule.num_stages, choice.num_blocks) == (4, (0, 0))
    with pytest.raises(
        ScheduleError,
        match=r"no schedule of 4 ranks .* has as many stages as .* 4, 8, \.\.\. stages",
    ):
        choose(4, 8, Costs(forward_s=(1.0,) * 5))


def test_auto_on_one_rank_has_no_bubble():
    choice = choose(1, 3, UNIT)
    assert (choice.best.length_s, choice.is_proven) == (9, True)


def test_a_cap_below_every_schedule_is_refused_with_the_least_that_helps():
    least, label = min((max(peak_activations(each)), label) for label, each in published(4, 8, 4))
    fault = rf"max_activations=0.2: no schedule .* \({label} holds least, {least:g}\)"
    with pytest.raises(ScheduleError, match=fault):
        choose(4, 8, UNIT, 0.2)


def test_sizes_too_large_to_search_are_refused():
    with pytest.raises(
        ScheduleError, match=r"3\*512\*512 = 786,432 tasks .* Choose one of `ppctl schedule list`"
    ):
        choose(512, 512, UNIT)


def test_auto_for_lockstep_chooses_the_shortest_in_lockstep():
    in_lockstep = lambda schedule: ticks(schedule, FUSED).makespan_s(FUSED)
    choice = choose(4, 8, FUSED, 7, max_chunks=2, makespan_s=in_lockstep)
    assert choice.best.is_published
    assert choice.best.length_s == in_lockstep(choice.best.schedule)
    for _, schedule in published(4, 8, 2):
        if why_not(schedule) is None and max(peak_activations(schedule)) <= 7:
            assert in_lockstep(schedule) >= choice.best.length_s
