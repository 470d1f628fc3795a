"""A data set of whole arrays, such as memory-mapped `.npy` files."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ppctl.data.dataset import Batch, DataSet, divided, generator
from ppctl.data.token_examples import digest
from ppctl.errors import DataError

ORDER_SEED = 0  # not the run's seed: runs that differ in the seed hold out the same examples


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
