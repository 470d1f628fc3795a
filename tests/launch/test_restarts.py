"""After a crash a run starts again from its newest checkpoint; what would be met again is final."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support.environment import BY_USER

from ppctl import config as c
from ppctl.launch import local_processes
from ppctl.launch.local_processes import launch, newest_checkpoint, with_restarts
from ppctl.launch.supervisor import Ending
from ppctl.training.checkpoint.stored_checkpoints import StoredCheckpoints


def restarted(endings, steps, max_restarts):
    """Return (exit code, output, starts) for starts that end as in `endings` and find checkpoints
    of `steps`.
    """
    said, starts, found = [], [], iter(steps)

    def start(restart):
        starts.append(restart)
        return endings[restart]

    return with_restarts(start, max_restarts, lambda: next(found), said.append), said, len(starts)


CRASH, KILLED, DONE = (Ending(code, False, None) for code in (1, 137, 0))


def test_a_crashed_run_restarts_from_the_newest_checkpoint_with_a_line():
    assert restarted([CRASH, KILLED, DONE], [None, None, 40], 3) == (
        0,
        [
            "restart 1 of 3, from the start; the last start saved nothing",
            "restart 2 of 3, from the checkpoint of step 40",
        ],
        3,
    )


def test_each_restart_without_progress_is_printed_and_the_last_exit_code_is_the_runs():
    code, said, starts = restarted([CRASH, CRASH, KILLED], [20, 40, 40], 2)
    assert (code, starts) == (137, 3)
    assert said == [
        "restart 1 of 2, from the checkpoint of step 40",
        "restart 2 of 2, from the checkpoint of step 40; the last start saved nothing",
        "no restart is left (launch.max_restarts=2)",
    ]


@pytest.mark.parametrize("is_lead_killed", [True, False])
def test_the_launcher_reports_the_loss_of_process_0(tmp_path, monkeypatch, is_lead_killed):
    ending = Ending(137, False, "process 0 of 2 was killed by SIGKILL", is_lead_killed)
    monkeypatch.setattr(local_processes, "run_group", lambda *_, **__: ending)
    run = c.Run(dir=str(tmp_path), on_event=f"cp /dev/stdin {tmp_path / 'event'}")
    assert (
        launch(c.Config(launch=c.Launch(2), run=run, mesh=c.Mesh(1, 2)), [], [], as_json=False) == 3
    )
    assert (tmp_path / "event").exists() == is_lead_killed
    if is_lead_killed:
        event = json.loads((tmp_path / "event").read_text())
        assert (event["event"], event["reason"]) == ("lost", ending.cause)


@pytest.mark.parametrize(
    "ending", [DONE, *(Ending(code, False, None) for code in (2, 4, 130, 143))]
)
def test_failures_that_a_restart_would_repeat_are_final(ending):
    assert restarted([ending], [None], 3) == (ending.code, [], 1)


def test_no_restart_after_a_stop_request():
    assert restarted([Ending(137, True, None)], [None], 3) == (137, [], 1)


def test_the_newest_checkpoint_is_the_runs(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    for name in ("5", "20", "100.orbax-checkpoint-tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_checkpoint(tmp_path) == StoredCheckpoints(tmp_path / "checkpoints").latest() == 20


# A stand-in for `ppctl train` in the processes that are started: Python imports sitecustomize at
# its start.
STAND_IN = """
import json, os, pathlib, sys, types

def train(config, words, *, as_json):
    run_dir = pathlib.Path(config.run.dir)
    start = len(list(run_dir.glob("checkpoints/*")))
    (run_dir / "checkpoints" / str(10 * (start + 1))).mkdir(parents=True)
    facts = {"resume": config.run.resume, "launch": vars(config.launch), "words": words}
    print(json.dumps(facts), flush=True)
    if start < 2:
        os.kill(os.getpid(), 9)
    return 0

sys.modules["ppctl.cli.commands.train"] = types.ModuleType("ppctl.cli.commands.train")
sys.modules["ppctl.cli.commands.train"].train = train
"""


@pytest.fixture
def stand_in(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stand_in")
    (folder / "sitecustomize.py").write_text(STAND_IN)
    return BY_USER | {
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [BY_USER.get("PYTHONPATH")])])
    }


def test_the_command_restarts_from_its_checkpoints_and_loads_no_jax(tmp_path, stand_in):
    words = [
        "train",
        f"run.dir={tmp_path / 'run'}",
        "run.resume=never",
        "launch.max_restarts=2",
        "--json",
    ]
    code = (
        f"import sys; from ppctl.cli import main; print(main({words!r}), 'jax' in sys.modules, "
        "file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=stand_in, capture_output=True, text=True, check=True
    )
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["resume"] for each in printed] == ["never", "auto", "auto"]
    assert all(each["launch"] == vars(c.Launch()) for each in printed)
    assert [each["words"] for each in printed] == [
        words[1:-1]
    ] * 3  # those of the launcher, to be stored
    assert done.stderr.splitlines() == [
        "ppctl: process 0 of 1 was killed by SIGKILL.",
        "ppctl: restart 1 of 2, from the checkpoint of step 10.",
        "ppctl: process 0 of 1 was killed by SIGKILL.",
        "ppctl: restart 2 of 2, from the checkpoint of step 20.",
        "0 False",
    ]


@pytest.mark.full
def test_each_job_of_a_sweep_is_launched(tmp_path, stand_in):
    words = ["--multirun", "run.seed=1,2", f"run.dir={tmp_path}", "launch.max_restarts=2"]
    command = [sys.executable, "-m", "ppctl.cli", "train", *words]
    done = subprocess.run(command, env=stand_in, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr.count("restart 2 of 2") == 2
    assert {path.name for path in tmp_path.glob("*/checkpoints/30")} == {"30"}
