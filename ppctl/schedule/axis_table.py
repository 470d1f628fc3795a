"""The axes of a device mesh, a record each: the only place that lists them.

Settings, meshes, shardings, sums of gradients, predictions and their texts follow from the records
(`mesh_axes`). A new axis is a record here, and a model that divides itself over it.
"""

from dataclasses import dataclass
from typing import Literal

Divided = Literal["batch", "stages", "parameters", "weights", "tokens", "experts"]


@dataclass(frozen=True)
class Axis:
    """An axis of the mesh.

    divides: what its devices have different parts of. parameters: stored in parts, whole when
    computed with. weights, experts: parts that a device computes with, as a model states
    (`StackOptions.divided`, `sharding`). A device's gradient of a leaf is summed over every axis
    that does not divide the leaf.
    in_stage: whether tasks of a stage communicate over it. mesh.order cannot name such an axis: it
    goes over hosts after all others.
    """

    name: str
    about: str  # of mesh.NAME, for help
    divides: tuple[Divided, ...]
    hosts_place: int  # in the order over hosts: 0 goes first, over the slowest links
    in_stage: bool = False
    in_one_host: bool = False  # whether a mesh on which it goes over hosts is refused
    in_mesh_text: bool = False  # whether mesh=AxBxC gives its size by position
    tuned_about: str = "1"  # sizes that `ppctl tune` takes by default; of an axis in a stage


MESH_AXES = (
    # ranks exchange little, so pp goes over hosts first; dp sums gradients once a step; fsdp
    # gathers parameters, the most bytes; those in a stage send in every layer of every microbatch
    Axis("dp", "data-parallel replicas", ("batch",), hosts_place=1, in_mesh_text=True),
    Axis("pp", "pipeline ranks", ("stages",), hosts_place=0, in_mesh_text=True),
    Axis("fsdp", "shards of the parameters", ("batch", "parameters"), 2, in_mesh_text=True),
    Axis(
        "ep",
        "parts of the experts; elsewhere data-parallel replicas",
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
