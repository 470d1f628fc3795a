"""Every schedule that ppctl ships obeys the dependency rule, and validation refuses what does not."""

import random
import re
from collections import Counter
from dataclasses import replace

import pytest
from support.sizes import SIZES, TINY, by_ranks, make, random_programs

from ppctl.errors import ScheduleError
from ppctl.schedule.families.registry import FAMILIES, build
from ppctl.schedule.ir import Schedule, Task
from ppctl.schedule.validation import validate


@pytest.mark.parametrize("sizes", by_ranks(SIZES))
def test_every_size_of_every_family_is_valid_and_complete(sizes):
    for size in sizes:
        _, p, m, V = size
        schedule = validate(make(*size))
        assert (schedule.num_ranks, schedule.num_stages, schedule.num_chunks) == (p, p * V, V)
        tasks = Counter(task for rank in schedule.ranks for task in rank)
        assert tasks == Counter(
            Task(s, kind, i) for s in range(p * V) for kind in "FB" for i in range(m)
        )
        for rank, program in enumerate(schedule.ranks):
            assert {task.stage for task in program} == set(schedule.stages_of[rank])
            assert [schedule.rank_of[s] for s in schedule.stages_of[rank]] == [rank] * V


@pytest.mark.parametrize(
    "schedule", random_programs(), ids=lambda s: f"{s.num_ranks}x{s.num_microbatches}"
)
def test_any_order_that_ranks_can_run_is_valid(schedule):
    assert validate(schedule) is schedule


ORDERS = {  # p = 2, m = 4; by hand from the papers' figures
    "gpipe": ["0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0", "1F0 1F1 1F2 1F3 1B3 1B2 1B1 1B0"],
    "1f1b": ["0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"],
    "eager_1f1b": ["0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"],
    "interleaved": [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ],
}


@pytest.mark.parametrize("family", ORDERS)
def test_two_ranks_run_four_microbatches_in_the_published_order(family):
    assert [" ".join(map(str, program)) for program in build(family, 2, 4).ranks] == ORDERS[family]


# --- mutants ------------------------------------------------------------------------------------


def with_rank(schedule, rank, program):
    return replace(
        schedule,
        ranks=tuple(tuple(program) if r == rank else t for r, t in enumerate(schedule.ranks)),
    )


def places(schedule):
    return [
        (r, t, task) for r, program in enumerate(schedule.ranks) for t, task in enumerate(program)
    ]


def fault_of(schedule):
    """(rank, step, what) of the ScheduleError that the schedule meets; its grid points at that
    cell, and only there.
    """
    with pytest.raises(ScheduleError) as error:
        validate(schedule)
    first, *grid = str(error.value).splitlines()
    found = re.fullmatch(rf"{schedule.name}: rank (\d+), step (\d+): (.+\.)", first)
    assert found is not None, first
    rank, step, what = int(found[1]), int(found[2]), found[3]
    assert [row.split()[:2] for row in grid[1:]] == [
        ["rank", str(r)] for r in range(schedule.num_ranks)
    ]
    assert ["->" in row for row in grid[1:]] == [r == rank for r in range(schedule.num_ranks)]
    arrow_end = grid[1 + rank].index("->") + len(re.search(r"->\S*", grid[1 + rank])[0])
    assert grid[0][:arrow_end].split()[-1] == str(step)  # the column above the arrow
    program = schedule.ranks[rank]
    assert re.search(r"->(\S*)", grid[1 + rank])[1] == (
        str(program[step]) if step < len(program) else ""
    )
    return rank, step, what


@pytest.mark.parametrize("sizes", by_ranks(TINY))
def test_a_dropped_task_is_refused_with_its_missing_value(sizes):
    for size in sizes:
        schedule = make(*size)
        for rank, step, task in places(schedule):
            program = schedule.ranks[rank][:step] + schedule.ranks[rank][step + 1 :]
            value = f"{'act' if task.kind == 'F' else 'wgrad'}({task.stage},{task.microbatch})"
            at_rank, at_step, what = fault_of(with_rank(schedule, rank, program))
            assert (at_rank, at_step) == (rank, len(program))
            assert value in what
            assert str(task) in what


@pytest.mark.parametrize("sizes", by_ranks(TINY))
def test_a_repeated_task_is_refused_where_it_is_repeated(sizes):
    for size in sizes:
        schedule, rng = make(*size), random.Random(0)
        for rank, step, task in places(schedule):
            program = list(schedule.ranks[rank])
            second = rng.randint(step + 1, len(program))
            program.insert(second, task)
            at_rank, at_step, what = fault_of(with_rank(schedule, rank, program))
            assert (at_rank, at_step) == (rank, second)
            name = "act" if task.kind == "F" else "grad"
            assert what == f"{task} writes {name}({task.stage},{task.microbatch}) a second time."


@pytest.mark.parametrize("sizes", by_ranks([size for size in TINY if size[1] > 1]))
def test_a_task_on_a_rank_that_does_not_hold_its_stage_is_refused(sizes):
    for size in sizes:
        schedule, rng = make(*size), random.Random(0)
        for rank, step, task in places(schedule):
            program = schedule.ranks[rank][:step] + schedule.ranks[rank][step + 1 :]
            other = rng.choice([r for r in range(schedule.num_ranks) if r != rank])
            moved = list(schedule.ranks[other])
            where = rng.randint(0, len(moved))
            moved.insert(where, task)
            found = fault_of(with_rank(with_rank(schedule, rank, program), other, moved))
            assert found == (
                other,
                where,
                f"{task} is on rank {other}, but stage {task.stage} is on rank {rank}.",
            )


@pytest.mark.parametrize("sizes", by_ranks(TINY))
def test_a_backward_before_its_forward_is_refused_as_a_deadlock(sizes):
    for size in sizes:
        schedule = make(*size)
        for rank, step, task in places(schedule):
            if task.kind == "B":
                program = list(schedule.ranks[rank])
                first = program.index(Task(task.stage, "F", task.microbatch))
                program[first], program[step] = task, program[first]
                # the ranks may come to a stand at an earlier cell that waits for this one
                at_rank, at_step, what = fault_of(with_rank(schedule, rank, program))
                assert re.match(
                    r"\d+[FB]\d+ waits for \w+\(\d+,\d+\), which no rank can write any more\. ",
                    what,
                )
                assert what.endswith(
                    f" Rank {rank} has {task} before {program[step]}, on which it depends."
                )
                waiting = with_rank(schedule, rank, program).ranks[at_rank][at_step]
                assert what.startswith(str(waiting))


def test_ranks_that_wait_for_each_other_are_refused_with_the_task_and_the_value():
    def program(cells):
        return tuple(Task.parse(cell) for cell in cells.split())

    ranks = (program("0F0 0B0 0F1 0B1"), program("1F0 1F1 1B0 1B1"))
    found = fault_of(Schedule("hand made", ranks, (0, 1), 2))
    blocked = "0B0 waits for grad(1,0), which no rank can write any more."
    cause = "Rank 0 has 0B0 before 0F1, and rank 1 has 1F1 before 1B0: each waits for the other."
    assert found == (0, 1, f"{blocked} {cause}")


def test_an_unfinished_split_backward_is_refused():
    schedule = next(s for s in random_programs() if any(task.kind == "W" for task in s.ranks[0]))
    for rank, step, task in places(schedule):
        if task.kind == "W":
            program = schedule.ranks[rank][:step] + schedule.ranks[rank][step + 1 :]
            _, _, what = fault_of(with_rank(schedule, rank, program))
            assert f"wgrad({task.stage},{task.microbatch})" in what


def test_a_backward_that_is_both_whole_and_split_is_refused():
    ranks = ((Task(0, "F", 0), Task(0, "B", 0), Task(0, "I", 0), Task(0, "W", 0)),)
    assert fault_of(Schedule("hand made", ranks, (0,), 1)) == (
        0,
        2,
        "0I0 writes grad(0,0) a second time.",
    )


@pytest.mark.parametrize("cell", ["2F0", "0F9"])
def test_a_task_outside_the_stages_and_microbatches_is_refused(cell):
    schedule = build("gpipe", 2, 3)
    found = fault_of(with_rank(schedule, 1, (Task.parse(cell), *schedule.ranks[1])))
    assert found == (1, 0, f"{cell} is outside stages 0..1 x microbatches 0..2.")


def test_a_stage_on_no_rank_is_refused():
    with pytest.raises(
        ScheduleError, match=r"^stage 1 is placed on rank 5, but there are ranks 0\.\.1\.$"
    ):
        validate(replace(build("gpipe", 2, 3), rank_of=(0, 5)))


# --- sizes that cannot be served ----------------------------------------------------------------


@pytest.mark.parametrize(("p", "m"), [(4, 6), (2, 1), (8, 12), (3, 10)])
def test_interleaved_refuses_microbatches_that_the_ranks_do_not_divide(p, m):
    with pytest.raises(ScheduleError) as error:
        build("interleaved", p, m)
    assert str(error.value) == (
        f"num_microbatches={m} is not a multiple of num_ranks={p} (interleaved). "
        f"Use a multiple of {p} that divides the batch, or schedule=1f1b."
    )


def test_an_unknown_family_is_refused_with_the_known_names():
    with pytest.raises(ScheduleError) as error:
        build("gpip", 2, 2)
    assert str(error.value) == f"schedule=gpip is not one of {', '.join(FAMILIES)}."
