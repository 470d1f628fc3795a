"""The mesh: how many devices along each axis."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

from ppctl.config.checks import at_least, choice

ORDERS = ("auto", *map("-".join, permutations(("dp", "pp", "fsdp"))))


@dataclass
class Mesh:
    """Devices along each axis: replicas, pipeline ranks, parameter shards. `mesh=2x4x2` is dp x pp x fsdp."""

    dp: int = 1  # data-parallel replicas
    pp: int = 1  # pipeline ranks
    fsdp: int = 1  # shards of the parameters
    order: str = "auto"  # which axes go over hosts (slices, of TPUs) first, as pp-dp-fsdp, which is auto's over several

    @property
    def num_devices(self) -> int:
        return self.dp * self.pp * self.fsdp

    @property
    def text(self) -> str:
        return f"{self.dp}x{self.pp}" + (f"x{self.fsdp}" if self.fsdp > 1 else "")

    def check(self) -> None:
        for axis in ("dp", "pp", "fsdp"):
            at_least(f"mesh.{axis}", getattr(self, axis), 1)
        choice("mesh.order", self.order, ORDERS)
