"""Several parts by weights: shares, epochs of each, held-out examples, and resumes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ppctl.cli.compose import compose
from ppctl.errors import ConfigError, DataError


def met(dataset, num_batches, start=0):
    """Return the numbers of examples in their order."""
    numbers = []
    spied = dataset.__class__(**{**dataset.__dict__, "read": lambda n: {"inputs": n}})
    for batch in itertools.islice(spied.batches(start), num_batches):
        numbers += batch["inputs"].tolist()
    return np.array(numbers)


def test_parts_come_by_their_weights_and_each_in_separate_epochs(build):
    dataset = build("mixture")
    (first, _, _), (second, _, _) = dataset.mixture
    numbers = met(dataset, 300)
    is_second = numbers >= first
    assert abs(is_second.cumsum() - np.arange(1, len(numbers) + 1) / 4).max() <= 1, (
        "3 to 1 after any number"
    )
    for of_part, size in ((numbers[~is_second], first), (numbers[is_second] - first, second)):
        assert len(of_part) > size, "more than an epoch"
        assert sorted(of_part[:size]) == list(range(size))
    assert not np.array_equal(met(build("mixture", seed=1), 3), numbers[:24])


def test_a_mixture_has_the_examples_of_its_parts(build, tmp_path):
    dataset = build("mixture")
    (first, held_out, _), _ = dataset.mixture
    alone = [
        build("text", path=str(tmp_path / name), batch_size=1) for name in ("text.txt", "other.txt")
    ]
    found = dataset.read(
        np.array([first + 2, 0, sum(part[0] for part in dataset.mixture) + held_out])
    )
    expected = [
        alone[1].read(np.array([2])),
        alone[0].read(np.array([0])),
        alone[1].read(np.array([alone[1].num_examples])),
    ]
    for name in ("inputs", "targets"):
        np.testing.assert_array_equal(
            found[name], np.concatenate([batch[name] for batch in expected])
        )


def test_held_out_examples_are_mixed_by_weight(build):
    dataset = build("mixture")
    total = sum(part[0] for part in dataset.mixture)
    numbers = []
    spied = dataset.__class__(**{**dataset.__dict__, "read": lambda n: {"inputs": n}})
    for batch in spied.eval_batches(dataset.num_eval_examples // 8):
        numbers += batch["inputs"].tolist()
    assert min(numbers) >= total
    assert len({*numbers}) == len(numbers)
    share = np.mean(np.array(numbers) >= total + dataset.mixture[0][1])
    assert abs(share - 0.25) < 0.05


@pytest.mark.parametrize("held_out", [False, True])
def test_indices_of_a_mixture_cover_its_parts_and_their_short_examples(build, tmp_path, held_out):
    dataset, expected = build("mixture", seq_len=13), []
    for name in ("text.txt", "other.txt"):
        part = build("text", path=str(tmp_path / name), batch_size=1, seq_len=13)
        expected += part.read(np.array(part.numbers(held_out=held_out)))["targets"].tolist()
    found = dataset.read(np.array(dataset.numbers(held_out=held_out)))["targets"].tolist()
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.7, 0.3), (0.97, 0.03)])
def test_a_mixture_of_few_examples_holds_out_a_batch(build, tmp_path, weights):
    parts = [
        {"path": str(tmp_path / name), "weight": weight, "field": "text", "prompt_field": None}
        | {"document": "file"}
        for name, weight in zip(("text.txt", "other.txt"), weights, strict=True)
    ]
    dataset = build("mixture", parts=parts, batch_size=8, eval_fraction=0.001)
    assert len([*dataset.eval_batches(1)]) == 1


def test_weights_and_parts_decide_the_fingerprint(build):
    prints = {
        build("mixture").fingerprint,
        build("mixture", packing=True).fingerprint,
        build("text").fingerprint,
    }
    assert len(prints) == 3


def test_parts_are_named_in_mistakes(build, tmp_path):
    fields = {"field": "text", "prompt_field": None, "document": "file", "weight": 1.0}
    with pytest.raises(DataError, match=r"data.parts\[0\].path=\S+none: No such file or directory"):
        build("mixture", parts=[fields | {"path": str(tmp_path / "none")}])


def test_parts_are_composed_from_words():
    words = [
        "data=mixture",
        "data.parts=[{path:a.txt,weight:0.7},{path:b.jsonl,weight:0.3,field:body}]",
    ]
    parts = compose(words).data.parts
    assert [(part.path, part.weight, part.field) for part in parts] == [
        ("a.txt", 0.7, "text"),
        ("b.jsonl", 0.3, "body"),
    ]
    with pytest.raises(ConfigError, match="wieght"):
        compose(["data=mixture", "data.parts=[{path:a.txt,wieght:0.7}]"])
