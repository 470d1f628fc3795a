"""`ppctl generate` and `ppctl evaluate` of a run of a few steps."""

from __future__ import annotations

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

import ppctl
from ppctl import cli
from ppctl.training.language_model import open_language_model
from ppctl.training.text_evaluation import Likelihood

TEXT = "the cat sat on the mat, and the dog sat on the log.\n" * 60
TRAIN = (
    "model.num_layers=2 model.d_model=16 model.num_heads=2 model.num_kv_heads=1 model.seq_len=16 mesh=1x1 "
    "schedule=gpipe schedule.num_microbatches=1 data=text data.path=text.txt data.batch_size=8 data.cache_dir=cache "
    "optim.lr=0.02 optim.warmup_steps=0 run.num_steps=20 run.platform=cpu run.dtype=float32 run.tensorboard=false "
    "run.eval_every=20 run.eval_batches=1 run.dir=run run.compilation_cache=null executor=reference"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    place = tmp_path_factory.mktemp("language")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        (place / "text.txt").write_text(TEXT)
        assert cli.main(["train", *TRAIN.split()]) == 0
    return place


@pytest.fixture
def here(trained, monkeypatch):
    monkeypatch.chdir(trained)
    return trained


def printed(capsys, *words):
    capsys.readouterr()
    assert cli.main([*words]) == 0
    return capsys.readouterr().out


def test_greedy_text_is_that_of_the_whole_model_again_for_each_token(here, capsys):
    found = json.loads(
        printed(capsys, *["generate", "run", "--prompt", "the", "--max-tokens", "9", "--temperature", "0", "--json"])
    )
    (completion,) = found["completions"]
    ids, run = list(b"the"), ppctl.load_run("run")
    for token in completion["tokens"]:
        assert token == int(jnp.argmax(run.predict(np.array([ids]))[0, -1]))
        ids.append(token)
    assert len(completion["tokens"]) == 9
    assert completion["text"] == bytes(completion["tokens"]).decode(errors="replace")
    assert completion["finished"] == "length"


def test_a_text_depends_on_seed_and_prompt_alone(here, capsys):
    words = ["generate", "run", "--max-tokens", "6", "--top-p", "0.9", "--top-k", "20", "--json"]
    alone = json.loads(printed(capsys, *words, "--prompt", "the"))["completions"]
    both = json.loads(printed(capsys, *words, "--prompt", "the", "--prompt", "and the dog"))["completions"]
    assert both[0] == alone[0]
    other = json.loads(printed(capsys, *words, "--prompt", "the", "--seed", "1"))["completions"]
    assert other != alone


def test_a_terminal_gets_prompt_and_text(here, capsys):
    out = printed(
        capsys, "generate", "run/checkpoints/20", "--prompt", "the", "--max-tokens", "5", "--temperature", "0"
    )
    assert out.startswith("the")
    assert len(out.rstrip("\n")) <= 3 + 5


def test_evaluation_is_the_mean_over_all_targets(here, capsys):
    found = json.loads(printed(capsys, "evaluate", "run", "data.path=text.txt", "--json"))
    run = ppctl.load_run("run")
    ids = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32)
    assert found["num_tokens"] == found["num_sequences"] * 16
    starts = np.arange(found["num_sequences"]) * 16
    windows = np.stack([[*ids, 0][s : s + 17] for s in starts])
    expected = run.loss({"inputs": windows[:, :-1], "targets": windows[:, 1:]})
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2), rel=0.01)  # the last byte ends the text
    held_out = json.loads(printed(capsys, "evaluate", "run", "--json"))
    assert held_out["num_sequences"] < found["num_sequences"]


def test_an_answer_is_the_likeliest_choice(here, capsys):
    rows = [
        {"prompt": "the cat sat on the ", "choices": ["mat", "qzxv"], "answer": 0},
        {"prompt": "the cat sat on the ", "choices": ["mat", "qzxv"], "answer": 1},
    ]
    (here / "q.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    found = json.loads(printed(capsys, "evaluate", "run", "--choices", "q.jsonl", "--json"))
    assert (found["num_questions"], found["accuracy"], found["accuracy_per_byte"]) == (2, 0.5, 0.5)


def test_a_score_is_the_sum_over_the_continuation(here):
    model = open_language_model(here / "run")
    logits = np.asarray(ppctl.load_run("run").predict(np.array([list(b"the ca")]))[0], np.float64)
    of_token = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    found = Likelihood(model).of_text("the", " ca")
    assert found.log_probability == pytest.approx(
        sum(of_token[i, b] for i, b in zip((2, 3, 4), b" ca", strict=True)), abs=1e-4
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("generate run", "needs a prompt"),
        ("generate --prompt a", "`ppctl generate` needs a run"),
        ("generate nowhere --prompt a", "nowhere is no run"),
        ("generate run/checkpoints/7 --prompt a", "run/checkpoints/7 is no checkpoint"),
        ("generate run --prompt a --max-tokens 0", "--max-tokens 0 is too few. Use 1 or more"),
        ("generate run --prompt a --temperature -1", "--temperature -1.0 is none"),
        ("generate run --prompt a --temperature 0 --top-k 3", "--temperature 0 takes the likeliest"),
        ("generate run --prompt a --top-p 2", "--top-p 2.0 is no probability"),
        ("generate run --prompt a --chat", "has no chat template"),
        ("generate run --prompt a --devices 99", "--devices 99 are more than"),
        ("evaluate run model.d_model=3", "takes data=..., data.SETTING=... and model.seq_len=N alone"),
        ("evaluate run --choices none.jsonl", "--choices none.jsonl cannot be read"),
        ("evaluate run --choices text.txt", "text.txt:1 is no question"),
        ("evaluate run --choices text.txt data=stdlib", "has its own text"),
        ("evaluate run data=regression", "tokens"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(here, capsys, words, message):
    capsys.readouterr()
    assert cli.main(words.split()) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
