"""The layers of each stage and the rank of each stage: chunks, slots, and the order of layers.

natural: leaf [L, ...], layers in model order. staged: leaf [V, P, K, ...]: chunk v of rank p holds
K layers. Zeros pad smaller stages to K.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from ppctl.schedule.partition.partition import Partition


@dataclass(frozen=True)
class Placement:
    """The layers of each stage, and each stage's rank. All ranks have equally many stages."""

    partition: Partition
    rank_of: tuple[int, ...]
    least_slots: int = 0  # least number of layer slots of a chunk

    def on(self, ranks: Collection[int]) -> Self:
        """Return the placement of the stages on these ranks, which become ranks 0, 1, ..."""
        place = {rank: i for i, rank in enumerate(ranks)}
        held = [(layers, place[r]) for layers, r in self.stages if r in place]
        partition, rank_of = zip(*held, strict=True)
        return type(self)(partition, rank_of, self.num_slots)

    @property
    def stages(self) -> list[tuple[range, int]]:
        """(layers, rank) of each stage."""
        return list(zip(self.partition, self.rank_of, strict=True))

    @property
    def num_ranks(self) -> int:
        return max(self.rank_of) + 1

    @property
    def num_chunks(self) -> int:
        return len(self.counts)

    @property
    def num_slots(self) -> int:
        """Layer slots of a chunk: the layers of the largest stage."""
        return max(int(self.counts.max()), self.least_slots)

    @cached_property
    def counts(self) -> np.ndarray:
        """Number of layers of each stage, int [V, P]."""
        counts = [len(layers) for layers in self._by_chunk]
        return np.array(counts, np.int32).reshape(-1, self.num_ranks)

    @property
    def is_even(self) -> bool:
        return bool((self.counts == self.num_slots).all())

    @cached_property
    def numbers(self) -> np.ndarray:
        """Layer number of each slot, int [V, P, K]; 0 in padding."""
        found = np.zeros((self.counts.size, self.num_slots), np.int32)
        for i, layers in enumerate(self._by_chunk):
            found[i, : len(layers)] = layers
        return found.reshape(*self.counts.shape, -1)

    @property
    def layer_in_slot(self) -> np.ndarray:
        """Layer number of each slot, int [V, P, K]; -1 in padding."""
        return np.where(self._is_held, self.numbers, -1)

    @cached_property
    def layers(self) -> np.ndarray:
        """The numbers of the held layers, ascending: all, unless `on` left ranks out."""
        return np.sort(self.numbers[self._is_held])

    def among(self, chunk: int) -> tuple[tuple[int, ...], ...]:
        """Return the layers that ranks hold in each slot of a chunk; (0,) if all are padding."""
        slots = []
        for k in range(self.numbers.shape[2]):
            held = self.numbers[chunk, :, k][k < self.counts[chunk]]
            slots.append(tuple(np.unique(held).tolist()) or (0,))
        return tuple(slots)

    def staged(self, leaf: jax.Array) -> jax.Array:
        """Return the staged form [V, P, K, ...] of a leaf [layers, ...]."""
        if self._is_in_order:
            return leaf.reshape(*self.numbers.shape, *leaf.shape[1:])
        rows = np.searchsorted(self.layers, self.numbers).astype(np.int32)
        staged, rest = leaf[rows], (1,) * (leaf.ndim - 1)
        is_held = self._is_held.reshape(*self.numbers.shape, *rest)
        return jnp.where(is_held, staged, jnp.zeros((), leaf.dtype))

    def natural(self, leaf: jax.Array) -> jax.Array:
        """Return the form [layers, ...], in model order, of a staged leaf."""
        layers = leaf.reshape(-1, *leaf.shape[3:])
        return layers if self._is_in_order else layers[self._slots]

    @cached_property
    def _by_chunk(self) -> list[range]:
        """The layers of (chunk 0, rank 0), (chunk 0, rank 1), ...; looped: model order."""
        of_rank: list[list[range]] = [[] for _ in range(self.num_ranks)]
        for layers, rank in self.stages:
            of_rank[rank].append(layers)
        return [of_rank[r][v] for v in range(len(of_rank[0])) for r in range(self.num_ranks)]

    @property
    def _is_held(self) -> np.ndarray:
        """Whether a slot holds a layer, bool [V, P, K]."""
        return np.arange(self.numbers.shape[2]) < self.counts[..., None]

    @cached_property
    def _slots(self) -> np.ndarray:
        """The flat index of each held layer's slot, in the order of layers."""
        held = np.flatnonzero(self._is_held)
        return held[np.argsort(self.numbers.ravel()[held])].astype(np.int32)

    @cached_property
    def _is_in_order(self) -> bool:
        """Whether natural order is staged order: stages are equal and placed round-robin."""
        return self.is_even and bool((self._slots == np.arange(len(self._slots))).all())
