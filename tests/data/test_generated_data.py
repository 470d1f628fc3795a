"""Data made as it is read: pure in (seed, example), with a rule to learn and a known best loss."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ppctl.data import array_data
from ppctl.data.array_data import JUMP_FRACTION


@pytest.mark.parametrize("name", ["synthetic", "regression"])
def test_an_example_depends_only_on_the_seed_and_its_number(build, name):
    large, small = build(name, seed=5), build(name, seed=5, batch_size=2, eval_fraction=0.2)
    together = large.read(np.array([7, 250, 3]))
    for row, example in enumerate((7, 250, 3)):
        for key, value in small.read(np.array([example])).items():
            np.testing.assert_array_equal(value[0], together[key][row])
    other = build(name, seed=6).read(np.array([7]))
    assert not np.array_equal(other["inputs"][0], together["inputs"][0])


@pytest.mark.parametrize("vocab_size", [2, 3, 97])
def test_synthetic_reaches_its_closed_form_loss_when_the_rule_is_known(build, vocab_size):
    dataset = build("synthetic", vocab_size=vocab_size, num_sequences=4000, seq_len=64)
    train = dataset.read(np.arange(dataset.num_examples))
    counts = np.zeros((vocab_size, vocab_size))
    np.add.at(counts, (train["inputs"], train["targets"]), 1)
    rule = counts.argmax(1)
    held_out = dataset.read(np.arange(dataset.num_examples, 4000))
    follows = rule[held_out["inputs"]] == held_out["targets"]
    other = JUMP_FRACTION / vocab_size
    successor = 1 - JUMP_FRACTION + other
    loss = -np.where(follows, math.log(successor), math.log(other)).mean()
    entropy = -successor * math.log(successor) - (vocab_size - 1) * other * math.log(other)
    assert sorted(rule) == list(range(vocab_size))  # every token is the successor of one
    assert loss == pytest.approx(entropy, rel=0.04)
    assert entropy < math.log(vocab_size)


def test_synthetic_uses_all_tokens_evenly(build):
    dataset = build("synthetic", vocab_size=10, num_sequences=4000)
    share = np.bincount(dataset.read(np.arange(3000))["inputs"].ravel(), minlength=10) / (3000 * 16)
    np.testing.assert_allclose(share, 0.1, atol=0.01)


def test_regression_noise_is_added_to_the_targets_only(build, monkeypatch):
    found = []
    for noise in (0.0, 0.5):
        monkeypatch.setattr(array_data, "NOISE", noise)
        found.append(build("regression", num_rows=4000).read(np.arange(3000)))
    clean, noisy = found
    np.testing.assert_array_equal(clean["inputs"], noisy["inputs"])
    assert (noisy["targets"] - clean["targets"]).std() == pytest.approx(0.5, rel=0.05)


def test_regression_inputs_are_standard_normal_and_targets_of_order_one(build):
    dataset = build("regression", num_rows=4000)
    rows = dataset.read(np.arange(3000))
    assert {key: (value.shape, value.dtype) for key, value in rows.items()} == {
        "inputs": ((3000, 6), np.float32),
        "targets": ((3000, 3), np.float32),
    }
    assert (dataset.vocab_size, dataset.input_dim, dataset.target_dim) == (None, 6, 3)
    assert rows["inputs"].std() == pytest.approx(1, rel=0.05)
    assert 0.2 < rows["targets"].std() < 2
