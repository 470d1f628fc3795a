"""Models and data of `tests/fuzz.py`, as `ppctl train` takes them: model.target and data.target."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from ppctl.data import DataSet
from ppctl.data.array_data import from_arrays
from ppctl.data.dataset import fingerprint, generator, num_held_out
from ppctl.data.token_examples import NO_TOKEN, packed

TESTS = str(Path(__file__).parents[1])
if TESTS not in sys.path:  # the command line that repeats a request is typed in the root
    sys.path.append(TESTS)

from support.networks import NETWORKS  # noqa: E402

NUM_PICTURES = 512
NUM_DOCUMENTS = 600


def network(num_layers, dtype, data, *, name, marked=True):
    """Return a network of the tests, with its marks or without."""
    del num_layers, dtype, data
    return NETWORKS[name][0](marked=marked)


def pictures(batch_size, seed, eval_fraction):
    """Return random pictures, 4 x 4 of 2 channels, each with 80 numbers that follow from it."""
    into = generator(seed, 0).standard_normal((32, 80)) / 8

    def read(examples):
        inputs = np.stack(
            [generator(seed, 1, each).standard_normal((4, 4, 2)) for each in examples.tolist()]
        )
        # one product a picture: of all at once it rounds otherwise
        targets = np.stack([np.tanh(each.reshape(32) @ into) for each in inputs])
        return {"inputs": inputs.astype(np.float32), "targets": targets.astype(np.float32)}

    num_eval = num_held_out(f"{NUM_PICTURES} pictures", NUM_PICTURES, eval_fraction, batch_size)
    return DataSet(
        name="pictures",
        source=f"{NUM_PICTURES} random pictures",
        fingerprint=fingerprint(
            name="pictures", batch_size=batch_size, seed=seed, eval_fraction=eval_fraction
        ),
        batch_size=batch_size,
        seed=seed,
        num_examples=NUM_PICTURES - num_eval,
        num_eval_examples=num_eval,
        read=read,
    )


def documents(batch_size, seed, eval_fraction, *, seq_len, vocab_size, packs, masked):
    """Return token ids of short documents, whole sequences or packed ones with padding.

    masked: share of tokens that are no targets, drawn by document, so that some sequences have none.
    """
    rng = generator(seed, 3)
    lengths = np.asarray(
        rng.integers(2, 2 * seq_len + 2, NUM_DOCUMENTS) if packs else [seq_len + 1] * NUM_DOCUMENTS
    )
    ids = rng.integers(vocab_size, size=lengths.sum()).astype(np.int32)
    shares = np.repeat(rng.choice((0.0, masked, 1.0), NUM_DOCUMENTS, p=(0.4, 0.4, 0.2)), lengths)
    is_learned = rng.random(len(ids)) >= shares * (masked > 0)
    how = {"name": "custom", "batch_size": batch_size, "seed": seed, "eval_fraction": eval_fraction}
    how |= {"vocab_size": vocab_size}
    if packs:
        content, end = f"documents {seed} {masked}", int(rng.integers(vocab_size))
        sizes = {"seq_len": seq_len, "is_learned": is_learned, "end": end}
        ends = np.cumsum(lengths)
        return packed(ids, ends, source="documents", content=content, **sizes, **how)
    table, learned = (a.reshape(NUM_DOCUMENTS, seq_len + 1) for a in (ids, is_learned))
    targets = np.where(learned[:, 1:], table[:, 1:], NO_TOKEN)
    vocab = how.pop("vocab_size")
    del how["name"]
    made = from_arrays({"inputs": table[:, :-1], "targets": targets}, source="documents", **how)
    return replace(made, vocab_size=vocab)
