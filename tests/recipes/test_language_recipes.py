"""The recipes of language models, with models that are small where theirs would take minutes."""

import json

import numpy as np
import pytest

from ppctl import cli
from ppctl.cli.compose import compose
from ppctl.config.config_dirs import ROOT
from ppctl.data.token_windows import NO_TOKEN
from ppctl.data.tokenizer import load_tokenizer
from ppctl.training.pipeline.job import open_data

TINY = (
    "model.num_layers=2 model.d_model=16 model.num_heads=2 run.num_steps=1 run.eval_every=null "
    "run.trackers=[]"
)
CHATS = ROOT / "recipes/documents/chats.jsonl"


def tokenize(*words):
    assert cli.main(["tokenize", *map(str, words)]) == 0


WHOLE = "mesh=1x1 schedule=gpipe schedule.num_microbatches=1 executor=reference"


@pytest.mark.parametrize(
    "layout", [WHOLE, pytest.param("", marks=pytest.mark.full)], ids=["whole", "as it is"]
)
def test_of_chats_the_answers_alone_are_learned(layout, tmp_path, monkeypatch):
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
    assert cli.main(["train", *words, *layout.split()]) == 0


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
def test_what_is_predicted_is_what_the_recipe_says_and_fits(recipe, step_s, capsys):
    assert cli.main(["plan", f"recipes={recipe}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert found["step_time_s"] == pytest.approx(step_s, rel=0.1)
