"""The words for a composed config: composing them gives the same config."""

import shlex
from dataclasses import asdict

import pytest
import yaml

from ppctl.cli.choices import request_words
from ppctl.cli.command_options import examples_of
from ppctl.cli.compose import compose


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


REQUESTS = [
    "recipes=stdlib_2x4",
    "recipes=bench",
    "mesh=2x2x2 schedule=interleaved schedule.num_chunks=4 run.eval_every=null",
    "model=mlp data=regression model.activation=tanh run.dtype=float64 optim.clip_norm=null "
    "optim.eps=1e-30",
    "partition=explicit partition.layers=[3,2,2,1] mesh=1x4 schedule=1f1b executor=mpmd "
    "executor.post_validation=true",
    "partition=explicit partition.layers=\"'Et*3|(tt|)*2,tL'\" mesh=1x4 schedule=1f1b",
    "model=gemma3_4b",
    "model=llama3_8b "
    "'model.rope.scaling={rope_type:yarn,factor:4,original_max_position_embeddings:64}'",
    "hardware=h100",
    "hardware=h100 hardware.peak_flops.bfloat16=9e14 +hardware.peak_flops.float64=67e12 "
    "hardware.memory_gib=70",
    "hardware=host hardware.link_latency_s=3e-6",
    "run.trackers=[] run.checkpoint.every=null run.checkpoint.on_failure=continue run.profile=3",
    "run.resume=never run.distributed=auto",
    *(line for line in examples_of("train") if "--multirun" not in line and "launch" not in line),
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
    words = request_words(yaml.safe_load(yaml.safe_dump(asdict(before))))
    after = compose(words)
    assert not isinstance(after, int)
    assert asdict(after) == asdict(before)
    return words


@pytest.mark.parametrize("line", REQUESTS)
def test_the_words_for_a_config_compose_to_it(line):
    words = [word for word in shlex.split(line) if word not in ("ppctl", "train")]
    before = compose(words)
    assert not isinstance(before, int)
    assert len(assert_same(before)) <= len(words) + 16  # the differences, not everything


@pytest.mark.parametrize("text", TEXTS)
def test_odd_texts_reach_the_same_setting(text):
    before = compose(["data=text", "data.path=x", "run.name=x"])
    assert not isinstance(before, int)
    before.data.path, before.run.name, before.run.dir = text, text, f"{text}/runs"
    assert_same(before)
