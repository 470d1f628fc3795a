"""Runs of ranks of unequal sizes: resumed on other meshes, and trained by several processes."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from support.environment import BY_USER
from support.small_runs import ROWS, losses

from ppctl import cli, load_run

MPMD = [
    "executor=mpmd",
    "schedule=1f1b",
    "run.dtype=float64",
    "data.batch_size=12",
    "optim.lr_schedule=constant",
    "optim.warmup_steps=0",
]
ROWS_64 = [
    word for word in ROWS.split() if not word.startswith(("mesh=", "run.dtype=", "data.batch"))
]
UNEQUAL, EQUAL = "mesh.ranks=[{dp:1},{fsdp:3}]", "mesh=1x2"


def train(run_dir, *words):
    assert cli.main(["train", *ROWS_64, *MPMD, f"run.dir={run_dir}", *words]) == 0


def params(run_dir):
    return jax.tree.leaves(load_run(run_dir).params())


@pytest.fixture
def whole(tmp_path):
    """A run of 6 steps without interruption, on ranks of unequal sizes."""
    train(tmp_path / "whole", UNEQUAL)
    return tmp_path / "whole"


@pytest.mark.full
def test_a_run_resumes_bit_for_bit_and_on_equal_ranks_and_back(whole, tmp_path):
    train(tmp_path / "stopped", UNEQUAL, "run.num_steps=3")
    train(tmp_path / "stopped", UNEQUAL)
    assert losses(tmp_path / "stopped") == losses(whole)
    assert all(map(np.array_equal, params(tmp_path / "stopped"), params(whole)))
    other = tmp_path / "other"
    train(other, EQUAL, "run.num_steps=2")
    train(other, UNEQUAL, "run.num_steps=4")
    train(other, EQUAL, "executor=spmd")
    assert losses(other) == pytest.approx(losses(whole), rel=1e-12)
    for a, b in zip(params(other), params(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [UNEQUAL, "mesh.ranks=[{dp:2},{fsdp:1},{dp:3}]"])
def test_processes_train_the_same_as_one(tmp_path, ranks):
    number = 2 if ranks == UNEQUAL else 3
    words = [*ROWS_64, *MPMD, ranks, "model.num_layers=3", f"launch.processes={number}"]
    alone = [*ROWS_64, *MPMD, EQUAL, "model.num_layers=3"]
    for name, each in (("several", words), ("alone", alone)):
        command = [sys.executable, "-m", "ppctl.cli", "train", *each, f"run.dir={tmp_path / name}"]
        subprocess.run(command, env=BY_USER, check=True, capture_output=True, timeout=300)
    assert losses(tmp_path / "several") == pytest.approx(losses(tmp_path / "alone"), rel=1e-10)
    for a, b in zip(params(tmp_path / "several"), params(tmp_path / "alone"), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
