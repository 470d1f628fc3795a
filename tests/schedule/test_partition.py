"""Layers divided over stages: all of them, in order; evenly, with the least largest cost, or as
requested.
"""

import itertools

import pytest

from ppctl.errors import ConfigError
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.registry import build
from ppctl.schedule.families.stage_placement import loop, v_shape, waves
from ppctl.schedule.partition.partition import (
    balanced,
    explicit,
    layout_text,
    ranks_text,
    stage_costs,
    stages_text,
    uniform,
)
from ppctl.schedule.simulator import simulate


def sizes(partition):
    """The layers of each stage, after making sure that they are all layers in order."""
    assert [l for layers in partition for l in layers] == list(range(partition[-1].stop))
    return [len(layers) for layers in partition]


@pytest.mark.parametrize("num_stages", range(1, 13))
def test_stages_hold_all_layers_in_order_and_differ_by_one_at_most(num_stages):
    for num_layers in range(num_stages, 40):
        found = sizes(uniform(num_layers, num_stages))
        assert sum(found) == num_layers
        assert len(found) == num_stages
        assert found == sorted(found, reverse=True)
        assert found[0] - found[-1] <= 1


def test_fewer_layers_than_stages_are_refused_in_one_line():
    with pytest.raises(ConfigError) as error:
        uniform(6, 8)
    assert str(error.value) == (
        "num_layers=6 is less than the number of stages, pp*num_chunks = 8: a stage "
        "would be empty. Use num_layers=8 or more, fewer ranks or chunks, or "
        "partition=[0, 1, 1, 1, 1, 1, 1, 0]."
    )


# balanced


def divisions(num_layers, num_stages):
    """All sizes of contiguous stages that a model can have."""
    for cuts in itertools.combinations_with_replacement(range(num_layers + 1), num_stages - 1):
        found = [high - low for low, high in itertools.pairwise((0, *cuts, num_layers))]
        if all(found[1:-1]):
            yield found


def goals(found, rank_of, embed, head):
    """What `balanced` makes small, in order: largest stage, largest rank, unequal costs, the large
    ones misplaced.
    """
    costs = stage_costs([range(n) for n in found], embed=embed, head=head)
    ranks = [
        sum(cost for cost, rank in zip(costs, rank_of, strict=True) if rank == r)
        for r in set(rank_of)
    ]
    side = 1 if len(ranks) == len(rank_of) else -1
    return max(costs), max(ranks), sum(c * c for c in costs), [-side * c for c in costs]


PLACEMENTS = [
    loop(1),
    loop(2),
    loop(3),
    loop(5),
    loop(2, 2),
    loop(3, 2),
    loop(2, 3),
    v_shape(2),
    v_shape(3),
    waves(2, 2),
]
END_COSTS = (0.0, 0.25, 1.0, 2.75, 9.0)  # sums are exact


@pytest.mark.parametrize("rank_of", PLACEMENTS, ids=str)
def test_balanced_equals_the_best_of_all_partitions(rank_of):
    num_stages, num_compared = len(rank_of), 0
    for num_layers in range(max(1, num_stages - 2), 9):
        everything = list(divisions(num_layers, num_stages))
        for embed, head in itertools.product(END_COSTS, END_COSTS):
            best = min(everything, key=lambda found: goals(found, rank_of, embed, head))
            assert sizes(balanced(num_layers, rank_of, embed=embed, head=head)) == best, (
                num_layers,
                embed,
                head,
            )
            num_compared += 1
    assert num_compared >= 25


def test_balanced_needs_no_exact_numbers_and_little_time():
    for head in (0.1, 1 / 3, 0.7, 2.2857142857142856):
        costs = stage_costs(balanced(23, loop(5), embed=0.1, head=head), embed=0.1, head=head)
        best = min(
            max(stage_costs([range(n) for n in d], embed=0.1, head=head)) for d in divisions(23, 5)
        )
        assert max(costs) == pytest.approx(best, abs=1e-12)
    assert max(sizes(balanced(2000, loop(256), embed=0.0, head=0.7))) == 8


def test_balanced_without_ends_is_uniform():
    for num_layers, num_stages in itertools.product(range(9, 25), range(1, 10)):
        assert balanced(num_layers, loop(num_stages), embed=0.0, head=0.0) == uniform(
            num_layers, num_stages
        )


def test_a_head_worth_layers_leaves_its_stage_few():
    for head, expected in (
        (0.0, [3, 3, 3, 3]),
        (1.0, [4, 3, 3, 2]),
        (2.6, [4, 4, 3, 1]),
        (5.0, [4, 4, 4, 0]),
    ):
        assert sizes(balanced(12, loop(4), embed=0.0, head=head)) == expected


def test_balanced_refuses_a_stage_between_the_ends_without_layers():
    assert sizes(balanced(2, loop(4), embed=0.0, head=0.0)) == [0, 1, 1, 0]
    with pytest.raises(ConfigError) as error:
        balanced(3, loop(4, 2), embed=0.0, head=1.0)
    assert str(error.value) == (
        "num_layers=3 is less than the number of stages between the first and the last, "
        "pp*num_chunks-2 = 6: stage 4 would be empty. Use num_layers=6 or more, "
        "fewer ranks or fewer chunks."
    )


HEAVY_HEAD = {"embed": 0.0, "head": 4.0}  # next to 16 layers on 4 ranks


def timeline(program, partition):
    costs = stage_costs(partition, **HEAVY_HEAD)
    return simulate(program, Costs(forward_s=costs, input_grad_s=costs, weight_grad_s=costs))


@pytest.mark.parametrize(
    ("num_microbatches", "before", "after"), [(8, 0.474, 0.273), (32, 0.403, 0.086)]
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_balanced_shrinks_the_bubble_of_a_model_with_a_large_head(
    schedule, num_microbatches, before, after
):
    program = build(schedule, 4, num_microbatches)
    for partition, bubble_fraction in (
        (uniform(16, 4), before),
        (balanced(16, program.rank_of, **HEAVY_HEAD), after),
    ):
        costs = stage_costs(partition, **HEAVY_HEAD)
        found = timeline(program, partition)
        assert found.makespan_s == 3 * (sum(costs) + (num_microbatches - 1) * max(costs))
        assert found.bubble_fraction == pytest.approx(bubble_fraction, abs=5e-4)


@pytest.mark.parametrize("schedule", ["interleaved", "looped_bfs", "zb_v", "zb_h1"])
def test_balanced_shortens_the_step_of_every_kind_of_schedule(schedule):
    program = build(schedule, 4, 8)
    even = timeline(program, uniform(16, program.num_stages))
    assert (
        timeline(program, balanced(16, program.rank_of, **HEAVY_HEAD)).makespan_s
        <= 0.82 * even.makespan_s
    )


# explicit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Et*3|(tt|)*6,tL", [3, 2, 2, 2, 2, 2, 2, 1]),
        (
            "Et*3|(tt|)*29,t|L",
            [3, *[2] * 29, 1, 0],
        ),  # Megatron-LM's own example without its prediction layer m
        ("E|tt|t*3|L", [0, 2, 3, 0]),
        ("EttL", [2]),
        ("Et(t|t)*2L", [2, 2, 1]),  # a group is repeated as it stands, stages or not
        (" E t t | , t t L ", [2, 2]),
        ("Et|(t*2|)*2tL", [1, 2, 2, 1]),
        ("Ett*0|tL", [1, 1]),
        ("Et(|t)*3L", [1, 1, 1, 1]),
        ([3, 2, 2, 3], [3, 2, 2, 3]),
        ((0, 5, 4, 0), [0, 5, 4, 0]),
        ([7], [7]),
    ],
    ids=str,
)
def test_explicit_stages_hold_the_stated_layers(text, expected):
    assert sizes(explicit(sum(expected), len(expected), text)) == expected


def test_the_layout_text_of_any_stages_is_read_as_these_stages():
    for num_stages in range(1, 8):
        ends = (0, 1, 3) if num_stages > 1 else (1, 4)
        for stages in itertools.product(
            ends, *[(1, 2, 5)] * (num_stages - 2), *[ends] * (num_stages > 1)
        ):
            assert sizes(explicit(sum(stages), num_stages, layout_text(stages))) == list(stages)
    assert (
        layout_text([2] * 14 + [3, 2] + [3] * 14 + [2, 3]) == "Ett|(tt|)*13t*3|tt|(t*3|)*14tt|t*3L"
    )


def test_the_text_of_stages_is_short_for_any_number():
    assert stages_text([1] * 128) == "128 of 1 layer each"
    assert ranks_text([*range(64), *range(64)]) == "0-63 0-63"
    assert ranks_text([0, 1, 0, 1]) == "0-1 0-1"
    assert ranks_text([0, 1, 2, 3, 3, 2, 1, 0]) == "0-3 3-0"


ENDS_ONLY = (
    r"only the first stage \(0\), which embeds, and the last \(3\), which computes the loss, can "
    r"do without"
)
WRONG = [  # for 8 layers on 4 stages
    (
        [2, 2, 2, 3],
        r"\[2, 2, 2, 3\] has 2\+2\+2\+3 = 9 layers in stages 0 to 3, but num_layers=8. Use "
        r".*=9, or",
    ),
    ([2, 2, 2, 1], r"= 7 layers in stages 0 to 3, but num_layers=8"),
    (
        [4, 4],
        r"\[4, 4\] is for 2 stages, but pp\*num_chunks = 4. Give a number .* pp or "
        r"num_chunks",
    ),
    ([], "is for 0 stages"),
    ([1, 0, 5, 2], rf"stage 1 has 0 layers. Give it 1 or more: {ENDS_ONLY}"),
    ([1, 3, 6, -2], "stage 3 has -2 layers"),
    ("Et*4||t*3|tL", rf"stage 1 has 0 layers. .*{ENDS_ONLY}"),
    ("Et*4|t|t|t", r"stage 3 is 't', but the last stage must end with L \(loss\), .* Write it tL"),
    ("Et*4|t|tL|t", "stage 2 is 'tL', but a middle stage must hold neither E nor L, .* Write it t"),
    (
        "t*5|t|t|tL",
        r"stage 0 is 'ttttt', but the first stage must start with E \(embedding\), .* Write it "
        r"Ettttt",
    ),
    ("t*5|Et|t|tL", "stage 0 is 'ttttt'"),
    ("tE|t*5|t|tL", "stage 0 is 'tE', .* Write it Et"),
    ("Et|t*5|t|LtL", "stage 3 is 'LtL'"),
    (
        "Et*4|t|t|tmL",
        "stage 3 is 'tmL', .* and all other letters must be t .a layer.. Write it ttL|tL",
    ),
    ("Et|t*5|t", r"is for 3 stages, but pp\*num_chunks = 4. .*one part between |"),
    ("Et|t*4|t|tL", r"has 1\+4\+1\+1 = 7 layers in stages 0 to 3"),
    ("", "is for 1 stages"),
    ("Et|d*5|t|tL", r"cannot be read from 'd\*5|t|tL' on. Write E, t and L .* or a list"),
    ("Et|(t*5|t|tL", "cannot be read from .*"),
    (
        "Et|((t|)*2)*2tL",
        r"cannot be read from '\(\(t|\)\*2\)\*2tL' on. .* a group without groups in it",
    ),
    ("Et|(tt)|t|tL", "cannot be read from"),
    ("3,2,2,1", "cannot be read from '3221' on. .*or a list of the layers of each stage"),
    ("Et*2*2|t|t|tL", r"cannot be read from '\*2|t|t|tL'"),
    ("Et*9999999999|t|t|L", r"t\*9999999999 makes it more than 100,000 letters"),
]


@pytest.mark.parametrize(("layers", "message"), WRONG, ids=lambda value: str(value)[:30])
def test_partitions_that_do_not_cover_the_model_are_refused_with_the_stage(layers, message):
    with pytest.raises(ConfigError, match=message) as error:
        explicit(8, 4, layers)
    assert str(error.value).startswith(f"partition={layers}")
    assert "\n" not in str(error.value)


def test_the_only_stage_has_both_ends():
    with pytest.raises(
        ConfigError,
        match=r"must start with E \(embedding\) and end with L \(loss\), .* Write it EttL",
    ):
        explicit(2, 1, "tt")
