"""A few kills of `make chaos`: of every process of a run of two, while it joins, compiles and
saves, and of sweeps.
"""

import random
import sys

import pytest
from support.chaos.rounds import Round, chaos
from support.chaos.start import COMMAND

KILLS = {
    "run": (
        Round("two", "joining", "process 1"),
        Round("two", "saving", "process 0"),
        Round("two", "saving", "process 1"),
        Round("two", "compiling", "process 0"),
        Round("two", "saving", COMMAND),
    ),
    "restarts": (
        Round("two mpmd restarted", "joining", "process 1"),
        Round("two mpmd restarted", "saving", "process 0", kills=2),
        Round("two mpmd restarted", "saving", COMMAND),
    ),
    "sweep": (
        Round("sweep restarted", "saving", "process 1 of a job"),
        Round("sweep restarted", "saving", "job"),
        Round("sweep side by side", "saving", "process 0 of a job"),
        Round("sweep side by side", "saving", COMMAND),
    ),
}


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the processes in /proc")
@pytest.mark.parametrize("name", KILLS)
def test_kill_9_ends_all_processes_and_loses_only_steps_since_the_checkpoint(name, tmp_path):
    rounds = KILLS[name]
    wanted = [turn.victim for turn in rounds for _ in range(turn.kills or 0)]
    done, chains = chaos(rounds, len(wanted), random.Random(0), tmp_path, num_steps=24)
    assert [killed.victim for killed in done] == wanted
    assert all(chain.finished for chain in chains)
