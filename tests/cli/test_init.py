"""`ppctl init`: each starter is written whole, trains, is verified and predicts."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ppctl import cli
from ppctl.cli.commands.init import NETWORK as STARTER_NETWORK, STARTER, parser, serve
from ppctl.errors import ConfigError
from ppctl.training.pipeline.user_code import custom_data

ROOT = Path(__file__).parents[2]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.full
def test_the_flax_starter_trains_and_returns_its_module(here, capsys, monkeypatch):
    assert cli.main(["init", "own"]) == 0
    monkeypatch.chdir(here / "own")
    asked = ["--config-dir", ".", "recipes=mine"]
    assert cli.main(["train", *asked, "run.num_steps=30", "run.eval_every=15"]) == 0
    lines = [json.loads(line) for line in Path("runs/mine/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < 0.5 < lines[0]["loss"]
    words = [*asked, "verify.steps=1", "run.dtype=float64", "executor=mpmd", "schedule=zb_h1"]
    capsys.readouterr()
    assert cli.main(["verify", *words]) == 0
    # attention of Flax computes scores in float32
    assert "equal within 0.0001 (float64, in parts narrower)" in capsys.readouterr().out
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_ENABLE_X64": "0"}
    done = subprocess.run(
        [sys.executable, "predict.py"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "parameter blocks/0/attention/key/kernel (32, 4, 8)" in done.stdout


@pytest.mark.full
def test_the_starter_of_functions_trains_and_is_verified(here, capsys, monkeypatch):
    assert cli.main(["init", "own", "--functions"]) == 0
    assert "cd own && ppctl train --config-dir . recipes=mine" in capsys.readouterr().out
    monkeypatch.chdir(here / "own")
    asked = ["--config-dir", ".", "recipes=mine"]
    assert cli.main(["train", *asked, "run.num_steps=30", "run.eval_every=15"]) == 0
    lines = [json.loads(line) for line in Path("runs/mine/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < 0.5 < lines[0]["loss"] == pytest.approx(1.9780, abs=1e-4)
    assert (
        cli.main(
            [
                "verify",
                *asked,
                "verify.steps=1",
                "run.dtype=float64",
                "executor=mpmd",
                "schedule=zb_h1",
            ]
        )
        == 0
    )


@pytest.mark.full  # three commands that start JAX
def test_the_starter_network_trains_is_verified_and_predicts(here, capsys, monkeypatch):
    assert cli.main(["init", "own", "--network"]) == 0
    monkeypatch.chdir(here / "own")
    asked = ["--config-dir", ".", "recipes=mine"]
    assert cli.main(["train", *asked, "run.num_steps=30", "run.eval_every=15"]) == 0
    losses = [
        json.loads(line)["loss"]
        for line in Path("runs/mine/metrics.jsonl").read_text().splitlines()
    ]
    assert losses[-1] < 0.5 < 1 < losses[0]
    capsys.readouterr()
    assert cli.main(["verify", *asked, "verify.steps=1", "--json"]) == 0
    found = {
        leaf["name"]: leaf["layer"] for leaf in json.loads(capsys.readouterr().out)["gradients"]
    }
    assert found == {
        "conv/0/bias": 0,
        "conv/0/w": 0,
        "conv/1/bias": 1,
        "conv/1/w": 1,
        "head/w": 2,
    }  # the author's own
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_ENABLE_X64": "0"}
    done = subprocess.run(
        [sys.executable, "predict.py"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "parameter conv/0/w (3, 3, 1, 8)" in done.stdout
    assert re.search(r"held out: loss 0\.\d+, \d+% of 64 right", done.stdout), done.stdout


def test_the_starter_network_is_written_with_its_arrays(here, capsys):
    assert cli.main(["init", "own", "--network"]) == 0
    written = sorted(
        str(file.relative_to("own")) for file in Path("own").rglob("*") if file.is_file()
    )
    code = ["make_data.py", "my_data.py", "my_network.py", "predict.py"]
    assert written == sorted(["README.md", *code, "images.npy", "labels.npy", "recipes/mine.yaml"])
    assert all(
        (Path("own") / file).read_bytes() == (STARTER_NETWORK / file).read_bytes() for file in code
    )
    assert "own/images.npy" in capsys.readouterr().out
    sys.path.insert(0, str(here / "own"))
    files = {"inputs": "own/images.npy", "targets": "own/labels.npy"}
    data = custom_data("my_data.images", 64, 0.125, files, seed=0)
    assert (data.num_examples, data.read(np.arange(2))["inputs"].shape) == (1792, (2, 8, 8))
    (here / "other").mkdir()
    (here / "other/images.npy").write_text("mine")
    assert cli.main(["init", "other", "--network"]) == 2
    assert "other/images.npy exists already, and nothing is overwritten" in capsys.readouterr().err


def test_init_overwrites_no_file(here, capsys):
    (here / "own").mkdir()
    (here / "own/my_data.py").write_text("mine")
    assert cli.main(["init", "own"]) == 2
    assert "own/my_data.py exists already, and nothing is overwritten" in capsys.readouterr().err
    assert [file.name for file in (here / "own").iterdir()] == ["my_data.py"]
    (here / "file").write_text("")
    for words, message in (
        ([], "are required: DIR. Write ppctl init DIR"),
        (["a", "b"], "b is one word too many"),
        (["--x"], "--x is not an option"),
        (["file/x"], "file/x cannot be written"),
    ):
        with pytest.raises(ConfigError, match=message):
            serve(parser().read(words))


def test_all_of_the_starter_is_written(here):
    serve(parser().read(["own"]))
    written = sorted(
        str(file.relative_to("own")) for file in Path("own").rglob("*") if file.is_file()
    )
    assert written == ["my_data.py", "my_model.py", "predict.py", "recipes/mine.yaml"]
    assert all(
        (Path("own") / file).read_bytes() == (STARTER / file).read_bytes() for file in written
    )
