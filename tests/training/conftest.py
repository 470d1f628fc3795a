"""Fixtures of several tests of runs."""

import shutil
import sys

import pytest
from support.small_runs import ROWS, checkpoints

from ppctl import cli


@pytest.fixture
def train(tmp_path, capsys):
    """Return a function that trains: (exit code, stdout, stderr)."""

    def train(*words, tiny=ROWS, run_dir=tmp_path / "run"):
        code = cli.main(["train", *tiny.split(), f"run.dir={run_dir}", *words])
        out, err = capsys.readouterr()
        return code, out, err

    return train


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory):
    """The directory of a run of six steps with a checkpoint every two."""
    run_dir = tmp_path_factory.mktemp("six_steps") / "run"
    assert cli.main(["train", *ROWS.split(), f"run.dir={run_dir}", "run.checkpoint.every=2"]) == 0
    return run_dir


@pytest.fixture
def copy(six_steps, tmp_path):
    """A function that copies that run as it was when the given step had been saved."""

    def copy(step):
        run_dir = tmp_path / "run"
        shutil.copytree(six_steps, run_dir)
        for later in [saved for saved in checkpoints(run_dir) if saved > step]:
            shutil.rmtree(run_dir / "checkpoints" / str(later))
        return run_dir

    return copy


@pytest.fixture
def command(tmp_path):
    """A function that returns a command which runs this code."""

    def command(code):
        (tmp_path / "tell.py").write_text(f"import json, os, sys, time\n{code}\n")
        return f"{sys.executable} {tmp_path / 'tell.py'}"

    return command


@pytest.fixture
def tells(command, tmp_path):
    """Return a command that appends its input to events.jsonl."""
    return command(f"open({str(tmp_path / 'events.jsonl')!r}, 'a').write(sys.stdin.read())")
