"""Partitions by cost: as good as the best of all, within what may be held, and improved by
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
from ppctl.schedule.partition import cut_layers
from ppctl.schedule.partition.cut_layers import divided_evenly, improved
from ppctl.schedule.partition.partition import balanced, partition_of, stage_costs, uniform
from ppctl.schedule.simulator import simulate


def partitions(num_layers, num_stages):
    """All contiguous ones that a model can have."""
    for cuts in itertools.combinations_with_replacement(range(num_layers + 1), num_stages - 1):
        found = [range(low, high) for low, high in itertools.pairwise((0, *cuts, num_layers))]
        if all(found[1:-1]):
            yield tuple(found)


def some_layers(choose, num_layers):
    """Layers of unequal costs, embedding and head; whole numbers, so that sums are exact."""
    layers = [float(choose.randint(1, 9)) for _ in range(num_layers)]
    return layers, {end: float(choose.choice((0, 0, 1, 3, 9))) for end in ("embed", "head")}


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


@pytest.mark.parametrize("rank_of", PLACEMENTS, ids=str)
def test_the_cut_is_the_best_of_all_and_stages_of_separate_ranks_are_most_equal(rank_of):
    choose = random.Random(1)
    for _ in range(40):
        layers, ends = some_layers(choose, choose.randint(max(1, len(rank_of) - 2), 8))
        found = stage_costs(divided_evenly(layers, rank_of, **ends), layers=layers, **ends)
        every = [
            stage_costs(partition, layers=layers, **ends)
            for partition in partitions(len(layers), len(rank_of))
        ]
        best = min(map(max, every))
        assert max(found) == best
        if len(set(rank_of)) == len(rank_of):
            assert sum(c * c for c in found) == min(
                sum(c * c for c in e) for e in every if max(e) == best
            )


def test_equal_layers_are_cut_as_balanced_does_and_so_are_nearly_equal_ones():
    for num_layers, num_ranks, head in itertools.product(
        (8, 11, 16), (2, 3, 5, 8), (0.0, 0.5, 2.0, 3.0)
    ):
        expected = balanced(num_layers, loop(num_ranks), embed=0.0, head=head)
        equal = [2.0] * num_layers
        assert divided_evenly(equal, loop(num_ranks), embed=0.0, head=2 * head) == expected
        nearly = [*equal[1:], 2.0 * (1 + 1e-12)]
        found = divided_evenly(nearly, loop(num_ranks), embed=0.0, head=2 * head)
        largest = [max(stage_costs(each, embed=0.0, head=head)) for each in (found, expected)]
        assert largest[0] == largest[1]


def test_starts_and_ends_of_stages_that_cost_too_much_are_not_tried(monkeypatch):
    """Every (stage, start, end) would be 8.4 million; about L*L = 262,144 are tried."""

    class Counted(list):
        reads = 0

        def __getitem__(self, index):
            Counted.reads += 1
            return super().__getitem__(index)

    of_sums = cut_layers.most_equal
    monkeypatch.setattr(cut_layers, "most_equal", lambda sums, *rest: of_sums(Counted(sums), *rest))
    choose, num_layers = random.Random(2), 512
    layers = [choose.uniform(1, 3) for _ in range(num_layers)]
    divided_evenly(layers, loop(64), embed=0.0, head=7.0)
    assert 0 < Counted.reads < 4 * num_layers**2


def test_too_few_layers_are_refused_as_balanced_does():
    for layers in ([1.0] * 3, [1.0, 2.0, 1.0]):
        with pytest.raises(
            ConfigError, match=r"^num_layers=3 is less than .* stage 4 would be empty"
        ):
            divided_evenly(layers, loop(4, 2), embed=0.0, head=0.0)


# improved


def steps_of(program, layers, embed=0.0, head=0.0):
    """The simulator's makespan of a partition, and how many were simulated."""
    tried = []

    def step_s(partition):
        tried.append(partition)
        costs = stage_costs(partition, embed=embed, head=head, layers=layers)
        return simulate(program, Costs(costs, costs, costs)).makespan_s

    return step_s, tried


@pytest.mark.parametrize(
    ("num_ranks", "num_layers"), [(3, (6, 7, 8, 9, 10)), full((4, (8, 9, 10)))]
)
@pytest.mark.parametrize("schedule", ["interleaved", "1f1b", full("looped_bfs"), "zb_v"])
def test_improved_is_never_slower_than_its_start_and_near_the_fastest_of_all(
    schedule, num_ranks, num_layers
):
    choose = random.Random(5)
    over, start_over = [], []
    for _ in range(16):
        program = build(schedule, num_ranks, choose.choice((1, 2)) * num_ranks)
        number = choose.choice(num_layers)
        layers = [choose.choice((1.0, 1.25, 1.5, 2.0, 3.0)) for _ in range(number)]
        ends = {"head": choose.choice((0.0, 1.0, 2.0, 4.0)), "embed": choose.choice((0.0, 0.5))}
        step_s, tried = steps_of(program, layers, **ends)
        start = divided_evenly(layers, program.rank_of, **ends)
        found = improved(start, step_s, max_tried=1000)
        assert len(tried) == len(set(tried)) < 220
        best = min(map(step_s, partitions(number, program.num_stages)))
        assert step_s(found) <= step_s(start)
        over.append(step_s(found) / best)
        start_over.append(step_s(start) / best)
    assert sum(over) / len(over) <= 1.005
    assert max(over) <= 1.08
    if schedule != "1f1b":
        assert sum(over) < sum(start_over)


def test_improved_is_a_partition_that_no_move_of_one_layer_makes_faster():
    layers = [1.0, 3.0, 2.0, 1.0, 1.0, 2.0, 1.5, 1.0, 1.0, 2.5]
    program = build("interleaved", 3, 6)
    step_s, _ = steps_of(program, layers, head=2.0)
    found = improved(uniform(10, 6), step_s, max_tried=1000)
    sizes = [len(stage) for stage in found]
    for source, target in itertools.permutations(range(6), 2):
        moved = [n - (s == source) + (s == target) for s, n in enumerate(sizes)]
        if all(moved[1:-1]) and min(moved) >= 0:
            assert step_s(partition_of([0, *itertools.accumulate(moved)])) >= step_s(found)


@pytest.mark.parametrize("max_tried", [1, 2, 5, 13])
def test_improved_tries_at_most_max_tried_and_returns_the_best(max_tried):
    layers = [1.0, 3.0, 2.0, 1.0, 1.0, 2.0, 1.5, 1.0]
    step_s, tried = steps_of(build("interleaved", 3, 6), layers, head=2.0)
    found = improved(uniform(8, 6), step_s, max_tried=max_tried)
    assert len(tried) == max_tried
    assert step_s(found) == min(map(step_s, tried[:max_tried]))
