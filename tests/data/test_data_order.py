"""What every data set promises about order, division, resumption and the held-out split."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
import threading

import numpy as np
import pytest
from support.selection import full

from ppctl.data.dataset import READ_AHEAD, num_held_out, shuffled
from ppctl.errors import DataError

KINDS = "stdlib", "text", "mixture", "tokens", "synthetic", "regression"
every_kind = pytest.mark.parametrize("name", KINDS)
of_one_part = pytest.mark.parametrize("name", [name for name in KINDS if name != "mixture"])
every_language = pytest.mark.parametrize("name", [name for name in KINDS if name != "regression"])


def take(iterator, num):
    return list(itertools.islice(iterator, num))


def same(a, b):
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(np.array_equal(x[key], y[key]) for key in x)
        for x, y in zip(a, b, strict=True)
    )


def recorded(dataset):
    """Return the data set, and a list of the example numbers that later reads request."""
    reads = []
    return dataclasses.replace(
        dataset, read=lambda examples: (reads.append(examples), dataset.read(examples))[1]
    ), reads


def example_numbers(dataset):
    return dataclasses.replace(dataset, read=lambda examples: {"inputs": examples})


def two_epochs(dataset):
    """Return the example numbers [2, num_examples] in their order."""
    num = dataset.num_examples
    batches = take(example_numbers(dataset).batches(), -(-2 * num // dataset.batch_size))
    return np.concatenate([batch["inputs"] for batch in batches])[: 2 * num].reshape(2, num)


def subclasses(cls):
    return {sub for child in cls.__subclasses__() for sub in {child, *subclasses(child)}}


def few_examples(name):
    return {"seq_len": 60_000} if name == "stdlib" else {}


@every_language
def test_language_batches_are_int32_tokens_with_the_next_token_as_target(build, name):
    dataset = build(name)
    assert dataset.input_dim is dataset.target_dim is None
    for batch in [*take(dataset.batches(), 3), *dataset.eval_batches(2)]:
        assert {k: (v.shape, v.dtype, v.flags.c_contiguous) for k, v in batch.items()} == {
            "inputs": ((8, 16), np.int32, True),
            "targets": ((8, 16), np.int32, True),
        }
        np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
        assert batch["inputs"].min() >= 0
        assert batch["targets"].max() < dataset.vocab_size


@every_kind
@pytest.mark.parametrize(
    "parts", [(range(4), range(4, 8)), (range(3), range(3, 4), range(4, 8)), (range(0), range(8))]
)
def test_divided_rows_stack_to_the_whole_batch(build, name, parts):
    dataset = build(name)
    whole = take(dataset.batches(2), 3) + list(dataset.eval_batches(2))
    divided = [
        take(dataset.batches(2, rows), 3) + list(dataset.eval_batches(2, rows)) for rows in parts
    ]
    stacked = [
        {key: np.concatenate([part[key] for part in batch]) for key in batch[0]}
        for batch in zip(*divided, strict=True)
    ]
    assert same(whole, stacked)


@of_one_part
def test_unshuffled_examples_come_in_the_order_of_their_numbers_in_every_epoch(build, name):
    dataset = dataclasses.replace(build(name), is_shuffled=False, num_examples=20)
    dataset, reads = recorded(dataset)
    take(
        dataset.batches(1), 4
    )  # the second batch of 8 and three more, over the end of the first epoch
    numbers = np.concatenate([read for read in reads if len(read) == 8][:4])
    assert numbers.tolist() == [k % 20 for k in range(8, 40)]


@every_kind
def test_only_the_requested_rows_are_read(build, name):
    whole, all_rows = recorded(build(name))
    list(whole.eval_batches(2))
    part, some_rows = recorded(build(name))
    list(part.eval_batches(2, range(2, 5)))
    assert sorted(np.concatenate(some_rows)) == sorted(
        np.concatenate([rows[2:5] for rows in all_rows])
    )
    take(part.batches(rows=range(2, 5)), 3)
    assert {len(rows) for rows in some_rows} == {3}


@every_kind
def test_resume_continues_bit_for_bit(build, name):
    through = take(build(name).batches(), 90)  # more than two epochs of the smallest
    assert same(through[57:], take(build(name).batches(57), 33))


@every_kind
def test_resume_reads_nothing_before_its_step(build, name):
    dataset, reads = recorded(build(name))
    take(dataset.batches(10**12), 1)
    assert 1 <= len(reads) <= 1 + READ_AHEAD.prefetch_buffer_size


@of_one_part
def test_an_epoch_has_every_example_once_and_the_next_epoch_has_another_order(build, name):
    dataset = build(name, **few_examples(name))
    first, second = two_epochs(dataset)
    assert sorted(first) == sorted(second) == list(range(dataset.num_examples))
    assert not np.array_equal(first, second)


@every_kind
def test_neighbouring_seeds_share_no_epoch(build, name):
    of_0, of_1 = (two_epochs(build(name, seed=seed, **few_examples(name))) for seed in (0, 1))
    assert len({epoch.tobytes() for epoch in (*of_0, *of_1)}) == 4


def collides(num):
    """Whether an order of `num` examples gives its last number as it does an earlier one.

    A permutation of too few values, 2^b, gives positions that differ by 2^b the same number.
    """
    order, last = shuffled(0, num, seed=num), num - 1
    return order[last] == order[last - 2 ** (last.bit_length() - 1)]


@pytest.mark.parametrize(
    "lengths",
    [
        [65_537, 262_145, *range(2, 70_000, 97)],
        full(range(2, 70_001)),
        full([2**b + d for b in range(1, 32) for d in (0, 1, 2)]),
    ],
)
def test_the_last_example_is_not_another_one_too(lengths):
    assert [num for num in lengths if collides(num)] == []


@pytest.mark.parametrize("num", [65_537, full(65_536), full(65_538), full(262_145)])
def test_an_epoch_has_each_example_once_and_the_next_has_another_order(num):
    order = shuffled(7, 7 + num, seed=3).repeat()
    first, second = ([order[i] for i in range(e * num, (e + 1) * num, 1 + 99 * e)] for e in (0, 1))
    assert sorted(first) == [*range(7, 7 + num)]
    assert len({*second}) == len(second)
    assert first[::100] != second


@every_kind
def test_batches_are_equal_from_equal_settings(build, name):
    assert same(take(build(name).batches(), 5), take(build(name).batches(), 5))


@of_one_part
def test_eval_batches_are_the_same_each_time_and_held_out(build, name):
    dataset = build(name)
    assert same(list(dataset.eval_batches(2)), list(dataset.eval_batches(2)))
    most = min(dataset.num_eval_examples // 8, 50)
    numbers = np.concatenate([b["inputs"] for b in example_numbers(dataset).eval_batches(most)])
    assert len(set(numbers)) == len(numbers) == 8 * most
    assert numbers.min() >= dataset.num_examples
    assert numbers.max() < dataset.num_examples + dataset.num_eval_examples


@pytest.mark.parametrize("name", ["stdlib", "text", "mixture", "tokens"])
def test_eval_batches_of_a_corpus_do_not_depend_on_the_seed(build, name):
    assert same(
        list(build(name, seed=3).eval_batches(2)), list(build(name, seed=4).eval_batches(2))
    )


@every_kind
def test_settings_that_change_batches_change_the_fingerprint(build, name):
    changes = [{}, {"seed": 1}, {"batch_size": 4}, {"eval_fraction": 0.2}]
    changes += [{"seq_len": 8}] if name != "regression" else [{"num_rows": 301}, {"num_targets": 2}]
    prints = [build(name, **change).fingerprint for change in changes]
    assert len(set(prints)) == len(prints)
    assert all(len(text) == 64 for text in prints)
    assert build(name).fingerprint == prints[0]


@every_kind
def test_no_held_out_split_is_refused_at_the_call(build, name):
    with pytest.raises(
        DataError,
        match=r"data.eval_fraction=0 .* Use data.eval_fraction=0.05 or run.eval_every=null",
    ):
        build(name, eval_fraction=0).eval_batches(1)


@every_kind
def test_the_remedy_for_too_many_eval_batches_works(build, name):
    dataset = build(name)
    most = dataset.num_eval_examples // 8
    message = (
        rf"{most + 1}\*8 = {8 * most + 8} is more than the {dataset.num_eval_examples} .* Use "
        rf"run.eval_batches={most} "
    )
    with pytest.raises(DataError, match=message):
        dataset.eval_batches(most + 1)
    assert next(dataset.eval_batches(most))


@pytest.mark.parametrize(
    ("name", "have"),
    [
        (
            "text",
            r"data=text data.path=.*text.txt: \(8291 tokens - 2\)//1000 = 8 windows of "
            r"model.seq_len=1000",
        ),
        (
            "tokens",
            r"data=tokens data.path=.*ids.npy: \(6000 tokens - 2\)//1000 = 5 windows of "
            r"model.seq_len=1000",
        ),
        ("synthetic", "data.num_sequences=8"),
        ("regression", "data.num_rows=8"),
    ],
)
def test_too_little_for_a_batch_is_refused(build, name, have):
    small = {"synthetic": {"num_sequences": 8}, "regression": {"num_rows": 8}}.get(
        name, {"seq_len": 1000}
    )
    with pytest.raises(
        DataError,
        match=rf"{have}: to train on a batch and hold out another takes 2.data.batch_size = 16. "
        r"Use more data, (model.seq_len=\d+|data.batch_size=4) or less, or data.eval_fraction=0 with",
    ):
        build(name, eval_fraction=0.2, **small)


@pytest.mark.parametrize("share", [1e-6, 0.05, 0.5])
@pytest.mark.parametrize("num_examples", [16, 17, 55, 100, 12345])
@pytest.mark.parametrize("batch_size", [1, 7, 8])
def test_a_batch_is_held_out_of_two_or_more(num_examples, batch_size, share):
    number = num_held_out("", num_examples, share, batch_size)
    assert batch_size <= number <= num_examples - batch_size
    assert number == max(batch_size, int(share * num_examples))
    assert num_held_out("", num_examples, 0.0, batch_size) == 0


def test_a_fraction_that_is_whole_on_paper_is_not_rounded_down():
    assert 0.29 * 100 < 29
    assert num_held_out("", 100, 0.29, 1) == 29


def test_a_dropped_iterator_stops_its_threads(build):
    others = set(threading.enumerate())  # an iterator of another test may wait for the collector
    iterator = build("regression").batches()
    next(iterator)
    threads = [t for t in set(threading.enumerate()) - others if "grain-prefetch" in t.name]
    assert threads
    del iterator
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)


def test_a_fault_while_reading_reaches_the_caller(build):
    def read(examples):
        raise DataError("the disk is gone")

    with pytest.raises(DataError, match="the disk is gone"):
        next(dataclasses.replace(build("regression"), read=read).batches())


def test_reading_does_not_start_jax(tmp_path):
    # The number of simulated devices can be set only before JAX starts, and data sets are built
    # before that.
    code = """
import json, sys
import jax
from ppctl import data
text = {"tokenizer": "bytes", "end_token": None, "packing": False, "cache_dir": sys.argv[1]}
dataset = data.stdlib(seq_len=16, batch_size=8, seed=0, eval_fraction=0.1, **text)
next(dataset.batches())
jax.config.update("jax_num_cpu_devices", 3)
jax.config.update("jax_platforms", "cpu")
print(json.dumps([jax.device_count(), dataset.fingerprint]))
"""
    # Two at once, on an empty cache: both get the whole text.
    both = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    answers = [json.loads(process.communicate(timeout=100)[0]) for process in both]
    assert answers[0] == answers[1]
    assert answers[0][0] == 3
    assert {path.suffix for path in tmp_path.iterdir()} == {".lock", ".tokens"}
