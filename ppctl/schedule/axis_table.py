"""The axes of a device mesh, one record each. No other place lists them.

Settings, meshes, shardings, sums of gradients, predictions and their texts follow from the records
(`mesh_axes`). A new axis needs a record in this file, and a model that is sharded over it.
"""

from dataclasses import dataclass
from typing import Literal

Divided = Literal["batch", "stages", "parameters", "weights", "tokens", "experts"]


@dataclass(frozen=True)
class Axis:
    """An axis of the mesh.

    divides: data that is split over the axis. "parameters" are stored in parts and gathered for
    compute; "weights" and "experts" stay in parts, as a model declares (`StackOptions.divided`,
    `sharding`). The gradient of a parameter is summed over every axis that does not divide it.
    in_stage: whether tasks of a stage communicate over the axis. mesh.order cannot name such an
    axis: it is placed over hosts after all others.
    """

    name: str
    about: str  # help text of mesh.NAME
    divides: tuple[Divided, ...]
    hosts_place: int  # place in the order of axes over hosts; 0: first, over the slowest links
    in_stage: bool = False
    in_one_host: bool = False  # whether a mesh is refused if this axis crosses hosts
    in_mesh_text: bool = False  # whether mesh=AxBxC gives the size by position
    tuned_about: str = "1"  # help text of the default sizes in `ppctl tune`, if in_stage


MESH_AXES = (
    # order over hosts: pp first, as ranks exchange little; dp sums gradients once a step; fsdp
    # gathers parameters, the most bytes; axes in a stage send in every layer of every microbatch
    Axis("dp", "data-parallel replicas", ("batch",), hosts_place=1, in_mesh_text=True),
    Axis("pp", "pipeline ranks", ("stages",), hosts_place=0, in_mesh_text=True),
    Axis("fsdp", "shards of the parameters", ("batch", "parameters"), 2, in_mesh_text=True),
    Axis(
        "ep",
        "parts of the experts; data-parallel replicas for all other layers",
        ("batch", "experts"),
        hosts_place=3,
        in_stage=True,
        in_mesh_text=True,
        tuned_about="those that suit the model, inside a host",
    ),
    Axis(
        "tp",
        "shards of each layer's weights and work; inside a host",
        ("weights",),
        hosts_place=5,
        in_stage=True,
        in_one_host=True,
        in_mesh_text=True,
        tuned_about="those that suit the model, inside a host",
    ),
    Axis(
        "cp",
        "parts of each sequence",
        ("tokens",),
        hosts_place=4,
        in_stage=True,
        in_mesh_text=True,
        tuned_about="those that leave 4096 tokens a device",
    ),
)
