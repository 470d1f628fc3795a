"""A data set of whole arrays, such as memory-mapped `.npy` files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ppctl.data.dataset import Batch, DataSet, fingerprint, generator, num_held_out
from ppctl.data.windows import digest
from ppctl.errors import DataError

ORDER_SEED = 0  # not the run's seed: runs that differ in the seed hold out the same examples


def from_arrays(arrays: Mapping[str, Any], *, source: str, batch_size: int, seed: int, eval_fraction: float) -> DataSet:
    """Return the data set of arrays by name, each [num_examples, ...]: "inputs", and "targets" if they are others.

    The examples held out are drawn at random, the same ones for every seed: files are often sorted by class. `source`
    opens messages. Raises DataError for what is no array of numbers, for arrays of several lengths, and for too few
    examples.
    """
    held: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf" or not array.ndim:
            found = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            raise DataError(f"{source}: {name} is {found}; it must be a numpy array of numbers [num_examples, ...].")
        held[name] = array
    if "inputs" not in held:
        raise DataError(f"{source} has {', '.join(map(str, arrays)) or 'no arrays'}; name one of them inputs.")
    lengths = {name: len(array) for name, array in held.items()}
    if len({*lengths.values()}) > 1:
        text = ", ".join(f"{length} of {name}" for name, length in lengths.items())
        raise DataError(f"{source} has {text}; every array holds one entry an example.")
    held = {"inputs": held["inputs"], "targets": held.get("targets", held["inputs"])}
    num_examples = lengths["inputs"]
    num_eval = num_held_out(f"{source}: {num_examples} examples", num_examples, eval_fraction, batch_size)
    order = generator(ORDER_SEED).permutation(num_examples)

    def read(numbers: np.ndarray) -> Batch:
        return {name: np.asarray(array[order[numbers]]) for name, array in held.items()}

    dims = [array.shape[1] if array.ndim == 2 and array.dtype.kind == "f" else None for array in held.values()]
    flat = {name: np.ascontiguousarray(array).reshape(-1) for name, array in held.items()}
    content = {name: [list(held[name].shape), digest(array)] for name, array in flat.items()}
    return DataSet(
        name="custom",
        source=f"{source}: {num_examples} examples, {', '.join(f'{name} {_shape(a)}' for name, a in held.items())}",
        fingerprint=fingerprint(content=content, batch_size=batch_size, seed=seed, eval_fraction=eval_fraction),
        batch_size=batch_size,
        seed=seed,
        num_examples=num_examples - num_eval,
        num_eval_examples=num_eval,
        read=read,
        input_dim=dims[0],
        target_dim=dims[1],
    )


def _shape(array: np.ndarray) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape[1:]))}]"
