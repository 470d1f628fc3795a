"""A separate held-out file: data.eval_path."""

import json

import numpy as np
import pytest
from support.small_runs import TOKENS, records

from ppctl import cli
from ppctl.cli.compose import compose
from ppctl.errors import PpctlError
from ppctl.training.pipeline.job import open_data

WORDS = "model.seq_len=4", "data.batch_size=2", "mesh=1x1", "schedule.num_microbatches=1"


@pytest.fixture
def files(tmp_path):
    """A file of 61 ids below 50, and one of 22 from 50 on."""
    for name, ids in (("train", np.arange(61) % 50), ("eval", 50 + np.arange(22))):
        np.save(tmp_path / f"{name}.npy", ids.astype(np.int32))
        text = "\n".join(json.dumps({"text": f"{name} {i}"}) for i in range(30))
        (tmp_path / f"{name}.jsonl").write_text(text)
    return tmp_path


def opened(files, kind, *words):
    suffix = "npy" if kind == "tokens" else "jsonl"
    paths = [f"data.{key}={files}/{name}.{suffix}" for key, name in PATHS]
    return open_data(compose([*WORDS, f"data={kind}", *paths, *words]))


PATHS = ("path", "train"), ("eval_path", "eval")


def test_the_whole_evaluation_file_is_held_out_and_not_trained_on(files):
    data = opened(files, "tokens", "data.vocab_size=80")
    assert (data.num_examples, data.num_eval_examples) == (15, 5)
    batches = data.batches()
    trained = np.concatenate([next(batches)["inputs"].ravel() for _ in range(16)])
    assert trained.max() < 50
    held_out = np.concatenate([b["inputs"].ravel() for b in data.eval_batches(2)])
    assert held_out.min() >= 50
    # each target of the file once, the last window is short
    found = data.read(np.array([*data.numbers(held_out=True)]))["targets"]
    assert sorted(found[found >= 0]) == list(range(51, 72))
    mixed = data.read(np.array([16, 0, 15, 1]))["inputs"][:, 0]
    assert [int(first) >= 50 for first in mixed] == [True, False, True, False]


def test_a_text_file_is_held_out_whole(files):
    data = opened(files, "text", f"data.cache_dir={files}")
    alone = opened(files, "text", f"data.cache_dir={files}", "data.eval_path=null")
    assert data.fingerprint != alone.fingerprint
    texts = data.read(np.array([*data.numbers(held_out=True)]))["inputs"]
    assert b"eval" in bytes(texts.ravel().astype(np.uint8))
    assert b"train" not in bytes(texts.ravel().astype(np.uint8))


@pytest.mark.parametrize("kind", ["tokens", "text"])
def test_a_share_of_0_besides_a_held_out_file_is_the_file(files, kind):
    words = "data.vocab_size=80" if kind == "tokens" else f"data.cache_dir={files}"
    data = opened(files, kind, words, "data.eval_fraction=0")
    assert data.fingerprint == opened(files, kind, words).fingerprint
    assert data.num_eval_examples > 0


@pytest.mark.parametrize("num_ids", [4, 7])
def test_a_held_out_file_below_a_batch_is_evaluated_whole_and_not_by_batches(files, num_ids):
    np.save(files / "short.npy", np.arange(num_ids, dtype=np.int32))
    data = opened(files, "tokens", f"data.eval_path={files}/short.npy")
    found = data.read(np.array([*data.numbers(held_out=True)]))["targets"]
    assert found[found >= 0].tolist() == [*range(1, num_ids)]
    message = (
        r"= 2 is more than the 1 examples held out of 16\. Use .* \(of data.eval_path: more text\)"
    )
    with pytest.raises(PpctlError, match=message):
        data.eval_batches(1)


def test_files_that_a_pattern_names_are_held_out_each_once(files):
    """Of the text of two files, in the order of their names; one that does not match is not read."""
    for name in ("held_b", "held_a", "other"):
        (files / f"{name}.jsonl").write_text(json.dumps({"text": f"{name} " * 9}))
    how = f"data.cache_dir={files}", f"data.path={files}/train.jsonl"
    words = [*WORDS, "data=text", *how, f"data.eval_path={files}/held_*.jsonl"]
    data = open_data(compose(words))
    found = data.read(np.array([*data.numbers(held_out=True)]))
    text = bytes(found["targets"][found["targets"] >= 0].astype(np.uint8)).decode()
    assert [text.count(f"eld_{name} ") for name in "ab"] == [9, 9]
    assert text.index("eld_a") < text.index("eld_b")
    assert "other" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.eval_fraction=0.2"], "data.eval_fraction=0.2 holds out a share of data.path"),
        (["data.eval_path=/none.npy"], "data.eval_path=/none.npy"),
        (
            ["data.eval_path=one.npy"],
            r"one.npy: .* = 0 windows of model.seq_len=4: 0 examples, fewer",
        ),
        ([], "holds the id 71, not below data.vocab_size=50"),  # ids that the model does not have
    ],
)
def test_files_that_cannot_be_held_out_are_refused(files, monkeypatch, words, message):
    np.save(files / "one.npy", np.zeros(1, np.int32))
    monkeypatch.chdir(files)
    with pytest.raises(PpctlError, match=message):
        opened(files, "tokens", *words)


@pytest.mark.full
def test_a_run_evaluates_at_its_start_with_perplexity_and_not_again_on_a_resume(tmp_path):
    run_dir = tmp_path / "run"
    words = [*TOKENS.split(), f"run.dir={run_dir}", "run.eval_every=3", "run.eval_at_start=true"]
    words += ["mesh=1x1", "executor=reference"]
    assert cli.main(["train", *words, "run.num_steps=3"]) == 0
    assert cli.main(["train", *words]) == 0
    found = records(run_dir, "eval.jsonl")
    assert [each["step"] for each in found] == [0, 3, 6]
    for each in found:
        assert each["eval_perplexity"] == pytest.approx(np.exp(each["eval_loss"]))
