"""Data in memory: the user's arrays, tokens with a known best loss, rows of a random network."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ppctl.data.dataset import Batch, DataSet, divided, generator
from ppctl.data.token_examples import digest
from ppctl.errors import DataError

JUMP_FRACTION = 0.1  # fraction of steps that jump to a random token
TEACHER_WIDTH = 64
ORDER_SEED = 0  # fixed for arrays, so that runs with any seed hold out the same examples
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


def from_arrays(arrays: Mapping[str, Any], *, source: str, **how: Any) -> DataSet:
    """Return a data set of arrays [num_examples, ...]: "inputs" and "targets" (default: inputs).

    Files are often sorted by class, so the held-out examples are drawn at random; they are the
    same for every seed. source: name of the data in messages; how: batch_size, seed and
    eval_fraction. Raises DataError for a value that is not an array of numbers, arrays of different
    lengths, or too few examples.
    """
    # 1. check the arrays
    for name, array in arrays.items():
        is_array = isinstance(array, np.ndarray)
        if not is_array or array.dtype.kind not in "biuf" or not array.ndim:
            what = f"{array.dtype}{list(array.shape)}" if is_array else type(array).__name__
            must = "it must be a numpy array of numbers [num_examples, ...]"
            raise DataError(f"{source}: {name} is {what}; {must}.")
    if "inputs" not in arrays:
        names = ", ".join(map(str, arrays)) or "no arrays"
        raise DataError(f"{source} has {names}; name one of them inputs.")
    if len({len(array) for array in arrays.values()}) > 1:
        lengths = ", ".join(f"{len(array)} of {name}" for name, array in arrays.items())
        raise DataError(f"{source} has {lengths}; every array needs one entry per example.")
    inputs = arrays["inputs"]
    columns = {"inputs": inputs, "targets": arrays.get("targets", inputs)}

    # 2. examples in a random order
    num_examples = len(inputs)
    rows = generator(ORDER_SEED).permutation(num_examples)

    def read(numbers: np.ndarray) -> Batch:
        return {name: np.asarray(array[rows[numbers]]) for name, array in columns.items()}

    # 3. sizes and digests
    input_dim, target_dim = (
        array.shape[1] if array.ndim == 2 and array.dtype.kind == "f" else None
        for array in columns.values()
    )
    have = f"{source}: {num_examples} examples"
    shapes = [f"{name} {a.dtype}[{','.join(map(str, a.shape[1:]))}]" for name, a in columns.items()]
    return divided(
        name="custom",
        source=f"{have}, {', '.join(shapes)}",
        content={
            name: [list(array.shape), digest(np.ascontiguousarray(array).reshape(-1))]
            for name, array in columns.items()
        },
        have=have,
        num_examples=num_examples,
        read=read,
        rows=rows,
        input_dim=input_dim,
        target_dim=target_dim,
        **how,
    )
