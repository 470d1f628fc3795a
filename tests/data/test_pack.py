"""Documents packed into sequences, and their batches."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from ppctl.data.token_examples import NO_TOKEN, PADDING, pack
from ppctl.errors import DataError
from ppctl.model import cross_entropy, packed_sequences

SEQ_LEN = 20
TEXTS = [
    "abcdefghij"[: 1 + i % 10] * (1 + i % 2) for i in range(300)
]  # none is longer than a sequence


@pytest.fixture
def build_packed(build, tmp_path):
    lines = (json.dumps({"question": "why", "text": text}) + "\n" for text in TEXTS)
    (tmp_path / "a.jsonl").write_text("".join(lines))
    return lambda **how: build(
        "text", **{"path": str(tmp_path / "a.jsonl"), "packing": True, "seq_len": SEQ_LEN} | how
    )


def test_data_and_models_have_the_same_marks():
    marks = packed_sequences.PADDING, cross_entropy.NO_TOKEN
    assert marks == (PADDING, NO_TOKEN)


def take(iterator, number):
    return list(itertools.islice(iterator, number))


def same(a, b):
    return all(
        np.array_equal(x[key], y[key])
        for x, y in zip(a, b, strict=True)
        for key in ("inputs", "targets")
    )


def documents_of(dataset):
    """(tokens, targets) of each document in each sequence, in turn; padding is at the end of a
    sequence.
    """
    batch = dataset.read(np.arange(dataset.num_examples))
    for inputs, targets in zip(batch["inputs"], batch["targets"], strict=True):
        starts = [*np.flatnonzero(inputs < 0), len(inputs)]
        assert starts[0] == 0
        for a, b in itertools.pairwise(starts):
            tokens = [int(~inputs[a]), *inputs[a + 1 : b].tolist()]
            if inputs[a] == PADDING:
                assert b == len(inputs)
                assert (targets[a:b] == NO_TOKEN).all()
            else:
                yield tokens, targets[a:b].tolist()


def test_sequences_hold_whole_documents_each_predicted_to_its_end(build_packed):
    dataset = build_packed(eval_fraction=0)
    found = list(documents_of(dataset))
    assert sorted(bytes(tokens).decode() for tokens, _ in found) == sorted(TEXTS)
    assert all(targets == [*tokens[1:], 0] for tokens, targets in found)
    assert dataset.is_packed
    assert ", 300 documents packed, sequences 9" in dataset.source  # per cent full


def test_prompts_are_read_and_not_predicted(build_packed):
    for tokens, targets in documents_of(
        build_packed(eval_fraction=0, prompt_field="question", seq_len=23)
    ):
        assert bytes(tokens).decode().startswith("why")
        assert targets == [NO_TOKEN, NO_TOKEN, *tokens[3:], 0]


def test_a_packed_run_resumes_at_any_position_with_other_rows_per_process(build_packed):
    through = take(build_packed().batches(), 30)
    for start, parts in ((7, (range(8),)), (29, (range(3), range(3, 8)))):
        divided = [take(build_packed().batches(start, rows), 30 - start) for rows in parts]
        stacked = [
            {name: np.concatenate([part[name] for part in batch]) for name in ("inputs", "targets")}
            for batch in zip(*divided, strict=True)
        ]
        assert same(through[start:], stacked)
    assert build_packed().fingerprint != build_packed(packing=False).fingerprint


def test_too_few_documents_are_refused(build_packed):
    with pytest.raises(
        DataError,
        match=r"300 documents packed into \d+ sequences of model.seq_len=20: .* Use more data",
    ):
        build_packed(batch_size=500, eval_fraction=0)


def test_each_token_but_the_first_is_predicted_once_and_sequences_hold_whole_documents():
    draw = np.random.default_rng(2)
    lengths = draw.integers(1, 60, size=500)
    ends = np.cumsum(lengths)
    packing = pack(ends, SEQ_LEN)
    predicted = np.concatenate(
        [np.arange(s, s + n) + 1 for s, n in zip(packing.starts, packing.lengths, strict=True)]
    )
    firsts = ends - lengths
    assert sorted(predicted) == sorted(set(range(ends[-1])) - set(firsts.tolist()))
    filled = np.add.reduceat(packing.lengths, packing.bounds[:-1])
    assert filled.max() <= SEQ_LEN
    assert filled.mean() > 0.97 * SEQ_LEN
    cut = [start for start in packing.starts if start not in firsts]
    assert {
        (start - firsts[np.searchsorted(ends, start, side="right")]) % SEQ_LEN for start in cut
    } == {0}
