"""The printed table of ticks has the schedule's tasks and the destinations of their outputs."""

import re

import pytest

from ppctl.schedule.costs import task_costs
from ppctl.schedule.families.registry import ON_RING, build
from ppctl.schedule.ir import Task
from ppctl.schedule.tick_lowering import forward_only, tick_tasks, tick_text, ticks
from ppctl.schedule.vocabulary_parallel import with_vocabulary

SIZES = ((4, 8), (2, 4), (1, 2))
cases = pytest.mark.parametrize("remat", ["full", "none"])


def lowered(name, sizes, remat):
    return ticks(build(name, *sizes), task_costs(remat), remat)


def goes_to(schedule, task):
    """Return the rank that reads a task's output for another stage."""
    stage = {"F": task.stage + 1, "B": task.stage - 1, "I": task.stage - 1, "W": -1}[task.kind]
    return schedule.rank_of[stage] if 0 <= stage < schedule.num_stages else None


@cases
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", ON_RING)
def test_every_task_is_in_order_and_sends_to_its_reader(name, sizes, remat):
    table = lowered(name, sizes, remat)
    schedule, rows = table.schedule, tick_tasks(table)
    last = schedule.num_stages - 1
    for rank, tasks in enumerate(schedule.ranks):
        mine = [one for row in rows for one in row[rank]]
        assert tuple(one.task for one in mine) == tasks
        for task, is_run, to in mine:
            is_last_forward = task.kind == "F" and task.stage == last
            assert is_run == (not is_last_forward or remat != "full")
            if is_last_forward and is_run and table.program == "op":
                assert to == rank  # the gradient of its output, for its backward
            else:
                assert to == goes_to(schedule, task), task


@pytest.mark.parametrize("name", ["eager_1f1b", "interleaved", "zb_v"])
def test_the_text_can_be_read_back(name):
    table = lowered(name, (4, 8), "full")
    header, *lines = tick_text(table).split("\n\n")[0].splitlines()
    assert header.split("  ")[0] == "tick"
    starts = [match.start() for match in re.finditer(r"rank \d+", header)]
    assert len(lines) == table.num_ticks
    for t, line in enumerate(lines):
        assert int(line[: starts[0]]) == t
        for rank, (low, high) in enumerate(zip(starts, [*starts[1:], None], strict=True)):
            cells = re.findall(r"\d+[FBIW]\d+", line[low:high])
            assert [Task.parse(cell) for cell in cells] == [
                task for task in table.cells[t][rank] if task is not None
            ]


def test_schedules_of_only_forwards_have_a_table():
    table = ticks(forward_only(build("1f1b", 2, 2)), task_costs("none"), "none")
    assert tick_text(table).splitlines()[:4] == [
        "tick  rank 0  rank 1",
        "   0  0F0>1",
        "   1  0F1>1   1F0",
        "   2          1F1",
    ]


def test_parts_of_the_vocabulary_follow_the_ranks():
    schedule = with_vocabulary(build("eager_1f1b", 2, 2), 0)
    lines = tick_text(ticks(schedule, task_costs("none"))).splitlines()
    assert lines[0].endswith("each rank's part of the vocabulary")
    assert [line.split("  ")[-1].strip() for line in lines[1:5]] == [
        "E0",
        "E1 S0 T0",
        "S1 T1 G0",
        "G1",
    ]
