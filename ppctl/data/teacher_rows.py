"""Regression on a fixed random network, made as it is read."""

from __future__ import annotations

from typing import Any

import numpy as np

from ppctl.data.dataset import Batch, DataSet, divided, generator

TEACHER_WIDTH = 64
NOISE = 0.01  # standard deviation added to the targets


def regression(
    *, num_features: int, num_targets: int, num_rows: int, seed: int, **how: Any
) -> DataSet:
    """Return the data set of rows x ~ N(0, 1) and targets tanh(x A) B + NOISE * N(0, 1).

    A [num_features, 64] and B [64, num_targets] are drawn once from the seed, scaled so that
    targets are of order one; row i depends on (seed, i). The best mean squared error is NOISE**2.
    Raises DataError when num_rows is too small.
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
