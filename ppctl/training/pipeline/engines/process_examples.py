"""The examples of a global batch that a process reads, and the arrays made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding


def examples_of(sharding: NamedSharding, batch_size: int) -> tuple[int, ...]:
    """Return the examples, ascending, of a batch sharded along its first dim on this process."""
    held = sharding.addressable_devices_indices_map((batch_size,)).values()
    found = {example for index in held if index for example in range(batch_size)[index[0]]}
    return tuple(sorted(found))


def put_examples(
    shardings: Mapping[str, NamedSharding],
    examples: Sequence[int],
    batch: Mapping[str, np.ndarray],
    batch_size: int,
) -> dict[str, jax.Array]:
    """Return global arrays [batch_size, ...] of a batch of only these examples."""
    place = {example: i for i, example in enumerate(examples)}

    def one(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
        dtype = jax.dtypes.canonicalize_dtype(values.dtype)  # 32 bits without x64
        values, shape = values.astype(dtype, copy=False), (batch_size, *values.shape[1:])
        if not sharding.addressable_devices:  # all devices are other processes'
            return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
        part = lambda index: values[[place[example] for example in range(batch_size)[index[0]]]]  # noqa: E731
        return jax.make_array_from_callback(shape, sharding, part, dtype=dtype)

    return {name: one(np.asarray(batch[name]), sharding) for name, sharding in shardings.items()}
