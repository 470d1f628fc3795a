"""Runs that stored no words: those rebuilt from their settings ask for the same run."""

import shlex
from dataclasses import asdict

import pytest
import yaml
from support.selection import few

from ppctl.cli.compose import compose
from ppctl.cli.help import EXAMPLES
from ppctl.cli.older_runs import reconstructed
from ppctl.config.launch import not_launched


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


REQUESTS = [
    "recipes=stdlib_2x4",
    "recipes=bench",
    "mesh=2x2x2 schedule=interleaved schedule.num_chunks=4 schedule.group_size=4 run.eval_every=null",
    "model=mlp data=regression model.activation=tanh run.dtype=float64 optim.clip_norm=null optim.eps=1e-30",
    "partition=explicit partition.layers=[3,2,2,1] mesh=1x4 schedule=1f1b executor=mpmd executor.post_validation=true",
    "partition=explicit partition.layers=\"'Et*3|(tt|)*2,tL'\" mesh=1x4 schedule=1f1b",
    "hardware=h100",
    "hardware=h100 hardware.peak_flops.bfloat16=9e14 +hardware.peak_flops.float64=67e12 hardware.memory_gib=70",
    "hardware=host costs=measure costs.cache_dir=/tmp/x",
    "run.tensorboard=false run.checkpoint.every=null run.checkpoint.on_failure=continue run.profile.start=3",
    "run.resume=never run.distributed=auto",
    *(line for line in EXAMPLES["train"] if "--multirun" not in line and "launch" not in line),
]


TEXTS = (
    "it's",
    "3",
    '"q" and \\"',
    "a b",
    "c,d",
    "007",
    "null",
    "True",
    "1e5",
    "a=b",
    "[x]",
    "{y}",
    "x\\",
    "a\\\\b",
    "é",
    "#",
)


def assert_same(before):
    words, _ = reconstructed(yaml.safe_load(yaml.safe_dump(asdict(before))), before.run.dir)
    after = compose(words, [], [])
    assert not isinstance(after, int)
    before.run.resume = "auto"
    assert asdict(after) == asdict(before)
    return words


@pytest.mark.parametrize("line", few(REQUESTS, 4))
def test_the_words_of_a_run_ask_for_the_same_run(line):
    words = [word for word in shlex.split(line) if word not in ("ppctl", "train")]
    before = compose(words, [], [])
    assert not isinstance(before, int)
    assert len(assert_same(before)) <= len(words) + 16  # the differences, not everything


@pytest.mark.parametrize("text", few(TEXTS, 3))
def test_odd_texts_reach_the_same_setting(text):
    before = compose(["data=text", "data.path=x", "run.name=x"], [], [])
    assert not isinstance(before, int)
    before.data.path, before.run.name, before.run.dir = text, text, f"{text}/runs"
    assert_same(before)


def test_a_run_that_the_launcher_started_is_launched_again():
    joined = ["run.distributed=explicit", "run.coordinator=127.0.0.1:4711", "run.num_processes=2", "run.process_id=0"]
    config = compose(["recipes=tiny", *not_launched(), *joined], [], [])
    assert not isinstance(config, int)
    words, notes = reconstructed(asdict(config), "runs/tiny")
    assert "launch.processes=2" in words
    assert not any("distributed" in word or "coordinator" in word or "process_id" in word for word in words)
    assert notes == []


def test_processes_that_were_started_elsewhere_are_not_forgotten():
    joined = ["run.distributed=explicit", "run.coordinator=host:4711", "run.num_processes=2", "run.process_id=0"]
    config = compose(["recipes=tiny", *joined], [], [])
    assert not isinstance(config, int)
    words, notes = reconstructed(asdict(config), "runs/tiny")
    assert "run.num_processes=2" in words
    assert notes == ["2 processes: each with its own run.process_id=0, 1, ..."]


def test_settings_that_no_request_can_have_are_named():
    before = compose(["recipes=tiny"], [], [])
    assert not isinstance(before, int)
    config = asdict(before)
    config["schedule"] = {"name": "ours", "num_microbatches": 4}
    config["model"]["dropout"] = 0.5
    config["mesh"]["ep"] = 2
    del config["data"]
    _, notes = reconstructed(config, "runs/tiny")
    assert {
        "schedule=ours is none of ppctl's own: add --config-dir, and what was set of it",
        "no settings now: model.dropout",
        "the mesh of config.yaml has other settings than there are now",
        "config.yaml has no data",
    } <= set(notes)
