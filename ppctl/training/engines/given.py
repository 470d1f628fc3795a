"""The values that the plans of executor=mpmd start from: a state, a batch, and numbers that programs look up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ppctl.executors.mesh import DATA_AXES
from ppctl.executors.mpmd.division import Division
from ppctl.executors.mpmd.plan import Key
from ppctl.executors.mpmd.runtime import Runtime
from ppctl.executors.spmd.memory import shard_bytes
from ppctl.training.engines.examples import examples_of, put_examples

Tree = Any
STATE = ("params", "optimizer", "step")  # what a rank's state holds


class Given:
    """The values of one engine, keyed as plans have them: (name, rank), or (name, rank, microbatch).

    readers: the ranks that read "inputs", and those that read "targets"; staged: shapes of the state in staged form;
    rates: numbers of the learning rate, which all ranks have, or None; has_parts: of the vocabulary, one on each rank.
    """

    def __init__(
        self,
        division: Division,
        runtime: Runtime,
        staged: Mapping[str, Tree],
        batch_shapes: Mapping[str, jax.ShapeDtypeStruct],
        readers: Mapping[str, Sequence[int]],
        num_microbatches: int,
        rates: np.ndarray | None,
        *,
        has_parts: bool,
    ):
        self.division, self.runtime, self.staged, self.batch_shapes = division, runtime, staged, batch_shapes
        self.readers, self.num_microbatches, self.rates, self.has_parts = readers, num_microbatches, rates, has_parts
        self.ranks = range(len(division.submeshes))

    # the batch

    @cached_property
    def examples(self) -> tuple[int, ...]:
        """The examples of a global batch that this process reads."""
        held = (examples_of(sharding, self._batch_size) for sharding in self._shardings.values())
        return tuple(sorted(set().union(*held)))

    def put(self, batch: Mapping[str, Any]) -> dict[Key, jax.Array]:
        """Return a batch, which holds `examples` alone, on the submeshes of the ranks that read it."""
        found: dict[Key, jax.Array] = {}
        for (name, rank), sharding in self._shardings.items():
            put = put_examples({name: sharding}, self.examples, batch, self._batch_size)
            found[name, rank] = put[name]
        return found

    @cached_property
    def _shardings(self) -> dict[Key, NamedSharding]:
        sharding = lambda rank: NamedSharding(self.division.submeshes[rank], P(DATA_AXES))  # noqa: E731
        return {(name, rank): sharding(rank) for name, ranks in self.readers.items() for rank in ranks}

    @property
    def _batch_size(self) -> int:
        return self.batch_shapes["inputs"].shape[0]

    # all values

    @cached_property
    def _numbers(self) -> dict[Key, np.ndarray]:
        """Those of microbatches on the ranks that look them up, of each rank's part, of the learning rate."""
        ranks = {rank for ranks in self.readers.values() for rank in ranks}
        found: dict[Key, np.ndarray] = {
            ("m", r, m): np.asarray(m, np.int32) for r in ranks for m in range(self.num_microbatches)
        }
        if self.has_parts:
            found |= {("part", r): np.asarray(r, np.int32) for r in self.ranks}
        return found if self.rates is None else found | {("rates", r): self.rates for r in self.ranks}

    @cached_property
    def _numbers_there(self) -> dict[Key, jax.Array | None]:
        return {key: self.runtime.numbers(value, key[1]) for key, value in self._numbers.items()}

    def values(self, state: Tree, batch: Mapping[Key, Tree]) -> dict[Key, Tree]:
        """Return the values that plans start from."""
        return {**batch} | self.of_state(state) | self._numbers_there

    def of_state(self, state: Tree) -> dict[Key, Tree]:
        """Return those of a state: a tree for each rank."""
        return {(name, r): tree for r, of_rank in enumerate(state) for name, tree in of_rank.items()}

    def shapes(self) -> dict[Key, Tree]:
        """Return the shapes of the values that plans start from, with shardings on a submesh."""
        shape = self.runtime.shape
        shapes: dict[Key, Tree] = {key: shape(self.batch_shapes[key[0]], P(DATA_AXES)) for key in self._shardings}
        for name, tree in self.staged.items():
            path = (jax.tree_util.DictKey(name),)
            shapes |= {(name, r): shape(*self.division.described(tree, r, path)) for r in self.ranks}
        return shapes | {key: shape(value, P()) for key, value in self._numbers.items()}

    def bytes(self) -> list[dict[str, int]]:
        """Return for each rank the bytes of one device of its state and of its part of the batch, by name."""
        found: list[dict[str, int]] = [{} for _ in self.ranks]
        for (name, rank, *_), shapes in self.shapes().items():
            if name in STATE or name in self.readers:
                found[rank][name] = shard_bytes(shapes)
        return found
