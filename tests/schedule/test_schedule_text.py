"""Tasks and grids as text."""

import pytest

from ppctl.errors import ScheduleError
from ppctl.schedule import Task, Value, build
from ppctl.schedule.ir import KINDS
from ppctl.schedule.text import grid


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 7, 1023])
@pytest.mark.parametrize("microbatch", [0, 9, 4096])
def test_a_task_prints_and_parses_to_itself(stage, kind, microbatch):
    task = Task(stage, kind, microbatch)
    assert str(task) == f"{stage}{kind}{microbatch}"
    assert Task.parse(str(task)) == task
    assert Task.parse(f" {task}\n") == task  # as cells of a CSV file come


@pytest.mark.parametrize("cell", ["", "F", "2F", "F0", "2X0", "2f0", "-1F0", "2F0B1", "2 F 0", "2F0.5"])
def test_a_cell_that_names_no_task_is_refused_with_the_grammar(cell):
    with pytest.raises(ScheduleError) as error:
        Task.parse(cell)
    assert str(error.value) == (
        f"cell {cell!r} is not <stage><kind><microbatch> with kind one of F, B, I, W, such as 2F0."
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
    header, *rows = grid(schedule.ranks, (2, step), width=10).splitlines()
    shown = [int(word) for word in header.split()[1:]]
    assert shown == list(range(shown[0], shown[0] + 10))
    assert step in shown
    for rank, row in enumerate(rows):
        cells = [str(schedule.ranks[rank][t]) for t in shown]
        if rank == 2:
            cells[shown.index(step)] = "->" + cells[shown.index(step)]
        assert row.split()[2:] == cells
