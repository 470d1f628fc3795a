"""The parts of schedule=auto: orders as numbers, greedy runs, climbs, building blocks."""

from itertools import pairwise, product

import pytest
from support.all_families import COSTS, REAL, UNIT, cases, make
from support.selection import full
from support.sizes import random_programs

from ppctl.schedule.costs import Costs
from ppctl.schedule.execution_order import Jobs
from ppctl.schedule.families.building_blocks import (
    F_DOWN,
    F_UP,
    I_DOWN,
    I_UP,
    PERIOD,
    blocks,
    repeated,
    squeeze,
    steady_excess,
    v_jobs,
)
from ppctl.schedule.families.registry import build
from ppctl.schedule.ir import split_backward
from ppctl.schedule.placement_costs import Ledger, peak_activations
from ppctl.schedule.search.reordering import _Greedy, climb, fill
from ppctl.schedule.simulator import simulate
from ppctl.schedule.validation import validate

SCHEDULES = [
    *random_programs(),
    *(make(case) for case in cases((1, 2, 4), lambda p: sorted({2 * p, 3 * p}))),
]


def chunks(cap, schedule):
    return int(cap * schedule.num_chunks)


@pytest.mark.parametrize("costs", [UNIT, REAL])
def test_costs_of_a_search_equal_the_simulators(costs):
    for schedule in SCHEDULES:
        jobs, timeline = Jobs(schedule, costs), simulate(schedule, costs)
        run = jobs.run(jobs.first)
        assert dict(zip(jobs.tasks, run.start_s, strict=True)) == timeline.start_s
        assert dict(zip(jobs.tasks, run.end_s, strict=True)) == timeline.end_s
        assert run.makespan_s == timeline.makespan_s
        assert jobs.as_schedule(jobs.first, schedule.name) == schedule
        peaks = [chunks(peak, schedule) for peak in peak_activations(schedule)]
        for order, peak in zip(jobs.first, peaks, strict=True):
            assert jobs.fits(order, peak)
            assert not jobs.fits(order, peak - 1)


@pytest.mark.parametrize("costs", [UNIT, REAL])
def test_the_critical_path_of_a_run_goes_from_start_to_end_without_a_gap(costs):
    for schedule in SCHEDULES:
        jobs = Jobs(schedule, costs)
        run = jobs.run(jobs.first)
        path = run.critical_path()
        assert run.start_s[path[0]] == 0
        assert run.end_s[path[-1]] == run.makespan_s
        for before, task in pairwise(path):
            hop_s = run.start_s[task] - run.end_s[before]
            assert hop_s == pytest.approx(
                0 if jobs.rank[before] == jobs.rank[task] else costs.transfer_s, abs=1e-12
            )


def test_orders_with_a_cycle_of_waiting_ranks_cannot_run():
    jobs = Jobs(build("1f1b", 2, 2), UNIT)
    assert jobs.run([jobs.first[0], jobs.first[1][::-1]]) is None


def test_a_run_stops_at_its_limit():
    jobs = Jobs(build("1f1b", 2, 2), UNIT)
    assert jobs.run(jobs.first, limit_s=9) is None
    assert jobs.run(jobs.first, limit_s=9.001).makespan_s == 9


@pytest.mark.parametrize("costs", [full(UNIT), REAL])
@pytest.mark.parametrize(("patience", "last"), [*product((0, 0.5, 1), (False, True))])
def test_a_greedy_run_is_a_valid_schedule_within_the_cap(patience, last, costs):
    for schedule in SCHEDULES:
        jobs = Jobs(schedule, costs)
        cap = max(chunks(peak, schedule) for peak in peak_activations(schedule))
        orders = fill(jobs, jobs.first, cap, patience, weight_grads_last=last)
        assert orders is not None, "orders within the cap never get stuck"
        validate(jobs.as_schedule(orders, "greedy"))
        assert all(jobs.fits(order, cap) for order in orders)


@pytest.mark.parametrize(("patience", "last"), [(0, True), (0.5, False), (1, True)])
def test_no_rank_of_a_greedy_run_starts_a_task_later_than_it_could(patience, last):
    for schedule in SCHEDULES:
        jobs = Jobs(split_backward(schedule), REAL)
        cap = max(chunks(peak, schedule) for peak in peak_activations(schedule))
        greedy = _Greedy(jobs, jobs.first, cap, patience, last)
        run = jobs.run(greedy.ranks.run(greedy.choose))
        for makes, m, end_s in zip(jobs.makes, jobs.microbatch, run.end_s, strict=True):
            assert {greedy.ranks.written_s[base + m] for base in makes} == {end_s}


def test_a_greedy_run_brings_orders_under_a_smaller_cap_or_fails():
    for family, cap, can in (
        ("zb_h2", 4, True),
        ("zb_h1", 2, True),
        ("1f1b", 1, True),
        ("zb_v", 3, False),
    ):
        jobs = Jobs(split_backward(build(family, 4, 8)), REAL)
        orders = fill(jobs, jobs.first, chunks(cap, jobs.schedule))
        assert (orders is not None) == can
        if can:
            assert max(peak_activations(validate(jobs.as_schedule(orders, "greedy")))) <= cap


def test_a_greedy_run_of_1f1b_with_split_backwards_fills_its_bubbles_with_weight_gradients():
    jobs = Jobs(split_backward(build("1f1b", 8, 32)), UNIT)
    orders = fill(jobs, jobs.first, 8, weight_grads_last=True)
    assert jobs.run(orders).makespan_s == simulate(build("zb_h1", 8, 32), UNIT).makespan_s


@pytest.mark.parametrize("costs", COSTS, ids=str)
def test_a_climb_is_never_longer_and_stays_valid_and_within_the_cap(costs):
    for schedule in SCHEDULES[::5]:
        jobs = Jobs(schedule, costs)
        cap = max(chunks(peak, schedule) for peak in peak_activations(schedule))
        makespan_s, orders = climb(jobs, jobs.first, cap, 20_000)
        climbed = validate(jobs.as_schedule(orders, "climbed"))
        assert (
            makespan_s
            == simulate(climbed, costs).makespan_s
            <= simulate(schedule, costs).makespan_s
        )
        assert all(jobs.fits(order, cap) for order in orders)


def test_a_climb_beats_zb_v_where_input_and_weight_gradients_differ():
    jobs = Jobs(build("zb_v", 4, 8), REAL)
    makespan_s, _ = climb(jobs, jobs.first, 8, 1_000_000)
    assert jobs.run(jobs.first).makespan_s == pytest.approx(25.275)
    assert makespan_s < 25


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_a_building_block_can_repeat_every_six_ticks(p):
    found = list(blocks(p))
    assert len(set(found)) == len(found)
    for block in found:
        for row in block:
            assert row[F_DOWN] < row[F_UP] < row[I_UP] < row[I_DOWN]
            assert len({tick % PERIOD for tick in row}) == 4
        for above, below in pairwise(block):
            assert below[F_DOWN] > above[F_DOWN]
            assert below[I_UP] > above[I_UP]
            assert above[F_UP] == below[F_UP] + 1
            assert above[I_DOWN] == below[I_DOWN] + 1


def test_the_searched_blocks_include_the_papers():
    p = 8
    half = tuple((2 * r, 3 * p - 2 - r, 3 * p + 2 + 2 * r, 6 * p + 1 - r) for r in range(p))
    least = tuple((r, 2 * p - 1 - r, 2 * p + r, 4 * p - 1 - r) for r in range(p))
    found = {
        tuple(tuple(tick - block[0][0] for tick in row) for row in block) for block in blocks(p)
    }
    assert least in found
    assert any(block[:2] == half[:2] or block == half for block in found)
    assert steady_peak(least) < steady_peak(half) < p


def steady_peak(block):
    """The most activations that a rank holds in the steady state."""
    ledger = Ledger((0,) * len(block), (1,) * 2 * len(block))
    return steady_excess(block, ledger, 0) / 2


@pytest.mark.parametrize("costs", [UNIT, REAL])
def test_a_squeezed_block_is_a_valid_schedule_within_the_cap(costs):
    for block in list(blocks(4))[::7]:
        for cap in (4, 6, 8):
            if steady_peak(block) > cap / 2:
                continue
            jobs = v_jobs(4, 8, costs)
            orders = squeeze(jobs, repeated(block, 8), cap, 0.5)
            schedule = validate(jobs.as_schedule(orders, "block"))
            assert max(peak_activations(schedule)) <= cap / 2


def test_costs_of_each_stage_count():
    slow_last = Costs(forward_s=(1.0,) * 7 + (3.0,), input_grad_s=1.0, weight_grad_s=1.0)
    jobs = Jobs(build("zb_v", 4, 8), slow_last)
    assert jobs.run(jobs.first).makespan_s == simulate(build("zb_v", 4, 8), slow_last).makespan_s
