"""Token sequences with a rule to learn and a known best loss, made as they are read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ppctl.data.dataset import Batch, DataSet, divided, generator
from ppctl.data.token_windows import next_token

JUMP_FRACTION = 0.1  # of steps; the rest follow the rule


def synthetic(
    *, vocab_size: int, num_sequences: int, seq_len: int, seed: int, **how: Any
) -> DataSet:
    """Return the data set of walks around one fixed random cycle through the vocabulary.

    A token is followed by its successor on the cycle, except that one step in ten (q =
    JUMP_FRACTION) jumps to a token drawn evenly from all V. The cycle depends on the seed, sequence
    i on (seed, i). An untrained model's loss is about ln V, the least possible one `best_loss`.
    Raises DataError when num_sequences is too small for a batch.
    """
    cycle = generator(seed, 0).permutation(vocab_size)
    places = np.arange(seq_len + 1)

    def read(examples: np.ndarray) -> Batch:
        jumps = np.empty((len(examples), seq_len + 1), bool)
        landings = np.empty(jumps.shape, np.int64)  # places on the cycle
        for row, example in enumerate(examples.tolist()):
            random = generator(seed, 1, example)
            jumps[row] = random.random(seq_len + 1) < JUMP_FRACTION
            landings[row] = random.integers(vocab_size, size=seq_len + 1)
        # A token is one step along the cycle for each place after the last jump or the start.
        last_jump = np.maximum.accumulate(np.where(jumps, places, 0), axis=1)
        steps = np.take_along_axis(landings, last_jump, axis=1) + places - last_jump
        return next_token(cycle[steps % vocab_size].astype(np.int32))

    return divided(
        name="synthetic",
        source=f"data=synthetic, {num_sequences} sequences",
        content=[vocab_size, num_sequences, JUMP_FRACTION, seq_len],
        have=f"data.num_sequences={num_sequences}",
        num_examples=num_sequences,
        read=read,
        seed=seed,
        vocab_size=vocab_size,
        **how,
    )


def best_loss(vocab_size: int) -> float:
    """Return the least possible cross-entropy, nats a token: a step's entropy, given its token.

    With q = JUMP_FRACTION and V tokens: -(1-q+q/V) ln(1-q+q/V) - (V-1) (q/V) ln(q/V).

    >>> round(best_loss(256), 3)
    0.876
    """
    other = JUMP_FRACTION / vocab_size
    successor = 1 - JUMP_FRACTION + other
    return -successor * math.log(successor) - (vocab_size - 1) * other * math.log(other)
