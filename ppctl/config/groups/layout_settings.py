"""The layout of a run: its mesh, which layers each stage holds, and how tasks run on devices."""

from dataclasses import dataclass
from itertools import permutations
from typing import Annotated, Any, ClassVar, cast

from ppctl.config.field_checks import Natural, Settings, one_of, up_to
from ppctl.errors import ConfigError
from ppctl.schedule.engine_traits import ALONE, BY_TASKS, IN_TICKS, EngineTraits
from ppctl.schedule.mesh_axes import AXES, STAGE_AXES, MeshSizes, axes_record, axes_text, mesh_text
from ppctl.schedule.remat import Remat

OUTER = (name for name in AXES if name not in STAGE_AXES)
MOST_DEVICES = up_to(2**17, "the largest machines have about 100,000 accelerators")
Devices = Annotated[int, MOST_DEVICES]
ORDERS = ("auto", *map("-".join, permutations(OUTER)))


@dataclass
class Mesh(axes_record(kind=Devices), Settings):
    """Devices along each axis. `mesh=2x4x2` is dp x pp x fsdp; three more are ep, tp and cp."""

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
        """The sizes as one types them, without those at the end that are 1."""
        return mesh_text(vars(self))

    @property
    def axes_text(self) -> str:
        """The axes with their sizes, those inside a stage where they divide anything."""
        return axes_text(vars(self))


# --- partitions: the layers of each stage ---------------------------------------------------------


@dataclass
class Uniform(Settings):
    """As many layers on each stage, or one more on the first ones."""

    name: str = "uniform"

    KEY = "partition"


@dataclass
class Balanced(Uniform):
    """The least work on the largest stage, in FLOPs of layers, embedding and head."""

    name: str = "balanced"


@dataclass
class Explicit(Uniform):
    """The stated layers of each stage: [3,2,2,3], or "Et*3|(tt|)*2,tL" as in Megatron-LM."""

    name: str = "explicit"
    # a list with the number of each stage, or text: E embedding, t layer, L loss, | next stage
    layers: Any = "???"

    def check(self) -> None:
        counts: Any = self.layers
        is_list = isinstance(counts, list) and all(
            type(count) is int for count in cast("list[Any]", counts)
        )
        if not is_list and not isinstance(counts, str):  # text is read by schedule.partition
            raise ConfigError(
                f"partition.layers={counts} is neither a list with the number of layers of each "
                "stage, [3,2,2,3], nor text such as 'Et*3|(tt|)*2,tL'."
            )


# --- executors: how the tasks of a schedule run on devices ---------------------------------------


@dataclass
class Reference(Settings):
    """The un-pipelined model: one program on one device accumulates over the microbatches."""

    name: str = "reference"
    # none | layer | full: what the backward recomputes
    remat: Annotated[str, one_of(*Remat)] = "none"
    # auto: flags that suit the devices, besides XLA_FLAGS' | traced: the same without CUDA graphs,
    # which hide tasks from traces; run.profile turns auto into it | none
    xla_flags: Annotated[str, one_of("auto", "traced", "none")] = "auto"

    KEY = "executor"
    ENGINE: ClassVar[EngineTraits] = ALONE
    REMAT: ClassVar[tuple[str, ...]] = tuple(map(str, Remat))


@dataclass
class Pipelined(Reference):
    """Settings of pipelined executors: the division of stages over the devices of a rank."""

    # layers of a device unrolled in the program up to this many, scanned above
    unroll: Natural = 16
    # over fsdp: step (all layers at once) | layer (each before its use)
    gather: Annotated[str, one_of("step", "layer")] = "step"
    sequence_parallel: bool = True  # with mesh.tp: tokens between layers are divided, too


@dataclass
class Spmd(Pipelined):
    """One XLA program: a scan over ticks, one ring permute each way a tick."""

    name: str = "spmd"

    ENGINE: ClassVar[EngineTraits] = IN_TICKS


@dataclass
class Mpmd(Pipelined):
    """A compiled function for each stage and kind of task, dispatched in the schedule's order."""

    name: str = "mpmd"
    # with mesh.cp: keys and values are gathered | go round a ring
    context: Annotated[str, one_of("gather", "ring")] = "gather"
    post_validation: bool = False  # update before the global norm is known, again if wrong
    # programs of a forward and a backward next to each other: two (none) | one, in which the sends
    # of each overlap the products of the other (fb)
    fuse: Annotated[str, one_of("none", "fb")] = "none"

    ENGINE: ClassVar[EngineTraits] = BY_TASKS


AnyExecutor = Reference | Spmd | Mpmd
