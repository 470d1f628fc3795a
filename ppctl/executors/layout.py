"""The layout of parameters: from layers in natural order to chunks on ranks, and how each array is sharded.

natural: leaf [L, ...], layers in model order: what checkpoints hold.
staged:  leaf [V, P, K, ...]: chunk v of rank p holds K layers, padded with zeros where its stage has fewer.

K is the size of the largest stage, so that every device keeps parameters, gradients, optimizer state and stash slots of
that size. Executors compute no padded layer; what remains is clearing its slots and adding zero gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ppctl.schedule.partition.partition import Partition

Tree = Any


def is_layer(path: tuple) -> bool:
    """Return whether a leaf of a parameter tree, or of an optimizer state that mirrors one, is of the layer stack."""
    return any(getattr(key, "key", None) == "layers" for key in path)


@dataclass(frozen=True)
class Layout:
    """The placement of a stack on a mesh."""

    mesh: Mesh
    partition: Partition
    rank_of: tuple[int, ...]

    @cached_property
    def counts(self) -> np.ndarray:
        """Layers of each stage, int [V, P]."""
        num_ranks = self.mesh.shape["pp"]
        return np.array([len(layers) for layers in self._by_chunk()], np.int32).reshape(-1, num_ranks)

    @property
    def is_even(self) -> bool:
        return bool((self.counts == self.counts.max()).all())

    @cached_property
    def _is_in_order(self) -> bool:
        """True where natural order is staged order: stages of one size, dealt round the ranks."""
        _, place = self._index
        return self.is_even and bool((place == np.arange(len(place))).all())

    @property
    def num_chunks(self) -> int:
        return len(self.counts)

    def _by_chunk(self) -> list[range]:
        """The layers of (chunk 0, rank 0), (chunk 0, rank 1), ...: in model order where placement is looped."""
        num_ranks = self.mesh.shape["pp"]
        stages: list[list[range]] = [[] for _ in range(num_ranks)]
        for layers, rank in zip(self.partition, self.rank_of, strict=True):
            stages[rank].append(layers)
        return [stages[r][v] for v in range(len(stages[0])) for r in range(num_ranks)]

    @cached_property
    def _index(self) -> tuple[np.ndarray, np.ndarray]:
        """For each staged place [V, P, K] its layer (0 where padded), and for each layer its place in V*P*K."""
        stages = self._by_chunk()
        longest = max(map(len, stages))
        layer = np.zeros((len(stages), longest), np.int32)
        place = np.zeros(sum(map(len, stages)), np.int32)
        for i, layers in enumerate(stages):
            layer[i, : len(layers)] = layers
            place[layers.start : layers.stop] = i * longest + np.arange(len(layers))
        return layer.reshape(*self.counts.shape, longest), place

    @property
    def numbers(self) -> np.ndarray:
        """The layer that each staged place holds, int [V, P, K]; 0 where padded."""
        return self._index[0]

    def among(self, chunk: int) -> tuple[tuple[int, ...], ...]:
        """Return for each layer slot of a chunk the layers in it on the ranks; where it is padding on all, layer 0."""
        _, num_ranks, num_layer_slots = self.numbers.shape
        of_slot = lambda k: {int(self.numbers[chunk, r, k]) for r in range(num_ranks) if k < self.counts[chunk, r]}  # noqa: E731
        return tuple(tuple(sorted(of_slot(k))) or (0,) for k in range(num_layer_slots))

    @property
    def places(self) -> list[tuple[int, int, int]]:
        """For each layer in model order its (chunk, rank, layer slot) in staged form."""
        layer, place = self._index
        chunks, ranks, layer_slots = np.unravel_index(place, layer.shape)
        return list(zip(chunks.tolist(), ranks.tolist(), layer_slots.tolist(), strict=True))

    def to_staged(self, tree: Tree) -> Tree:
        """Return the staged form of a tree in natural order; other leaves unchanged."""
        layer, _ = self._index
        valid = np.arange(layer.shape[2]) < self.counts[..., None]

        def convert(path: tuple, leaf: jax.Array) -> jax.Array:
            if not is_layer(path):
                return leaf
            if self._is_in_order:
                return leaf.reshape(*layer.shape, *leaf.shape[1:])
            staged = leaf[layer]
            return jnp.where(valid.reshape(valid.shape + (1,) * (leaf.ndim - 1)), staged, 0)

        return jax.tree_util.tree_map_with_path(convert, tree)

    def to_natural(self, tree: Tree) -> Tree:
        """Return the natural form of a staged tree; other leaves unchanged."""
        _, place = self._index

        def convert(path: tuple, leaf: jax.Array) -> jax.Array:
            if not is_layer(path):
                return leaf
            layers = leaf.reshape(-1, *leaf.shape[3:])
            return layers if self._is_in_order else layers[place]

        return jax.tree_util.tree_map_with_path(convert, tree)

    def staged_specs(self, tree: Tree) -> Tree:
        """Return the PartitionSpecs of a staged tree: layers over pp and fsdp, others over both together."""

        def spec(path: tuple, leaf: jax.Array) -> P:
            if is_layer(path):
                return P(None, "pp", None, *self.over(leaf.shape[3:], ("fsdp",)))
            return P(*self.over(leaf.shape, ("pp", "fsdp")))

        return jax.tree_util.tree_map_with_path(spec, tree)

    def natural_specs(self, tree: Tree) -> Tree:
        """Return each natural leaf's PartitionSpec: layers over pp where L is a multiple of it."""

        def spec(path: tuple, leaf: jax.Array) -> P:
            if is_layer(path):
                over_pp = "pp" if leaf.shape[0] % self.mesh.shape["pp"] == 0 else None
                return P(over_pp, *self.over(leaf.shape[1:], ("fsdp",)))
            return P(*self.over(leaf.shape, ("pp", "fsdp")))

        return jax.tree_util.tree_map_with_path(spec, tree)

    def over(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple:
        """Return axis names for each dim of `shape`: the largest that divides takes `axes`, or the last one alone."""
        for names in (axes, axes[-1:]):
            size = int(np.prod([self.mesh.shape[name] for name in names]))
            fits = [d for d, n in enumerate(shape) if n % size == 0]
            if fits and size > 1:
                dim = max(fits, key=lambda d: shape[d])
                return (*(None,) * dim, names)
        return ()

    def shardings(self, specs: Tree) -> Tree:
        """Return the NamedSharding of each PartitionSpec."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=lambda s: isinstance(s, P))


def gather_shards(tree: Tree, specs: Tree) -> Tree:
    """Return, inside shard_map, every leaf whole along the dims that its spec shards over fsdp or (pp, fsdp)."""
    return _over_shards(lambda leaf, axes, dim: jax.lax.all_gather(leaf, axes, axis=dim, tiled=True), tree, specs)


def scatter_sums(tree: Tree, specs: Tree, replicated: tuple[str, ...]) -> Tree:
    """Return, inside shard_map, the sum of every leaf over `replicated`, each device keeping its shard of the spec."""

    def reduce(leaf: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
        rest = tuple(name for name in replicated if name not in axes)
        leaf = jax.lax.psum_scatter(leaf, axes, scatter_dimension=dim, tiled=True)
        return jax.lax.psum(leaf, rest)

    return _over_shards(reduce, tree, specs, lambda leaf: jax.lax.psum(leaf, replicated))


def _over_shards(sharded: Any, tree: Tree, specs: Tree, whole: Any = lambda leaf: leaf) -> Tree:
    def apply(leaf: jax.Array, spec: P) -> jax.Array:
        for dim, names in enumerate(spec):
            axes = names if isinstance(names, tuple) else (names,)
            if "fsdp" in axes:
                return sharded(leaf, axes, dim)
        return whole(leaf)

    return jax.tree.map(apply, tree, specs)
