"""The words for a composed config: composing them gives the same config."""

import shlex
from dataclasses import asdict

import pytest
import yaml
from support.selection import full

from ppctl.cli.choices import request_words
from ppctl.cli.command_options import examples_of
from ppctl.cli.compose import compose
from ppctl.cli.multirun import compose_sweep
from ppctl.config import Schedule
from ppctl.errors import ConfigError


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


@pytest.mark.parametrize("text", [*TEXTS[::3], *map(full, sorted({*TEXTS} - {*TEXTS[::3]}))])
def test_odd_texts_reach_the_same_setting(text):
    before = compose(["data=text", "data.path=x", "run.name=x"])
    assert not isinstance(before, int)
    before.data.path, before.run.name, before.run.dir = text, text, f"{text}/runs"
    assert_same(before)


def test_another_option_replaces_the_settings_that_only_the_recipe_s_option_has(tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/mine.yaml").write_text(
        "# @package _global_\n"
        "defaults: [override /mesh: 1x4, override /schedule: interleaved]\n"
        "schedule: {num_microbatches: 16, num_chunks: 2}\n"
        "data: {batch_size: 16}\n"
        "optim: {weight_decay: 0.5, lr: 0.5, warmup_steps: 3}\n"
    )
    config = compose(["recipes=mine", "schedule=1f1b", "optim=sgd"], str(tmp_path))
    assert config.schedule == Schedule(name="1f1b", num_microbatches=16)
    assert (config.optim.name, config.optim.lr, config.optim.warmup_steps) == ("sgd", 0.5, 3)
    with pytest.raises(ConfigError, match="num_chunks is not a setting of schedule=1f1b"):
        compose(["recipes=mine", "schedule=1f1b", "schedule.num_chunks=2"], str(tmp_path))
    words = ["recipes=mine", "schedule=1f1b,looped_bfs", "run.dir=sweep"]
    sweep = compose_sweep(words, str(tmp_path), ["train"])
    found = [job.config.schedule for job in sweep.jobs]
    assert [each.name for each in found] == ["1f1b", "looped_bfs"]
    assert found[1].num_chunks == 2
    (tmp_path / "recipes/mine.yaml").write_text("# @package _global_\nschedule: {num_chnks: 2}\n")
    with pytest.raises(ConfigError, match="num_chnks"):
        compose(["recipes=mine", "schedule=1f1b"], str(tmp_path))
