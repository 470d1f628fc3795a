"""The recipes of language models, with models that are small where theirs would take minutes."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.selection import full

from ppctl import cli
from ppctl.cli.compose import compose
from ppctl.config.config_dirs import ROOT
from ppctl.data.token_examples import NO_TOKEN
from ppctl.data.tokenizer import load_tokenizer
from ppctl.training.pipeline.job import open_data

TINY = (
    "model.num_layers=2 model.d_model=16 model.num_heads=2 run.num_steps=1 run.eval_every=null "
    "run.trackers=[]"
)
CHATS = ROOT / "recipes/documents/chats.jsonl"


def tokenize(*words):
    assert cli.main(["tokenize", *map(str, words)]) == 0


@pytest.mark.parametrize("trained", [False, full(True)])
def test_only_the_answers_of_chats_are_learned(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenize(CHATS, "--field", "messages", "--vocab-size", 320, "--out", "runs/chat_tokenizer")
    words = ["recipes=chat_answers", f"data.path={CHATS}", "data.cache_dir=cache", *TINY.split()]
    data, tokenizer = open_data(compose(words)), load_tokenizer("runs/chat_tokenizer", None)
    batch = data.read(np.arange(16))
    learned = tokenizer.decode(batch["targets"][batch["targets"] != NO_TOKEN].tolist())
    answers = [
        json.loads(line)["messages"][1]["content"] for line in CHATS.read_text().splitlines()
    ]
    found = [
        each for each in learned.replace("<|endoftext|>", "").split("<|im_end|>") if each.strip()
    ]
    assert len(found) >= 16
    assert {each.strip() for each in found} <= {*answers}
    assert not trained or cli.main(["train", *words]) == 0


@pytest.mark.full
def test_a_tokenizer_and_a_model_from_scratch(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tokenize(
        ROOT / "ppctl/**/*.py",
        "--vocab-size",
        4096,
        "--out",
        "runs/tokenizer",
        "--on-error",
        "skip",
    )
    small = (
        "model.num_layers=2 model.d_model=16 run.num_steps=1 run.eval_every=null run.trackers=[]"
    )
    assert (
        cli.main(
            [
                "train",
                "recipes=tokenizer_and_model_from_scratch",
                "data.cache_dir=cache",
                *small.split(),
            ]
        )
        == 0
    )
    capsys.readouterr()
    words = ["--prompt", "def __init__(self", "--max-tokens", "4", "--json"]
    assert cli.main(["generate", "runs/tokenizer_and_model_from_scratch", *words]) == 0
    assert len(json.loads(capsys.readouterr().out)["completions"][0]["tokens"]) == 4


@pytest.mark.full
@pytest.mark.parametrize(
    ("recipe", "step_s"), [("llama3_8b_h100x8", 3.365), ("qwen3_0p6b_lora", 0.214)]
)
def test_the_prediction_is_the_recipes_and_fits(recipe, step_s, capsys):
    assert cli.main(["plan", f"recipes={recipe}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert found["step_time_s"] == pytest.approx(step_s, rel=0.1)


RECIPE = "recipes=moe_from_scratch"
DENSE = "mesh=2x2 model.moe.num_experts=null model.moe.balance_loss=0 model.mlp_width=384"


def test_a_mixture_has_the_active_size_of_the_dense_model_in_its_header():
    mixture, dense = compose([RECIPE]), compose([RECIPE, *DENSE.split()])
    header = (ROOT / "recipes/moe_from_scratch.yaml").read_text().replace("\n#  ", "")
    assert f"ppctl train {RECIPE} {DENSE}" in header
    model = mixture.model
    assert model.moe.top_k * (model.moe.width or model.mlp_width) == dense.model.mlp_width
    assert mixture.mesh.num_devices == dense.mesh.num_devices


@pytest.mark.full
def test_a_mixture_trains_and_logs_the_loads_of_its_experts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", RECIPE, *TINY.split()]) == 0
    (line,) = Path("runs/moe_from_scratch/metrics.jsonl").read_text().splitlines()
    assert len(json.loads(line)["expert_load"]) == 2


@pytest.mark.full
def test_a_mixture_learns_more_than_the_dense_model_of_its_active_size(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = []
    for words in "run.name=mixture", f"run.name=dense {DENSE}":
        short = "run.num_steps=250 run.eval_every=250 run.trackers=[]"
        assert cli.main(["train", RECIPE, *words.split(), *short.split()]) == 0
        run_dir = Path("runs") / words.split()[0].removeprefix("run.name=")
        (line,) = (run_dir / "eval.jsonl").read_text().splitlines()
        found.append(json.loads(line)["eval_loss"])
    assert found[0] < found[1] - 0.01  # 1.842 and 1.864 with Python 3.11
