"""A model trained by local processes that one command starts, of two devices each: the same numbers,
whatever happens to a process.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.environment import BY_USER

from ppctl import cli

NUM_STEPS, EVERY = 200, 20
WORDS = (
    "train model=mlp model.num_layers=2 model.d_model=16 data=regression data.batch_size=8 "
    "data.num_rows=1024 data.num_features=5 data.num_targets=3 mesh=2x2 schedule=1f1b "
    f"schedule.num_microbatches=2 run.platform=cpu run.num_steps={NUM_STEPS} run.eval_every=null "
    f"run.checkpoint.every={EVERY} run.trackers=[] --json"
).split()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the processes in /proc"),
]


class Launch:
    """`ppctl train` with these tests' settings, and the processes that it starts."""

    def __init__(self, run_dir, *words, base=WORDS):
        self.run_dir = run_dir
        self.errors = run_dir.with_suffix(".stderr").open("w+")
        command = [sys.executable, "-m", "ppctl.cli", *base, f"run.dir={run_dir}", *words]
        self.popen = subprocess.Popen(
            command, env=BY_USER, text=True, stdout=subprocess.PIPE, stderr=self.errors
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.popen.kill()
        self.popen.communicate()
        self.errors.close()

    def processes(self):
        found = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text()
        return [int(pid) for pid in found.split()]

    def wait_until(self, reached, timeout_s=240):
        limit = time.monotonic() + timeout_s
        while not reached():
            assert self.popen.poll() is None, self.said()
            assert time.monotonic() < limit, self.said()
            time.sleep(0.01)

    def said(self):
        return Path(self.errors.name).read_text()

    def end(self, timeout_s=300):
        """(exit code, stdout)."""
        out, _ = self.popen.communicate(timeout=timeout_s)
        return self.popen.returncode, out


def records(run_dir, name="metrics.jsonl"):
    path = run_dir / name
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def results(run_dir):
    return [
        [record[key] for key in ("step", "loss", "grad_norm", "lr")] for record in records(run_dir)
    ]


def skipped(run_dir):
    return records(run_dir, "skipped.jsonl")


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """The directory of an uninterrupted run of two processes, and its stdout."""
    run_dir = tmp_path_factory.mktemp("two") / "run"
    with Launch(run_dir, "launch.processes=2") as launch:
        code, out = launch.end()
        assert code == 0, launch.said()
    return run_dir, out


@pytest.mark.full
def test_after_kill_9_of_a_process_the_run_restarts_and_continues_bit_for_bit(
    tmp_path, two_processes
):
    run_dir = tmp_path / "run"
    with Launch(run_dir, "launch.processes=2", "launch.max_restarts=1") as launch:
        launch.wait_until(lambda: len(records(run_dir)) > EVERY + 5)
        before = launch.processes()
        os.kill(before[1], signal.SIGKILL)
        code, out = launch.end()
        said = launch.said()
    assert code == 0, said
    assert json.loads(out)["status"] == "finished"
    assert re.search(
        r"^ppctl: process 1 of 2 was killed by SIGKILL.* \(last step logged: \d+\)\.$",
        said,
        re.MULTILINE,
    )
    found = re.search(
        r"^ppctl: restart 1 of 1, from the checkpoint of step (\d+)\.$", said, re.MULTILINE
    )
    assert found is not None, said
    assert f"resuming after step {found[1]}\n" in said
    assert not any(map(is_there, before))
    assert results(run_dir) == results(two_processes[0])


@pytest.mark.full
def test_a_process_killed_while_all_compile_ends_the_run_with_its_name(tmp_path):
    with Launch(tmp_path / "run", "launch.processes=2") as launch:
        launch.wait_until(lambda: "[0] compiling" in launch.said())
        processes = launch.processes()
        os.kill(processes[0], signal.SIGKILL)
        code, out = launch.end(60)
        assert (code, json.loads(out)["error"]["kind"]) == (3, "process_lost")
        assert re.match(
            r"ppctl: process 0 of 2 was killed by SIGKILL", launch.said().splitlines()[-1]
        )
    assert len(processes) == 2
    assert not any(map(is_there, processes))


ROWS = """
import numpy as np

def rows():
    draw = np.random.default_rng(0)
    inputs = draw.standard_normal((40, 5)).astype(np.float32)
    inputs[17] = np.nan
    return {"inputs": inputs, "targets": draw.standard_normal((40, 3)).astype(np.float32)}
"""


@pytest.mark.full
def test_a_stop_request_saves_a_common_step_and_one_process_can_resume_it(
    tmp_path, capsys, monkeypatch
):
    """One process sees a bad gradient in each epoch of five steps, and both skip the step."""
    (tmp_path / "launched_rows.py").write_text(ROWS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run_dir, alone_dir = tmp_path / "run", tmp_path / "alone"
    same = [word for word in WORDS if not word.startswith("data")]
    same += ["data=custom", "data.target=launched_rows.rows", "data.batch_size=8"]
    same += ["data.eval_fraction=0", "run.on_nonfinite=skip", "run.dtype=float64"]
    same += ["optim.warmup_steps=0", "optim.min_lr_fraction=1"]  # whatever run.num_steps is
    words = ("launch.processes=2", "launch.max_restarts=1", "run.num_steps=100000")
    with Launch(run_dir, *words, base=same) as launch:
        launch.wait_until(lambda: len(records(run_dir)) > 5)
        launch.popen.send_signal(signal.SIGINT)
        code, out = launch.end()
        assert "restart" not in launch.said()
    step = json.loads(out)["step"]
    assert (code, records(run_dir)[-1]["step"]) == (130, step)
    assert (run_dir / "checkpoints" / str(step)).is_dir()
    assert skipped(run_dir)[0]["examples"].count(17) == 1
    for directory in (run_dir, alone_dir):
        assert cli.main([*same, f"run.dir={directory}", f"run.num_steps={step + 4}"]) == 0
    assert f"resuming after step {step}\n" in capsys.readouterr().err
    assert skipped(run_dir) == skipped(alone_dir)
    numbers = [np.array(results(directory), float) for directory in (run_dir, alone_dir)]
    np.testing.assert_allclose(*numbers, rtol=1e-9)
