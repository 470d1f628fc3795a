"""The arrays of training: states in natural and staged form, and a process's examples.

Natural: layers [L, ...] in model order. Staged: [V, P, K, ...], K layer slots in each of V chunks
on each of P ranks (`ppctl.executors.parameter_layout`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from ppctl.executors.compiler_options import compiled_quickly
from ppctl.executors.parameter_layout import Layout, with_layers
from ppctl.model.stack import flat_batch, num_examples

Tree = Any


@dataclass(frozen=True)
class States:
    """The states of a layout's layers: all of a model, or those of a group of ranks."""

    layout: Layout
    init: Callable[..., Tree]  # (seed, layers=None) -> the first state of layers, in natural order
    shapes: Tree  # shapes of the whole model's state, in natural order
    seed: int = 0

    @cached_property
    def natural(self) -> Tree:
        """Shapes, dtypes and shardings of the state in natural order, as in checkpoints."""
        return self._described(self._shapes, self.layout.natural_specs)

    @cached_property
    def staged(self) -> Tree:
        """Shapes, dtypes and shardings of the staged state."""
        shapes = jax.eval_shape(self.layout.to_staged, self._shapes)
        return self._described(shapes, self.layout.staged_specs)

    def _described(self, shapes: Tree, specs: Callable[[Tree], Tree]) -> Tree:
        shardings = self.layout.shardings(specs(shapes))
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings
        )

    def new(self, seed: int | None = None) -> Tree:
        """Return the initial state, made staged and sharded, so it need not fit on one device."""
        seed = self.seed if seed is None else seed
        layers = () if self.has_all else (self.layout.placement.layers,)

        def staged() -> Tree:
            return self.layout.to_staged(self.init(seed, *layers))

        return compiled_quickly(staged, "light", out_shardings=shardings_of(self.staged))()

    @property
    def has_all(self) -> bool:
        """Whether the layout holds all layers of the model."""
        number = jax.tree.leaves(self.shapes["params"]["layers"])[0].shape[0]
        return len(self.layout.placement.layers) == number

    @cached_property
    def _shapes(self) -> Tree:
        """The shapes of the held layers' state, in natural order."""
        return with_layers(self.shapes, self.layout.placement.layers)

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


@dataclass(frozen=True)
class PlacedBatches:
    """The placement of global batches on a mesh, or on the submeshes of the ranks that read them.

    Placed arrays are [microbatches, examples of a microbatch, ...], and devices divide the examples
    of each microbatch: so the same examples form microbatch m however many devices divide it.

    shapes: shapes of a global batch. shardings: shardings of the placed arrays by name or (name,
    rank); they divide only the examples.
    """

    shapes: Mapping[str, Tree]
    shardings: Mapping[Any, NamedSharding]
    num_microbatches: int = 1

    @property
    def size(self) -> int:
        """The number of examples of a global batch."""
        return num_examples(self.shapes["inputs"])

    @cached_property
    def placed(self) -> dict[Any, Tree]:
        """Shapes, dtypes and shardings of a placed batch."""

        def one(a: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            shape = *self._numbers.shape, *a.shape[1:]
            return jax.ShapeDtypeStruct(shape, a.dtype, sharding=sharding)

        return {
            key: jax.tree.map(partial(one, sharding=sharding), self.shapes[name_of(key)])
            for key, sharding in self.shardings.items()
        }

    @cached_property
    def _numbers(self) -> np.ndarray:
        """The numbers of the examples of each microbatch, [microbatches, examples]."""
        return np.arange(self.size).reshape(self.num_microbatches, -1)

    @cached_property
    def examples(self) -> tuple[int, ...]:
        """The numbers of a global batch's examples on this process's devices, ascending."""
        shape, held = self._numbers.shape, set[int]()
        for sharding in self.shardings.values():
            for index in sharding.addressable_devices_indices_map(shape).values():
                held.update(self._numbers[index].ravel().tolist() if index else ())
        return tuple(sorted(held))

    def is_placed(self, array: Any, key: str | tuple[str, int]) -> bool:
        """Return whether `put` has made an array of this key."""
        return (
            isinstance(array, jax.Array)
            and array.sharding == self.shardings.get(key)
            and array.shape[:2] == self._numbers.shape
        )

    def in_examples(self, batch: Any) -> Any:
        """Return a batch with its placed arrays as [examples, ...] on the host, all else as is."""

        def one(array: Any, name: str) -> Any:
            return flat_batch(np.asarray(array)) if self.is_placed(array, name) else array

        if not isinstance(batch, Mapping):
            return batch
        return {name: jax.tree.map(partial(one, name=name), part) for name, part in batch.items()}

    def put(self, batch: Mapping[str, Any]) -> dict[Any, Tree]:
        """Return placed global arrays from a batch of this process's `examples` only."""
        held = np.array(self.examples, np.int64)

        def one(array: Any, sharding: NamedSharding) -> jax.Array:
            values = np.asarray(array)
            dtype = jax.dtypes.canonicalize_dtype(values.dtype)  # 64 bits only with JAX's x64
            values = values.astype(dtype, copy=False)
            shape = *self._numbers.shape, *values.shape[1:]
            if not sharding.addressable_devices:  # all devices belong to other processes
                return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)

            def part(index: Any) -> np.ndarray:
                return values[np.searchsorted(held, self._numbers[index[:2]])]

            return jax.make_array_from_callback(shape, sharding, part, dtype=dtype)

        return {
            key: jax.tree.map(partial(one, sharding=sharding), batch[name_of(key)])
            for key, sharding in self.shardings.items()
        }


def name_of(key: str | tuple[str, int]) -> str:
    """Return the name of a placed array: "inputs" or "targets"."""
    return key if isinstance(key, str) else key[0]
