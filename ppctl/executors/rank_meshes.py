"""The mesh of each pipeline rank, and the mesh over which natural order is divided.

Ranks whose meshes have equal sizes form a group: they run the same programs, and the devices of a
group are one rectangular mesh. `ppctl.mesh` makes one group of all ranks, `ppctl.mesh(ranks=)` one
for each size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AxisType, Mesh

from ppctl.executors.described_devices import is_described
from ppctl.executors.device_mesh import hosts_text, in_order, is_mine, mesh_of
from ppctl.schedule.mesh_axes import AXES, RANK_AXES, MeshSizes, ranks_text


class RankGroup(NamedTuple):
    """Ranks of equal sizes. mesh: their devices; index i along "pp" is rank ranks[i]."""

    mesh: Mesh
    ranks: tuple[int, ...]


PP = AXES.index("pp")


@dataclass(frozen=True)
class RankMeshes:
    """The groups of ranks, and the mesh of all devices that stores natural order."""

    groups: tuple[RankGroup, ...]
    storage: Mesh

    @classmethod
    def of(cls, mesh: "Mesh | RankMeshes") -> "RankMeshes":
        """Return the rank meshes of a mesh: slices of equal sizes. Rank meshes stay as they are."""
        if isinstance(mesh, RankMeshes):
            return mesh
        return cls((RankGroup(mesh, tuple(range(mesh.shape["pp"]))),), mesh)

    @classmethod
    def of_sizes(cls, devices: Sequence[Any], ranks: Sequence[MeshSizes]) -> "RankMeshes":
        """Return the meshes of ranks of these sizes, which take the devices in order.

        Natural order is stored over all devices: over fsdp by the largest power of two that divides
        their number, the rest are copies. Raises ConfigError like `in_order`.
        """
        ends = accumulate((sizes.num_devices for sizes in ranks), initial=0)
        blocks = [
            in_order(devices[first:last], sizes)
            for (first, last), sizes in zip(pairwise(ends), ranks, strict=True)
        ]
        same = {sizes: [r for r, each in enumerate(ranks) if each == sizes] for sizes in ranks}
        groups = tuple(
            RankGroup(mesh_of(np.concatenate([blocks[r] for r in group], PP)), tuple(group))
            for group in same.values()
        )
        if len(groups) == 1:
            return cls.of(groups[0].mesh)
        flat = np.concatenate([block.ravel() for block in blocks])
        shards = len(flat) & -len(flat)
        return cls(groups, mesh_of(flat.reshape(MeshSizes(len(flat) // shards, 1, shards).shape)))

    @cached_property
    def by_rank(self) -> tuple[Mesh, ...]:
        """The mesh of each rank, with the axes `RANK_AXES`."""
        found: dict[int, Mesh] = {}
        for mesh, ranks in self.groups:
            types = (AxisType.Auto,) * len(RANK_AXES)
            for i, rank in enumerate(ranks):
                found[rank] = Mesh(mesh.devices.take(i, PP), RANK_AXES, axis_types=types)
        return tuple(found[rank] for rank in sorted(found))

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """The index of each rank's group."""
        groups = {rank: g for g, (_, ranks) in enumerate(self.groups) for rank in ranks}
        return tuple(groups[rank] for rank in sorted(groups))

    @cached_property
    def is_mine(self) -> tuple[bool, ...]:
        """Whether this process has a device of each rank; of described devices it has all."""
        return tuple(self.is_described or is_mine(mesh) for mesh in self.by_rank)

    @cached_property
    def is_described(self) -> bool:
        return is_described(self.storage)

    @property
    def num_ranks(self) -> int:
        return len(self.group_of)

    @property
    def num_devices(self) -> int:
        return sum(mesh.size for mesh, _ in self.groups)

    @property
    def sizes(self) -> MeshSizes:
        """The sizes of the storage mesh."""
        return MeshSizes.of(self.storage.shape)

    @property
    def sizes_by_rank(self) -> tuple[MeshSizes, ...]:
        """The sizes of each rank."""
        sizes = [MeshSizes.of(mesh.shape).only(RANK_AXES) for mesh, _ in self.groups]
        return tuple(sizes[group] for group in self.group_of)

    @property
    def text(self) -> str | None:
        """The sizes of unequal ranks as typed after `mesh.ranks=`; None if all are equal."""
        return None if len(self.groups) == 1 else ranks_text(self.sizes_by_rank)

    @property
    def hosts_text(self) -> str | None:
        """The hosts, and of equal ranks the axes that span them; None for one host."""
        return hosts_text(self.storage, has_axes=self.text is None)

    @property
    def device(self) -> Any:
        """The first device. All devices of a pipeline are of one kind."""
        return self.storage.devices.flat[0]

    @property
    def rank_devices(self) -> int:
        """The mean number of devices of a rank."""
        return self.num_devices // self.num_ranks

    @cached_property
    def device_numbers(self) -> tuple[tuple[int, ...], ...]:
        """The device ids of each rank, or places in the storage mesh if it repeats one device."""
        if len({*self.storage.devices.flat}) == self.num_devices:
            return tuple(tuple(d.id for d in mesh.devices.flat) for mesh in self.by_rank)
        if len(self.groups) > 1:
            ends = accumulate((mesh.size for mesh in self.by_rank), initial=0)
            return tuple(tuple(range(*each)) for each in pairwise(ends))
        places = np.arange(self.num_devices).reshape(self.storage.devices.shape)
        return tuple(tuple(each.ravel().tolist()) for each in np.moveaxis(places, PP, 0))
