"""A few kills of `make chaos`: of every process of a run of two, while it joins, compiles and saves."""

import random
import sys

import pytest
from support.chaos import COMMAND, Round, chaos

KILLS = (
    Round("two", "joining", "process 1"),
    Round("two", "saving", "process 0"),
    Round("two", "saving", "process 1"),
    Round("two", "compiling", "process 0"),
    Round("two", "saving", COMMAND),
)


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the processes in /proc")
def test_kill_9_of_any_process_leaves_none_and_costs_at_most_what_the_last_checkpoint_lacks(tmp_path):
    done = chaos(KILLS, len(KILLS), random.Random(0), tmp_path, num_steps=24)
    assert [killed.victim for killed in done] == [turn.victim for turn in KILLS]
