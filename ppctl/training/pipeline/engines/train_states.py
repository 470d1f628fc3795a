"""The arrays of training: states in natural order and staged, and a process's examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from ppctl.executors.parameter_layout import Layout

Tree = Any


@dataclass(frozen=True)
class States:
    """The states of a model on a mesh; `init` makes the first in natural order."""

    layout: Layout
    init: Callable[[int], Tree]  # seed -> state
    seed: int = 0

    def init_staged(self, seed: int | None = None) -> Tree:
        return self.layout.to_staged(self.init(self.seed if seed is None else seed))

    @cached_property
    def natural(self) -> Tree:
        """Shapes, dtypes and shardings of the state as checkpoints hold it."""
        return self._described(lambda: self.init(self.seed), self.layout.natural_specs)

    @cached_property
    def staged(self) -> Tree:
        """Shapes, dtypes and shardings of the state by stage."""
        return self._described(self.init_staged, self.layout.staged_specs)

    def _described(self, function: Callable[[], Tree], specs: Callable[[Tree], Tree]) -> Tree:
        shapes: Tree = jax.eval_shape(function)
        shardings = self.layout.shardings(specs(shapes))
        shape = lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)  # noqa: E731
        return jax.tree.map(shape, shapes, shardings)

    def new(self, seed: int | None = None) -> Tree:
        """Return the initial state, staged, never whole on one device of several."""
        return jax.jit(lambda: self.init_staged(seed), out_shardings=shardings_of(self.staged))()

    @cached_property
    def to_natural(self) -> Callable[[Tree], Tree]:
        return jax.jit(self.layout.to_natural, out_shardings=shardings_of(self.natural))

    @cached_property
    def params_to_natural(self) -> Callable[[Tree], Tree]:
        return jax.jit(self.layout.to_natural, out_shardings=shardings_of(self.natural["params"]))

    @cached_property
    def to_staged(self) -> Callable[[Tree], Tree]:
        return jax.jit(self.layout.to_staged, out_shardings=shardings_of(self.staged))


def shardings_of(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: a.sharding, tree)


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

    return {
        name: jax.tree.map(lambda a, to=sharding: one(np.asarray(a), to), batch[name])
        for name, sharding in shardings.items()
    }
