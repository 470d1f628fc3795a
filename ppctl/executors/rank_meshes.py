"""The mesh of each pipeline rank, and the mesh over which natural order is divided.

Ranks whose meshes have equal sizes form a group: they run the same programs, and the devices of a
group are one rectangular mesh. `ppctl.mesh` makes one group of all ranks.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
from jax.sharding import AxisType, Mesh

from ppctl.executors.described_devices import is_described
from ppctl.executors.device_mesh import is_mine
from ppctl.schedule.mesh_axes import RANK_AXES, MeshSizes


class RankGroup(NamedTuple):
    """Ranks of equal sizes. mesh: their devices; index i along "pp" is rank ranks[i]."""

    mesh: Mesh
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class RankMeshes:
    """The groups of ranks, and the mesh of all devices that stores natural order."""

    groups: tuple[RankGroup, ...]
    storage: Mesh

    @classmethod
    def of(cls, mesh: Mesh) -> Self:
        """Return the rank meshes of a mesh: slices of equal sizes."""
        return cls((RankGroup(mesh, tuple(range(mesh.shape["pp"]))),), mesh)

    @cached_property
    def by_rank(self) -> tuple[Mesh, ...]:
        """The mesh of each rank, with the axes `RANK_AXES`."""
        found: dict[int, Mesh] = {}
        for mesh, ranks in self.groups:
            place, types = mesh.axis_names.index("pp"), (AxisType.Auto,) * len(RANK_AXES)
            for i, rank in enumerate(ranks):
                found[rank] = Mesh(mesh.devices.take(i, place), RANK_AXES, axis_types=types)
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
        places = np.arange(self.num_devices).reshape(self.storage.devices.shape)
        by_rank = np.moveaxis(places, self.storage.axis_names.index("pp"), 0)
        return tuple(tuple(each.ravel().tolist()) for each in by_rank)
