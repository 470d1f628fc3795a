"""`ppctl runs` shows how killed, interrupted and failed runs ended."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.environment import BY_USER

from ppctl import cli

BY_PATH = BY_USER | {"PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def ask(capsys, *words):
    assert cli.main(["runs", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def ask_json(capsys, *words):
    return json.loads(ask(capsys, *words, "--json"))


SMALL = (
    "model=mlp model.num_layers=4 model.d_model=16 data=regression data.batch_size=8 "
    "data.num_rows=512 mesh=1x2 schedule.num_microbatches=4 run.platform=cpu run.eval_every=null"
)


def train(*words):
    return subprocess.Popen(
        [sys.executable, "-m", "ppctl.cli", "train", *words],
        env=BY_PATH,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.full
@pytest.mark.slow
def test_kill_9_is_seen_and_the_shown_command_resumes(capsys):
    process = train(
        "recipes=tiny", "run.num_steps=100000", "run.checkpoint.every=20", "run.eval_every=null"
    )
    try:
        deadline_s = time.monotonic() + 120
        while not list(Path("runs").glob("tiny/checkpoints/[0-9]*[0-9]")):
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
            if Path("runs").is_dir():
                assert all(run["status"] == "running" for run in ask_json(capsys)["runs"])
    finally:
        process.kill()
        process.communicate()
    [run] = ask_json(capsys)["runs"]
    assert (run["status"], run["num_steps"]) == ("broken off", 100000)
    shown = ask_json(capsys, "show", "tiny")
    assert shown["checkpoints"]
    last = shown["checkpoints"][-1]
    words = [
        word for word in shlex.split(shown["resume"])[2:] if not word.startswith("run.num_steps=")
    ]
    process = train(*words, f"run.num_steps={last + 20}")
    assert process.communicate()[1] == ""
    assert process.returncode == 0
    [run] = ask_json(capsys)["runs"]
    assert (run["status"], run["step"], run["num_steps"], run["problems"]) == (
        "finished",
        last + 20,
        last + 20,
        [],
    )


@pytest.mark.full
@pytest.mark.slow
def test_an_interrupted_and_a_failed_run_have_a_reason(capsys):
    process = train(*SMALL.split(), "run.num_steps=100000", "run.name=tiny")
    while not (
        Path("runs/tiny/metrics.jsonl").exists() and Path("runs/tiny/metrics.jsonl").stat().st_size
    ):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 143
    [run] = ask_json(capsys)["runs"]
    assert (run["status"], run["reason"]) == ("interrupted", "SIGTERM")
    diverging = ["optim.lr=1e30", "optim.clip_norm=null", "run.name=nan", "optim.warmup_steps=0"]
    assert cli.main(["train", *SMALL.split(), *diverging]) == 4
    capsys.readouterr()
    run = ask_json(capsys)["runs"][0]
    assert (run["name"], run["status"]) == ("nan", "failed")
    assert run["reason"].startswith("step ")
    assert "not finite" in run["reason"] or "loss=nan" in run["reason"]
