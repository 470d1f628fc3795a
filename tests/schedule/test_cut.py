"""Partitions by cost: as good as the best of all, under the limit of every rank, and improved by
simulation.
"""

import itertools
import random

import pytest
from support.selection import full

from ppctl.errors import ConfigError
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.registry import build
from ppctl.schedule.families.stage_placement import loop, v_shape, waves
from ppctl.schedule.partition.coupled_search import CoupledSearch
from ppctl.schedule.partition.cut_layers import cut, divided, improved
from ppctl.schedule.partition.partition import balanced, uniform
from ppctl.schedule.partition.partition_costs import (
    Layers,
    Memory,
    Work,
    bounds_of,
    fitting,
    partition_of,
)
from ppctl.schedule.simulator import simulate


def partitions(num_layers, num_stages):
    """All contiguous ones that a model can have."""
    for cuts in itertools.combinations_with_replacement(range(num_layers + 1), num_stages - 1):
        found = [range(low, high) for low, high in itertools.pairwise((0, *cuts, num_layers))]
        if all(found[1:-1]):
            yield tuple(found)


def stage_s(layers, partition):
    """Seconds of each stage, written out."""
    costs = [sum(layers.layer_s[l] for l in stage) for stage in partition]
    costs[0] += layers.embed_s
    costs[-1] += layers.head_s
    return costs


def rank_bytes(layers, partition, rank_of, memory):
    """Bytes of each rank, written out."""
    held = [0] * len(memory.limit_bytes)
    held[rank_of[0]] += layers.embed_bytes
    held[rank_of[-1]] += layers.head_bytes
    for rank, stage, in_flight in zip(rank_of, partition, memory.in_flight, strict=True):
        held[rank] += sum(
            layers.layer_bytes[l] + in_flight * layers.activation_bytes[l] for l in stage
        )
    return held


def all_fit(layers, partition, rank_of, memory):
    held = rank_bytes(layers, partition, rank_of, memory)
    return all(size <= limit for size, limit in zip(held, memory.limit_bytes, strict=True))


def some_layers(choose, num_layers):
    """Layers of unequal costs; whole numbers, so that sums are exact."""

    def numbers(low, high):
        return tuple(choose.randint(low, high) for _ in range(num_layers))

    ends = [choose.choice((0, 0, 1, 3, 9)) for _ in range(4)]
    return Layers(numbers(1, 9), numbers(0, 9), numbers(0, 4), *ends)


def some_memory(choose, layers, rank_of):
    """Limits around what equal ranks would hold."""
    num_ranks = max(rank_of) + 1
    total = sum(layers.layer_bytes) + 2 * sum(layers.activation_bytes)
    limits = tuple(3 + int(total / num_ranks * choose.uniform(0.7, 1.8)) for _ in range(num_ranks))
    return Memory(limits, tuple(choose.randint(1, 4) for _ in rank_of))


PLACEMENTS = [
    loop(1),
    loop(2),
    loop(3),
    loop(4),
    loop(1, 2),
    loop(2, 2),
    loop(3, 2),
    loop(2, 3),
    v_shape(2),
    v_shape(3),
    waves(2, 2),
]


@pytest.mark.parametrize("rank_of", [pytest.param(each) for each in PLACEMENTS], ids=str)
def test_cut_is_the_best_of_all_that_fit_and_is_found_whenever_one_fits(rank_of):
    choose, num_found, num_coupled = random.Random(str(rank_of)), 0, 0
    for _ in range(80):
        layers = some_layers(choose, choose.randint(max(1, len(rank_of) - 2), 8))
        memory = some_memory(choose, layers, rank_of)
        everything = list(partitions(layers.num_layers, len(rank_of)))
        fit = [partition for partition in everything if all_fit(layers, partition, rank_of, memory)]
        if not fit:
            with pytest.raises(ConfigError, match=r"bytes .* but its limit is"):
                cut(layers, rank_of, memory)
            continue
        found = cut(layers, rank_of, memory)
        best = min(max(stage_s(layers, partition)) for partition in fit)
        assert found in fit
        assert max(stage_s(layers, found)) == best
        num_found += 1
        num_coupled += best > min(max(stage_s(layers, partition)) for partition in everything)
    assert num_found >= 15
    assert num_coupled >= 2 or max(rank_of) == 0  # the limit has a step_s


@pytest.mark.parametrize("rank_of", PLACEMENTS, ids=str)
def test_without_a_limit_cut_is_the_best_of_all_and_stages_of_ranks_their_own_are_as_equal_as_possible(
    rank_of,
):
    choose = random.Random(1)
    for _ in range(40):
        layers = some_layers(choose, choose.randint(max(1, len(rank_of) - 2), 8))
        found = stage_s(layers, cut(layers, rank_of))
        every = [
            stage_s(layers, partition) for partition in partitions(layers.num_layers, len(rank_of))
        ]
        best = min(map(max, every))
        assert max(found) == best
        if len(set(rank_of)) == len(rank_of):
            assert sum(c * c for c in found) == min(
                sum(c * c for c in e) for e in every if max(e) == best
            )


def test_equal_layers_are_cut_as_balanced_does():
    for num_layers, num_ranks, head in itertools.product(
        (8, 11, 16), (2, 3, 5, 8), (0.0, 0.5, 2.0, 3.0)
    ):
        layers = Layers((1.0,) * num_layers, head_s=head)
        expected = balanced(num_layers, loop(num_ranks), embed=0.0, head=head)
        assert cut(layers, loop(num_ranks)) == expected


def test_many_layers_take_few_states():
    choose, num_layers, num_stages = random.Random(2), 512, 64
    work = Work(
        Layers(tuple(choose.uniform(1, 3) for _ in range(num_layers)), head_s=7.0),
        loop(num_stages),
        None,
    )
    bounds, num_states = divided(work)
    assert (
        num_states < 500_000
    )  # L*L/2 * ln(S) = 545,111; every (stage, start, end) would be 8.4 million
    assert divided(work, cap=work.max_s(bounds))[1] < 500_000


@pytest.mark.parametrize(
    "rank_of",
    [
        loop(4, 2),
        v_shape(16),
        waves(4, 2),
        *(full((each,)) for each in (loop(16, 2), loop(8, 2), loop(8, 4))),
    ],
    ids=len,
)
def test_a_limit_three_percent_above_what_is_needed_is_met_in_few_states(rank_of):
    """Twin layers, every second with 4 times the bytes, more in flight on the first ranks."""
    num_ranks, num_layers = max(rank_of) + 1, 3 * len(rank_of)
    layers = Layers(
        tuple(1.0 + 0.03 * (l * 7 % 5) for l in range(num_layers)),
        tuple(10 + 30 * (l % 2) for l in range(num_layers)),
        (2,) * num_layers,
        head_s=4.0,
        head_bytes=60,
    )
    in_flight = tuple(2 * num_ranks - rank for rank in rank_of)
    even = uniform(num_layers, len(rank_of))
    needed = rank_bytes(layers, even, rank_of, Memory((0,) * num_ranks, in_flight))
    memory = Memory((int(1.03 * max(needed)),) * num_ranks, in_flight)
    work = Work(layers, rank_of, memory)
    search = CoupledSearch(work, max(stage_s(layers, even)))
    assert search.num_states < 2_000
    assert all_fit(layers, partition_of(search.found), rank_of, memory)
    assert all_fit(layers, cut(layers, rank_of, memory), rank_of, memory)


def test_a_search_past_its_states_proves_nothing_and_the_error_says_so(monkeypatch):
    layers = Layers((1.0,) * 8, (7, 7, 1, 5, 9, 8, 7, 5))
    rank_of, memory = (
        loop(2, 2),
        Memory((25,) * 2, (1,) * 4),
    )  # for 49 bytes: 7 + 9 + 8, 7 + 1 + 5 + 7 + 5
    assert [len(stage) for stage in cut(layers, rank_of, memory)] == [1, 3, 2, 2]
    assert CoupledSearch(Work(layers, rank_of, memory)).is_proof
    monkeypatch.setattr("ppctl.schedule.partition.coupled_search.MAX_STATES", 3)
    monkeypatch.setattr("ppctl.schedule.partition.coupled_search.MAX_REPAIRS", 1)
    assert not CoupledSearch(Work(layers, rank_of, memory)).is_proof
    with pytest.raises(
        ConfigError,
        match=r"^Among those searched, no partition of 8 layers fits: rank \d needs 2[67] ",
    ):
        cut(layers, rank_of, memory)


@pytest.mark.parametrize("rank_of", [loop(3, 2), loop(2, 3), v_shape(3), waves(2, 2)], ids=str)
@pytest.mark.parametrize("tries_only", [False, True])
def test_a_search_finds_a_partition_under_any_cap_exactly_where_there_is_one(
    rank_of, tries_only, monkeypatch
):
    """Limits that hold what is there and hardly more, with and without what spares most searches
    the trying.
    """
    if tries_only:
        monkeypatch.setattr("ppctl.schedule.partition.coupled_search.ROUNDS", 1)
        monkeypatch.setattr("ppctl.schedule.partition.coupled_search.MAX_REPAIRS", 1)
    choose, num_found, num_tried = random.Random(3), 0, 0
    for _ in range(60):
        layers = some_layers(choose, 8)
        memory = some_memory(choose, layers, rank_of)
        everything = list(partitions(8, len(rank_of)))
        by_excess = sorted(
            everything,
            key=lambda p: max(
                a - b
                for a, b in zip(
                    rank_bytes(layers, p, rank_of, memory), memory.limit_bytes, strict=True
                )
            ),
        )
        held = rank_bytes(layers, by_excess[choose.randint(0, 2)], rank_of, memory)
        memory = Memory(
            tuple(size - choose.choice((0, 0, 0, 1)) for size in held), memory.in_flight
        )
        fit = [max(stage_s(layers, p)) for p in everything if all_fit(layers, p, rank_of, memory)]
        for cap in (min(fit, default=9.0), min(fit, default=9.0) - 1, 1e9):
            search = CoupledSearch(Work(layers, rank_of, memory), cap)
            assert (search.found is not None) == any(cost <= cap for cost in fit)
            assert search.is_proof
            num_found += search.found is not None
            num_tried += search.num_states > 0
    assert num_found >= 30
    assert num_tried >= (50 if tries_only else 1)


def test_what_fits_nowhere_is_refused_with_rank_bytes_and_limit_in_one_line():
    def error_of(num_layers, rank_of, *memory):
        layers = Layers(
            (1.0,) * num_layers, (100,) * num_layers, (10,) * num_layers, head_bytes=1000
        )
        with pytest.raises(ConfigError) as error:
            cut(layers, rank_of, Memory(*memory))
        message, remedy = str(error.value).split(". ", maxsplit=1)
        assert (
            remedy == "Use more ranks (mesh.pp), more shards (mesh.fsdp), remat=full or a smaller "
            "microbatch."
        )
        return message

    assert error_of(8, loop(4), (900,) * 4, (4, 3, 2, 1)) == (
        "rank 3 needs 1,000 bytes at least, with the fewest and smallest layers, but its limit "
        "is 900"
    )
    # 140 + 140, 130, 1000 + 120 + 120
    assert error_of(5, loop(3), (279, 250, 1240), (4, 3, 2)) == (
        "No partition of 5 layers fits: rank 0 needs 280 bytes where the largest excess is "
        "least, for 2 layers, but its limit is 279"
    )
    # 4 * 120, 130 + 1000 + 3 * 110
    assert error_of(8, loop(2, 2), (479, 1460), (4, 3, 2, 1)) == (
        "No partition of 8 layers fits: rank 0 needs 480 bytes where the largest excess is "
        "least, for 4 layers, but its limit is 479"
    )


@pytest.mark.parametrize("rank_of", [loop(3), loop(2, 2), v_shape(2)], ids=str)
def test_the_least_excess_that_an_error_names_is_that_of_brute_force(rank_of):
    choose, num_refused = random.Random(4), 0
    for _ in range(100):
        layers = some_layers(choose, 7)
        memory = some_memory(choose, layers, rank_of)
        try:
            cut(layers, rank_of, memory)
        except ConfigError as error:
            if "No partition" not in str(error):
                continue
            words = str(error).split()
            named = int(words[words.index("needs") + 1]) - int(
                words[words.index("is", words.index("limit")) + 1][:-1]
            )
            held = (rank_bytes(layers, p, rank_of, memory) for p in partitions(7, len(rank_of)))
            assert named == min(
                max(size - m for size, m in zip(h, memory.limit_bytes, strict=True)) for h in held
            )
            num_refused += 1
    assert num_refused >= 10


def test_too_few_layers_are_refused_as_balanced_does():
    with pytest.raises(
        ConfigError, match=r"^model.num_layers=3 is less than .* stage 4 would be empty"
    ):
        cut(Layers((1.0,) * 3), loop(4, 2))


# improved


def steps_of(program, layers):
    """The simulator's makespan of a partition, and how many were simulated."""
    tried = []

    def step_s(partition):
        tried.append(partition)
        costs = tuple(stage_s(layers, partition))
        return simulate(
            program, Costs(forward_s=costs, input_grad_s=costs, weight_grad_s=costs)
        ).makespan_s

    return step_s, tried


@pytest.mark.parametrize(("num_ranks", "num_layers"), [(3, (6, 7, 8, 9, 10)), (4, (8, 9, 10))])
@pytest.mark.parametrize("schedule", ["interleaved", "1f1b", "looped_bfs", "zb_v"])
def test_improved_is_never_slower_than_its_start_and_near_the_fastest_of_all(
    schedule, num_ranks, num_layers
):
    choose = random.Random(5)
    over, start_over = [], []
    for _ in range(16):
        program = build(schedule, num_ranks, choose.choice((1, 2)) * num_ranks)
        layer_s = tuple(
            choose.choice((1.0, 1.25, 1.5, 2.0, 3.0)) for _ in range(choose.choice(num_layers))
        )
        layers = Layers(
            layer_s, head_s=choose.choice((0.0, 1.0, 2.0, 4.0)), embed_s=choose.choice((0.0, 0.5))
        )
        step_s, tried = steps_of(program, layers)
        start = cut(layers, program.rank_of)
        found = improved(start, step_s, max_tried=1000)
        assert len(tried) == len(set(tried)) < 220
        best = min(map(step_s, partitions(layers.num_layers, program.num_stages)))
        assert step_s(found) <= step_s(start)
        over.append(step_s(found) / best)
        start_over.append(step_s(start) / best)
    assert sum(over) / len(over) <= 1.005
    assert max(over) <= 1.08
    if schedule != "1f1b":
        assert sum(over) < sum(start_over)


def test_improved_is_a_partition_that_no_move_of_one_layer_makes_faster():
    layers = Layers((1.0, 3.0, 2.0, 1.0, 1.0, 2.0, 1.5, 1.0, 1.0, 2.5), head_s=2.0)
    program = build("interleaved", 3, 6)
    step_s, _ = steps_of(program, layers)
    found = improved(uniform(10, 6), step_s, max_tried=1000)
    sizes = [len(stage) for stage in found]
    for source, target in itertools.permutations(range(6), 2):
        moved = [n - (s == source) + (s == target) for s, n in enumerate(sizes)]
        if all(moved[1:-1]) and min(moved) >= 0:
            assert step_s(partition_of([0, *itertools.accumulate(moved)])) >= step_s(found)


@pytest.mark.parametrize("max_tried", [1, 2, 5, 13])
def test_improved_tries_no_more_than_it_may_and_returns_the_best_of_them(max_tried):
    layers = Layers((1.0, 3.0, 2.0, 1.0, 1.0, 2.0, 1.5, 1.0), head_s=2.0)
    step_s, tried = steps_of(build("interleaved", 3, 6), layers)
    found = improved(uniform(8, 6), step_s, max_tried=max_tried)
    assert len(tried) == max_tried
    assert step_s(found) == min(map(step_s, tried[:max_tried]))


def test_improved_keeps_the_limit():
    layers = Layers((1.0,) * 12, (10,) * 12, (1,) * 12, head_s=3.0)
    program = build("interleaved", 2, 4)
    memory = Memory((80, 72), (3, 2, 2, 1))
    step_s, tried = steps_of(program, layers)
    start = cut(layers, program.rank_of, memory)
    free = improved(start, step_s, max_tried=100)
    assert not all_fit(layers, free, program.rank_of, memory)
    found = improved(start, step_s, max_tried=100, fits=fitting(layers, program.rank_of, memory))
    assert all_fit(layers, found, program.rank_of, memory)
    assert step_s(free) < step_s(found) <= step_s(start)
    fit = [p for p in partitions(12, 4) if all_fit(layers, p, program.rank_of, memory)]
    assert step_s(found) == min(map(step_s, fit))
    assert bounds_of(found)[-1] == 12
    assert tried
