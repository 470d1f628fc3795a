"""The values that plans of executor=mpmd start from: a state, a batch, and numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ppctl.executors.model_shapes import shard_bytes
from ppctl.executors.mpmd.dispatch_plan import Key
from ppctl.executors.mpmd.mpmd_runtime import Runtime
from ppctl.executors.mpmd.rank_trees import Division
from ppctl.schedule.mesh_axes import DATA_AXES
from ppctl.training.pipeline.engines.train_states import PlacedBatches

Tree = Any
STATE = ("params", "optimizer", "step")  # names in a rank's state


@dataclass(frozen=True)
class Given:
    """The values of one engine by plan key: (name, rank), or (name, rank, microbatch)."""

    division: Division
    runtime: Runtime
    staged: Mapping[str, Tree]  # shapes of the state in staged form
    batch_shapes: Mapping[str, jax.ShapeDtypeStruct]
    readers: Mapping[str, Sequence[int]]  # ranks that read "inputs", and "targets"
    num_microbatches: int
    vocab_parts: int  # one on each rank; 0: embedding and head are whole
    key_numbers: Mapping[Key, np.ndarray]  # numbers from which ranks make keys, if layers have any

    @property
    def ranks(self) -> range:
        return range(len(self.division.submeshes))

    @cached_property
    def batches(self) -> PlacedBatches:
        """The placing of batches on the submeshes of the ranks that read them."""
        mesh = self.division.submeshes
        pairs = ((name, rank) for name, ranks in self.readers.items() for rank in ranks)
        shardings = {(name, r): NamedSharding(mesh[r], P(DATA_AXES)) for name, r in pairs}
        return PlacedBatches(self.batch_shapes, shardings)

    @cached_property
    def _numbers(self) -> dict[Key, np.ndarray]:
        """Numbers of microbatches on the ranks that read them, and of parts."""
        numbers = [np.asarray(m, np.int32) for m in range(self.num_microbatches)]
        readers = {rank for ranks in self.readers.values() for rank in ranks}
        readers = self.ranks if self.key_numbers else readers
        found: dict[Key, np.ndarray] = {
            ("m", r, m): number for r in readers for m, number in enumerate(numbers)
        }
        if self.vocab_parts:
            found |= {("part", r): np.asarray(r, np.int32) for r in self.ranks}
        return found | {**self.key_numbers}

    @cached_property
    def _numbers_there(self) -> dict[Key, jax.Array | None]:
        return {key: self.runtime.numbers(value, key[1]) for key, value in self._numbers.items()}

    def values(self, state: Tree, batch: Mapping[Key, Tree]) -> dict[Key, Tree]:
        """Return the values that plans start from."""
        return {**batch} | self.of_state(state) | self._numbers_there

    def of_state(self, state: Tree) -> dict[Key, Tree]:
        """Return the values of a state: a tree for each rank."""
        return {(name, r): tree for r, each in enumerate(state) for name, tree in each.items()}

    def shapes(self) -> dict[Key, Tree]:
        """Return the shapes of the values that plans start from, with shardings on a submesh."""
        shape, described = self.runtime.shape, self.division.described
        shapes: dict[Key, Tree] = {
            key: shape(self.batch_shapes[key[0]], P(DATA_AXES)) for key in self.batches.shardings
        }
        for name, tree in self.staged.items():
            path = (jax.tree_util.DictKey(name),)
            shapes |= {(name, r): shape(*described(tree, r, path)) for r in self.ranks}
        return shapes | {key: shape(value, P()) for key, value in self._numbers.items()}

    def bytes(self) -> list[dict[str, int]]:
        """Return for each rank the bytes of its state and batch on one device, by name."""
        found: list[dict[str, int]] = [{} for _ in self.ranks]
        for (name, rank, *_), shapes in self.shapes().items():
            if name in STATE or name in self.readers:
                found[rank][name] = shard_bytes(shapes)
        return found
