"""The mesh: how many devices along each axis."""

from dataclasses import dataclass
from itertools import permutations
from typing import Annotated

from ppctl.config.field_checks import Settings, one_of, up_to
from ppctl.schedule.mesh_axes import AXES, STAGE_AXES, MeshSizes, axes_record, axes_text, mesh_text

OUTER = (name for name in AXES if name not in STAGE_AXES)
Devices = Annotated[int, up_to(2**17, "the largest machines have about 100,000 accelerators")]
ORDERS = ("auto", *map("-".join, permutations(OUTER)))


@dataclass
class Mesh(axes_record(kind=Devices), Settings):
    """Devices along each axis. `mesh=2x4x2` is dp x pp x fsdp; two more sizes are tp and cp."""

    # axes that go over hosts (slices, of TPUs) first; auto: pp-dp-fsdp over several
    order: Annotated[str, one_of(*ORDERS)] = "auto"

    KEY = "mesh"

    @property
    def sizes(self) -> MeshSizes:
        return MeshSizes.of(vars(self))

    @property
    def num_devices(self) -> int:
        return self.sizes.num_devices

    @property
    def text(self) -> str:
        """As one types it: the sizes, without those at the end that are 1.

        >>> Mesh(2, 4).text, Mesh(2, 4, 2).text, Mesh(1, 4, cp=2).text
        ('2x4', '2x4x2', '1x4x1x1x2')
        """
        return mesh_text(vars(self))

    @property
    def axes_text(self) -> str:
        """Return the axes with their sizes, those inside a stage where they divide anything.

        >>> Mesh(2, 4).axes_text, Mesh(2, 4, tp=2).axes_text
        ('dp=2 pp=4 fsdp=1', 'dp=2 pp=4 fsdp=1 tp=2')
        """
        return axes_text(vars(self))

    @property
    def submesh_text(self) -> str:
        """Return the axes of the devices of one rank.

        >>> Mesh(2, 4).submesh_text
        'dp=2 fsdp=1'
        """
        return " ".join(word for word in self.axes_text.split() if not word.startswith("pp="))
