"""A data set without its examples, as checkpoints keep it to build the trained model again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from ppctl.data.dataset import Batch, DataSet

PLAIN = tuple(field.name for field in fields(DataSet) if field.name != "read")


def description(data: DataSet, shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Return sizes, names and an example's types as plain JSON; shapes: of a batch [batch, ...]."""
    example = {name: [str(np.dtype(a.dtype)), *a.shape[1:]] for name, a in shapes.items()}
    return {name: getattr(data, name) for name in PLAIN} | {"example": example}


def described(stored: Mapping[str, Any]) -> DataSet:
    """Return the data set of a description, whose examples are all zeros.

    >>> stored = {"name": "custom", "source": "", "fingerprint": "", "batch_size": 4, "seed": 0}
    >>> stored |= {"num_examples": 8, "num_eval_examples": 0, "example": {"inputs": ["float32", 5]}}
    >>> described(stored).read(np.arange(2))["inputs"].shape
    (2, 5)
    """
    example = stored["example"].items()

    def read(numbers: np.ndarray) -> Batch:
        return {n: np.zeros((len(numbers), *shape), dtype) for n, (dtype, *shape) in example}

    return DataSet(**{name: stored[name] for name in PLAIN if name in stored}, read=read)
