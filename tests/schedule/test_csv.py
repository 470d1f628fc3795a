"""Schedules as PyTorch's compute-only CSV, both ways, and one error for each way a file can be
wrong.
"""

import pytest
from support.all_families import cases, make

from ppctl.errors import ScheduleError
from ppctl.schedule.families.registry import FAMILIES
from ppctl.schedule.schedule_text import from_csv, to_csv


@pytest.mark.parametrize("family", FAMILIES)
def test_every_schedule_survives_the_round_trip(family):
    for case in cases(ranks=(1, 2, 4), microbatches=lambda p: (p, 2 * p)):
        if case[0] == family:
            schedule = make(case)
            assert from_csv(to_csv(schedule.ranks), schedule.name) == schedule


def test_empty_cells_are_idle_steps():
    text = "0F0,0F1,,,0B0,,0B1\n,1F0,1B0, 1F1 ,,1B1\n"
    schedule = from_csv(text, "torch")
    assert to_csv(schedule.ranks) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert (schedule.name, schedule.rank_of, schedule.num_microbatches) == ("torch", (0, 1), 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0F0,0B0\n1F0,1X0\n",
            "mine: line 2, column 2: cell '1X0' is not <stage><kind><microbatch> with kind one "
            "of F, B, I, W, E, S, T, G, such as 2F0.",
        ),
        ("", "mine: the text has no tasks. Write one line a rank, cells such as 2F0."),
        ("0F0,0B0\n2F0,2B0\n", "mine: stage 2 has tasks, but no rank has one of stage 1."),
        (
            "0F0\n1F0,1B0\n",
            "mine: rank 0, step 1: the program ends without 0B0, which writes wgrad(0,0).",
        ),
        (
            "0F0,0I0\n1F0,1B0\n",
            "mine: rank 0, step 2: the program ends without 0W0, which writes wgrad(0,0).",
        ),
        (
            "0F0,0B0\n1F0,1B0,0F0\n",
            "mine: rank 1, step 2: 0F0 is on rank 1, but stage 0 is on rank 0.",
        ),
        ("0F0,0B0,0B0\n1F0,1B0\n", "mine: rank 0, step 2: 0B0 writes grad(0,0) a second time."),
        (
            "0B0,0F0\n1F0,1B0\n",
            "mine: rank 0, step 0: 0B0 waits for stash(0,0), which no rank can write any more. "
            "Rank 0 has 0B0 before 0F0, on which it depends.",
        ),
        (
            "0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0\n",
            None,  # another order of microbatches is no fault
        ),
        (
            "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n",
            "mine: rank 0, step 1: 0B0 waits for grad(1,0), which no rank can write any more. "
            "Rank 0 has 0B0 before 0F1, and rank 1 has 1F1 before 1B0: each waits for the other.",
        ),
        # numbers that no machine could hold, or Python count
        (
            f"{'9' * 5000}F0\n",
            f"mine: line 1, column 1: cell '{'9' * 40}' is not <stage><kind><microbatch> with "
            "kind one of F, B, I, W, E, S, T, G, such as 2F0.",
        ),
        (
            "0F0,0B0,0F999999999,0B999999999\n",
            "mine: 1000000000 microbatches of 1 stages are "
            "2*1000000000*1 = 2000000000 tasks or more, but there are 4.",
        ),
        (
            "0F0,0B0,999999999F0\n",
            "mine: stage 999999999 has tasks, but no rank has one of stage 1.",
        ),
    ],
)
def test_a_file_that_is_no_schedule_is_refused_with_the_place(text, message):
    if message is None:
        from_csv(text, "mine")
        return
    with pytest.raises(ScheduleError) as error:
        from_csv(text, "mine")
    assert str(error.value).splitlines()[0] == message
