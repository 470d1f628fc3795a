"""Tasks and grids as text."""

import pytest

from ppctl.errors import ScheduleError
from ppctl.schedule.families.registry import build
from ppctl.schedule.ir import KINDS, Task, Value
from ppctl.schedule.schedule_text import WORDS
from ppctl.schedule.validation import grid


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 7, 1023])
@pytest.mark.parametrize("microbatch", [0, 9, 4096])
def test_a_task_prints_and_parses_to_itself(stage, kind, microbatch):
    task = Task(stage, kind, microbatch)
    assert str(task) == f"{stage}{kind}{microbatch}"
    assert Task.parse(str(task)) == task
    assert Task.parse(f" {task}\n") == task  # cells of a CSV file


@pytest.mark.parametrize(
    "cell", ["", "F", "2F", "F0", "2X0", "2f0", "-1F0", "2F0B1", "2 F 0", "2F0.5"]
)
def test_a_cell_that_names_no_task_is_refused_with_the_grammar(cell):
    with pytest.raises(ScheduleError) as error:
        Task.parse(cell)
    assert str(error.value) == (
        f"cell {cell!r} is not <stage><kind><microbatch> with kind one of F, B, I, W, E, S, T, "
        "G, such as 2F0."
    )


def test_a_value_prints_its_stage_and_microbatch():
    assert str(Value("stash", 3, 11)) == "stash(3,11)"


def test_a_grid_has_a_row_for_each_rank_and_a_column_for_each_step():
    rows = [line.split() for line in grid(build("1f1b", 2, 2).ranks).splitlines()]
    assert rows == [
        ["step", "0", "1", "2", "3"],
        ["rank", "0", "0F0", "0F1", "0B0", "0B1"],
        ["rank", "1", "1F0", "1B0", "1F1", "1B1"],
    ]


@pytest.mark.parametrize("step", [0, 5, 31, 63])
def test_a_long_grid_shows_the_steps_round_the_arrow(step):
    schedule = build("gpipe", 4, 32)
    header, *rows = grid(schedule.ranks, (2, step)).splitlines()
    shown = [int(word) for word in header.split()[1:]]
    assert shown == list(range(shown[0], shown[0] + 14))
    assert step in shown
    for rank, row in enumerate(rows):
        cells = [str(schedule.ranks[rank][t]) for t in shown]
        if rank == 2:
            cells[shown.index(step)] = "->" + cells[shown.index(step)]
        assert row.split()[2:] == cells


# --- JaxPP's orders -----------------------------------------------------------------------------


def fused(stage, microbatches):
    """What JaxPP prints as FusedTask(fwd_..., bwd_...)."""
    return [f"{word}_{stage}__{m}" for m in microbatches for word in ("fwd", "bwd")]


def each(word, stage, microbatches=range(4)):
    return [f"{word}_{stage}__{m}" for m in microbatches]


# output of JaxPP's tutorial for Interleaved1F1B, 4 microbatches on 4 ranks: 4 stages, then 8
RANK_2 = [
    "fwd_2__0",
    "fwd_2__1",
    "fwd_2__2",
    "bwd_2__0",
    "fwd_2__3",
    "bwd_2__1",
    "bwd_2__2",
    "bwd_2__3",
]
OF_FOUR = {2: RANK_2, 3: fused(3, range(4))}
OF_EIGHT = {
    0: each("fwd", 0) + each("fwd", 4) + each("bwd", 4) + each("bwd", 0),
    3: each("fwd", 3) + fused(7, range(4)) + each("bwd", 3),
}
SAME = [
    ("eager_1f1b", {}, OF_FOUR),
    ("interleaved", {"num_chunks": 1}, OF_FOUR),
    ("interleaved", {}, OF_EIGHT),
]


def task_name(task):
    """A task as JaxPP prints it."""
    return f"{WORDS[task.kind]}_{task.stage}__{task.microbatch}"


@pytest.mark.parametrize(("name", "knobs", "printed"), SAME)
def test_the_lists_of_jaxpps_tutorial(name, knobs, printed):
    schedule = build(name, 4, 4, **knobs)
    for rank, expected in printed.items():
        assert list(map(task_name, schedule.ranks[rank])) == expected


@pytest.mark.parametrize(
    ("name", "printed"), [("1f1b", OF_FOUR), ("gpipe", OF_FOUR), ("looped_bfs", OF_EIGHT)]
)
def test_printed_lists_differ_from_other_families(name, printed):
    schedule = build(name, 4, 4)
    assert any(list(map(task_name, schedule.ranks[rank])) != each for rank, each in printed.items())


def test_1f1b_begins_its_backwards_one_forward_earlier_than_jaxpps():
    found = list(map(task_name, build("1f1b", 4, 4).ranks[2]))
    assert sorted(found) == sorted(RANK_2)
    assert (found.index("bwd_2__0"), RANK_2.index("bwd_2__0")) == (2, 3)
