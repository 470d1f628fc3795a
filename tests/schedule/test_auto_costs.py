"""schedule=auto where stages differ and bytes are capped: replays, brute force, CP-SAT, every
published schedule.
"""

import random
from dataclasses import replace
from itertools import product

import pytest
from support.all_families import REAL, UNIT
from support.orders import orders_of

from ppctl.errors import ConfigError, ScheduleError
from ppctl.schedule.costs import FREE, Costs, OpTimes, PieceTimes
from ppctl.schedule.execution_order import Jobs
from ppctl.schedule.families.registry import build
from ppctl.schedule.families.stage_placement import loop
from ppctl.schedule.ir import Schedule
from ppctl.schedule.lower_bounds import bound_under_cap_s, makespan_bound_s
from ppctl.schedule.partition.partition import balanced, explicit, uniform
from ppctl.schedule.placement_costs import LayerBytes, LayerCosts, Ledger, Placed, peak_activations
from ppctl.schedule.search.auto_search import choose, published
from ppctl.schedule.simulator import simulate
from ppctl.schedule.validation import validate

LAYER, HEAD = PieceTimes(1.0, 1.1, 0.7), PieceTimes(4.0, 4.0, 4.0)
TIMES = OpTimes(FREE, LAYER, HEAD, hop_s=0.1)
BYTES = LayerBytes(layer=40, stash=9, pending=6, embed=50, head=70)


def model(num_layers=16, held=BYTES, times=TIMES, **how):
    head = times.head.all_s / times.layer.all_s
    divide = lambda rank_of: balanced(num_layers, rank_of, embed=0.0, head=head)
    return LayerCosts(None, times, divide, held, **how).on


def replayed_bytes(schedule, placed):
    """Return the peak of each rank, task by task: a second account of `Ledger`."""
    found = []
    for rank, tasks in enumerate(schedule.ranks):
        alive, most = {}, placed.fixed_bytes[rank]
        for stage, kind, m in tasks:
            if kind == "F":
                alive["stash", stage, m] = placed.costs.activation_bytes[stage]
            if kind == "I" and placed.pending_bytes is not None:
                alive["pending", stage, m] = placed.pending_bytes[stage]
            most = max(most, placed.fixed_bytes[rank] + sum(alive.values()))
            ends = kind == "B" or (kind == "W" and placed.pending_bytes is None)
            if ends or (kind == "I" and placed.pending_bytes is not None):
                del alive["stash", stage, m]
            if kind == "W" and placed.pending_bytes is not None:
                del alive["pending", stage, m]
        assert not alive
        found.append(most)
    return found


@pytest.mark.parametrize(
    ("p", "m", "limit", "pending"),
    [
        (2, 5, 520, 6),
        (3, 6, 420, 20),
        *(pytest.param(3, 6, 420, n, marks=pytest.mark.full) for n in (None, 6)),
    ],
)
def test_bytes_stay_within_the_limit_and_no_published_schedule_that_does_is_shorter(
    p, m, limit, pending
):
    costs_of = model(8, replace(BYTES, pending=pending))
    choice = choose(p, m, costs_of, limit_bytes=limit, max_chunks=2)
    best, placed = validate(choice.best.schedule), costs_of(choice.best.schedule.rank_of)
    assert max(replayed_bytes(best, placed)) == choice.held_bytes <= limit
    assert simulate(best, placed.costs).makespan_s == choice.best.length_s
    assert choice.lower_bound_s <= choice.best.length_s * (1 + 1e-12)
    for _, schedule in published(p, m, 2):
        there = costs_of(schedule.rank_of)
        if max(replayed_bytes(schedule, there)) <= limit:
            assert simulate(schedule, there.costs).makespan_s >= choice.best.length_s * (1 - 1e-12)


def test_every_number_of_stages_is_searched_and_the_head_counts_in_each():
    placements = set()

    def seen(rank_of):
        placements.add(len(rank_of))
        return model()(rank_of)

    choice = choose(4, 6, seen, 4, max_chunks=4)
    assert placements == {4, 8, 12, 16}
    assert choice.best.length_s < choice.best_published.length_s
    assert max(peak_activations(choice.best.schedule)) <= 4
    uneven = model()(choice.best.schedule.rank_of).costs
    assert simulate(choice.best.schedule, uneven).makespan_s == choice.best.length_s


@pytest.mark.parametrize("costs", [pytest.param(UNIT, marks=pytest.mark.full), REAL])
def test_a_function_that_returns_equal_stages_is_answered_like_numbers(costs):
    of_stages = lambda rank_of: Placed(
        replace(
            costs, **{k: (getattr(costs, k) * 3 / len(rank_of),) * len(rank_of) for k in SECONDS}
        )
    )
    plain, by_function = (choose(3, 6, each, 2, max_chunks=2) for each in (costs, of_stages))
    assert by_function.best.length_s == pytest.approx(plain.best.length_s, rel=1e-12)
    assert by_function.lower_bound_s == pytest.approx(plain.lower_bound_s, rel=1e-12)


SECONDS = ("forward_s", "input_grad_s", "weight_grad_s")


@pytest.mark.parametrize("cap", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_limit_of_bytes_on_equal_stages_is_the_cap_on_activations(cap):
    counted = choose(3, 6, REAL, cap, max_chunks=2)
    of_bytes = Placed(replace(REAL, activation_bytes=64.0), (100.0,) * 3).anywhere
    weighed = choose(3, 6, of_bytes, limit_bytes=100 + 64 * cap, max_chunks=2)
    assert weighed.best == counted.best
    assert weighed.lower_bound_s == counted.lower_bound_s
    assert weighed.held_bytes == 100 + 64 * max(peak_activations(counted.best.schedule))


UNEVEN = [
    Costs((1.0, 3.0), (1.0, 2.0), (1.0, 1.0)),
    Costs((2.0, 1.0), (0.5, 2.0), (1.0, 2.0), 0.25),
]


@pytest.mark.parametrize("costs", UNEVEN)
@pytest.mark.parametrize("room", [(3, 3), (7, 5)])
def test_under_a_limit_of_bytes_it_is_as_short_as_brute_force_and_the_bound_is_below(costs, room):
    m, stash, pending = 2, (2, 3), (3, 1)
    placed = Placed(replace(costs, activation_bytes=stash), (10, 10), pending)
    limit, caps = 10 + max(room), (m, m)
    ledger = Ledger((10, 10), stash, pending)
    jobs = Jobs(
        Schedule("any", tuple(orders_of(r, m, caps[r])[0] for r in range(2)), loop(2), m),
        costs,
        ledger,
    )
    number = {task: i for i, task in enumerate(jobs.tasks)}
    every = [[[number[t] for t in order] for order in orders_of(r, m, m)] for r in range(2)]
    within = [[order for order in orders if jobs.fits(order, limit)] for orders in every]
    assert all(len(few) <= len(all_) for few, all_ in zip(within, every, strict=True))
    runs = [jobs.run(list(orders)) for orders in product(*within)]
    split_s = [run.makespan_s for run in runs if run is not None]
    whole_s = [
        simulate(schedule, costs).makespan_s
        for _, schedule in published(2, m, 1)
        if not schedule.is_split and max(replayed_bytes(schedule, placed)) <= limit
    ]
    bound_s = bound_under_cap_s(jobs.schedule, costs, ledger, limit)
    assert all(bound_s <= length_s for length_s in split_s)
    shortest_s = min(split_s + whole_s, default=None)
    if shortest_s is None:
        with pytest.raises(ScheduleError, match="max_memory_gib"):
            choose(2, m, lambda rank_of: placed, limit_bytes=limit, max_chunks=1)
        return
    choice = choose(2, m, lambda rank_of: placed, limit_bytes=limit, max_chunks=1)
    assert choice.best.length_s == shortest_s


def test_bounds_hold_for_random_orders_of_unequal_stages_at_their_memory():
    rng = random.Random(0)
    for family, p, m in (
        ("1f1b", 3, 4),
        ("zb_v", 3, 5),
        ("interleaved_zb", 2, 4),
        ("dualpipe_v", 2, 4),
    ):
        schedule = build(family, p, m)
        numbers = lambda n=schedule.num_stages: tuple(rng.uniform(0, 2) for _ in range(n))
        for _ in range(20):
            costs = Costs(numbers(), numbers(), numbers(), rng.choice((0.0, 0.3)))
            sizes = [
                tuple(rng.randrange(1, 9) for _ in range(schedule.num_stages)) for _ in range(2)
            ]
            ledger = Ledger((3,) * p, sizes[0], rng.choice((None, sizes[1])))
            cap, timeline = max(ledger.peaks(schedule)), simulate(schedule, costs)
            bound_s = bound_under_cap_s(schedule, costs, ledger, cap)
            assert makespan_bound_s(schedule, costs) <= bound_s <= timeline.makespan_s * (1 + 1e-12)


def test_numbers_of_stages_that_the_partition_excludes_are_left_out_or_refused():
    layered = LayerCosts(None, TIMES, lambda rank_of: explicit(6, len(rank_of), [2, 1, 1, 2]))
    assert choose(4, 4, layered.on, 3).best.schedule.num_stages == 4
    with pytest.raises(ConfigError, match="num_layers=3 is less than the number of stages"):
        choose(4, 4, LayerCosts(None, TIMES, lambda rank_of: uniform(3, len(rank_of))).on, 3)


def test_too_little_memory_is_refused_with_the_least_need():
    gib = 2**30
    costs_of = model(
        8, LayerBytes(gib, stash=gib / 4, head=gib), OpTimes(FREE, PieceTimes(1.0, 1.0, 1.0), FREE)
    )
    with pytest.raises(
        ScheduleError, match=r"max_memory_gib=2: no schedule of 4 ranks.* holds least.* Use"
    ) as refused:
        choose(4, 4, costs_of, limit_bytes=2 * gib, max_chunks=2)
    enough = float(str(refused.value).rpartition("=")[2].partition(" ")[0])
    assert choose(4, 4, costs_of, limit_bytes=enough * gib, max_chunks=2).held_bytes <= enough * gib


def test_pieces_of_embedding_and_head_are_on_the_stages_that_run_them():
    layered = LayerCosts(
        (1.0, 2.0, 1.0),
        OpTimes(PieceTimes(0.5, 0.0, 0.0), PieceTimes(1.0, 2.0, 3.0), PieceTimes(9.0, 1.0, 0.0)),
        lambda rank_of: (range(1), range(1, 3)),
        LayerBytes(layer=10, stash=4, pending=5, embed=1, head=2, rank=100),
    )
    placed = layered.on((0, 1))
    assert (placed.costs.forward_s, placed.costs.input_grad_s) == ((1.5, 13.0), (2.0, 6.0))
    assert placed.costs.weight_grad_s == (3.0, 9.0)
    assert (placed.fixed_bytes, placed.costs.activation_bytes, placed.pending_bytes) == (
        (111, 122),
        (4, 8),
        (5, 10),
    )
    assert replace(layered, keeps_input=True).on((0, 1)).costs.forward_s == (1.5, 0.0)
