"""Token sequences with a rule to learn, made as they are read: nothing on disk, and a known best loss."""

from __future__ import annotations

import math

import numpy as np

from ppctl.data.dataset import Batch, DataSet, fingerprint, generator, num_held_out
from ppctl.data.windows import next_token

JUMP_FRACTION = 0.1  # of steps; the rest follow the rule


def synthetic(
    *, vocab_size: int, num_sequences: int, seq_len: int, batch_size: int, seed: int, eval_fraction: float
) -> DataSet:
    """Return the data set of walks around one fixed random cycle through the vocabulary.

    A token is followed by its successor on the cycle, except that one step in ten (q = JUMP_FRACTION) jumps to a token
    drawn evenly from all V. The cycle depends on the seed, sequence i on (seed, i). An untrained model's loss is about
    ln V, the least possible one `best_loss`. Raises DataError when num_sequences is too small for a batch.
    """
    num_eval = num_held_out(f"data.num_sequences={num_sequences}", num_sequences, eval_fraction, batch_size)
    cycle = generator(seed, 0).permutation(vocab_size)
    places = np.arange(seq_len + 1)

    def read(examples: np.ndarray) -> Batch:
        jumps = np.empty((len(examples), seq_len + 1), bool)
        landings = np.empty((len(examples), seq_len + 1), np.int64)  # where on the cycle a jump would land
        for row, example in enumerate(examples.tolist()):
            random = generator(seed, 1, example)
            jumps[row] = random.random(seq_len + 1) < JUMP_FRACTION
            landings[row] = random.integers(vocab_size, size=seq_len + 1)
        # Each place is as many steps along the cycle from the last jump as it is places away from it; the start counts
        # as a jump, by the 0 below.
        last_jump = np.maximum.accumulate(np.where(jumps, places, 0), axis=1)
        steps = np.take_along_axis(landings, last_jump, axis=1) + places - last_jump
        return next_token(cycle[steps % vocab_size].astype(np.int32))

    return DataSet(
        name="synthetic",
        source=f"data=synthetic, {num_sequences} sequences",
        fingerprint=fingerprint(
            name="synthetic",
            rule=[vocab_size, num_sequences, JUMP_FRACTION],
            seq_len=seq_len,
            batch_size=batch_size,
            seed=seed,
            eval_fraction=eval_fraction,
        ),
        batch_size=batch_size,
        seed=seed,
        num_examples=num_sequences - num_eval,
        num_eval_examples=num_eval,
        read=read,
        vocab_size=vocab_size,
    )


def best_loss(vocab_size: int) -> float:
    """Cross-entropy in nats a token that no model can beat: the entropy of a step, given the token before it.

    With q = JUMP_FRACTION and V tokens: -(1-q+q/V) ln(1-q+q/V) - (V-1) (q/V) ln(q/V).

    >>> round(best_loss(256), 3)
    0.876
    """
    other = JUMP_FRACTION / vocab_size
    successor = 1 - JUMP_FRACTION + other
    return -successor * math.log(successor) - (vocab_size - 1) * other * math.log(other)
