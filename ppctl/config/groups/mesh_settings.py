"""The mesh: how many devices along each axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from math import prod
from typing import Any

from ppctl.config.field_checks import at_least, choice
from ppctl.schedule.partition.divisibility import AXES

ORDERS = ("auto", *map("-".join, permutations(("dp", "pp", "fsdp"))))


@dataclass
class Mesh:
    """Devices along each axis. `mesh=2x4x2` is dp x pp x fsdp; two more sizes are tp and cp."""

    dp: int = 1  # data-parallel replicas
    pp: int = 1  # pipeline ranks
    fsdp: int = 1  # shards of the parameters
    tp: int = 1  # shards of each layer's weights and work; inside a host
    cp: int = 1  # parts of each sequence
    # axes that go over hosts (slices, of TPUs) first; auto: pp-dp-fsdp over several
    order: str = "auto"

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def num_devices(self) -> int:
        return prod(self.sizes)

    @property
    def text(self) -> str:
        """As one types it: the sizes, without those at the end that are 1.

        >>> Mesh(2, 4).text, Mesh(2, 4, 2).text, Mesh(1, 4, cp=2).text
        ('2x4', '2x4x2', '1x4x1x1x2')
        """
        return mesh_text(self.sizes)

    @property
    def axes_text(self) -> str:
        """Return the axes with their sizes, tp and cp where they divide anything.

        >>> Mesh(2, 4).axes_text, Mesh(2, 4, tp=2).axes_text
        ('dp=2 pp=4 fsdp=1', 'dp=2 pp=4 fsdp=1 tp=2')
        """
        return axes_text(dict(zip(AXES, self.sizes, strict=True)))

    @property
    def submesh_text(self) -> str:
        """Return the axes of the devices of one rank.

        >>> Mesh(2, 4).submesh_text
        'dp=2 fsdp=1'
        """
        return " ".join(word for word in self.axes_text.split() if not word.startswith("pp="))

    def check(self) -> None:
        for axis in AXES:
            at_least(f"mesh.{axis}", getattr(self, axis), 1)
        choice("mesh.order", self.order, ORDERS)


def axes_text(sizes: Mapping[str, Any]) -> str:
    """Return the axes that there are with their sizes, tp and cp where they divide anything."""
    shown = (axis for axis in AXES if axis in sizes and (axis in AXES[:3] or sizes[axis] != 1))
    return " ".join(f"{axis}={sizes[axis]}" for axis in shown)


def mesh_text(sizes: tuple[Any, ...]) -> str:
    """Return sizes of a mesh as one types them.

    >>> mesh_text((2, 4, 1)), mesh_text((2, 4, 1, 2))
    ('2x4', '2x4x1x2')
    """
    used = max((place for place, size in enumerate(sizes) if size != 1 or place < 2), default=0)
    return "x".join(map(str, sizes[: used + 1]))
