"""Data generated on reading: tokens with a known best loss, and rows of a random network."""

from typing import Any

import numpy as np

from ppctl.data.dataset import Batch, DataSet, divided, generator

JUMP_FRACTION = 0.1  # fraction of steps that jump to a random token
TEACHER_WIDTH = 64
NOISE = 0.01  # standard deviation of the noise on targets


def synthetic(
    *, vocab_size: int, num_sequences: int, seq_len: int, seed: int, **how: Any
) -> DataSet:
    """Return the data set of walks around one fixed random cycle through the vocabulary.

    A token is followed by its successor on the cycle, except that one step in ten (q =
    JUMP_FRACTION) jumps to a token drawn uniformly from all V = vocab_size tokens. The cycle
    depends on the seed, and sequence i on (seed, i). An untrained model's loss is about ln V. The
    least possible loss is the entropy of a step: -(1-q+q/V) ln(1-q+q/V) - (V-1) (q/V) ln(q/V).
    Raises DataError if num_sequences is too small for a batch.
    """
    # 1. draw the cycle
    cycle = generator(seed, 0).permutation(vocab_size)
    places = np.arange(seq_len + 1)

    # 2. draw sequences when they are read
    def read(examples: np.ndarray) -> Batch:
        jumps = np.empty((len(examples), seq_len + 1), bool)
        landings = np.empty(jumps.shape, np.int64)  # positions on the cycle
        for row, example in enumerate(examples.tolist()):
            random = generator(seed, 1, example)
            jumps[row] = random.random(seq_len + 1) < JUMP_FRACTION
            landings[row] = random.integers(vocab_size, size=seq_len + 1)
        # Each place after the last jump (or the start) is one more step along the cycle.
        last_jump = np.maximum.accumulate(np.where(jumps, places, 0), axis=1)
        steps = np.take_along_axis(landings, last_jump, axis=1) + places - last_jump
        ids = cycle[steps % vocab_size].astype(np.int32)
        inputs, targets = map(np.ascontiguousarray, (ids[:, :-1], ids[:, 1:]))
        return {"inputs": inputs, "targets": targets}

    # 3. names and sizes
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


def regression(
    *, num_features: int, num_targets: int, num_rows: int, seed: int, **how: Any
) -> DataSet:
    """Return the data set of rows x ~ N(0, 1) and targets tanh(x A) B + NOISE * N(0, 1).

    A [num_features, 64] and B [64, num_targets] are drawn once from the seed, scaled so that
    targets are of order one; row i depends on (seed, i). The best mean squared error is NOISE**2.
    Raises DataError if num_rows is too small for a batch.
    """
    teacher = generator(seed, 0)
    into = teacher.standard_normal((num_features, TEACHER_WIDTH)) / np.sqrt(num_features)
    out = teacher.standard_normal((TEACHER_WIDTH, num_targets)) / np.sqrt(TEACHER_WIDTH)

    def read(examples: np.ndarray) -> Batch:
        inputs = np.empty((len(examples), num_features), np.float32)
        targets = np.empty((len(examples), num_targets), np.float32)
        # One product for all rows would be faster, but its rounding depends on the number of rows.
        for row, example in enumerate(examples.tolist()):
            random = generator(seed, 1, example)
            x = random.standard_normal(num_features)
            inputs[row] = x
            targets[row] = np.tanh(x @ into) @ out + NOISE * random.standard_normal(num_targets)
        return {"inputs": inputs, "targets": targets}

    return divided(
        name="regression",
        source=f"data=regression, {num_rows} rows",
        content=[num_features, num_targets, num_rows, NOISE, TEACHER_WIDTH],
        have=f"data.num_rows={num_rows}",
        num_examples=num_rows,
        read=read,
        seed=seed,
        input_dim=num_features,
        target_dim=num_targets,
        **how,
    )
