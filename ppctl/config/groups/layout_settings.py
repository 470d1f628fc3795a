"""The layout of a run: its mesh, which layers each stage holds, and how tasks run on devices."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import permutations
from typing import Annotated, Any, ClassVar, Self, cast

from ppctl.config.field_checks import Natural, Settings, domains, one_of, up_to
from ppctl.errors import ConfigError
from ppctl.schedule import mesh_axes
from ppctl.schedule.engine_traits import ALONE, BY_TASKS, IN_TICKS, EngineTraits
from ppctl.schedule.mesh_axes import AXES, RANK_AXES, STAGE_AXES, MeshSizes, axes_record, equal_runs
from ppctl.schedule.remat import Remat

OUTER = (name for name in AXES if name not in STAGE_AXES)
MOST_DEVICES = up_to(2**17, "the largest machines have about 100,000 accelerators")
Devices = Annotated[int, MOST_DEVICES]
ORDERS = ("auto", *map("-".join, permutations(OUTER)))


@dataclass
class RankAxes(axes_record(RANK_AXES, Devices)):
    """Devices of a pipeline rank along each axis, or of several ranks of equal sizes."""

    ranks: str | None = None  # FIRST-LAST; None: the next rank


@dataclass
class Mesh(axes_record(kind=Devices), Settings):
    """Devices along each axis. `mesh=2x4x2` is dp x pp x fsdp; three more are ep, tp and cp."""

    # order of the axes over hosts (TPU slices); auto: pp-dp-fsdp over several hosts
    order: Annotated[str, one_of(*ORDERS)] = "auto"
    # sizes of each rank, in place of the axes above: [{fsdp: 4}, {ranks: 1-2, dp: 2, tp: 2}]
    ranks: list[RankAxes] = field(default_factory=list[RankAxes])

    @classmethod
    def of(cls, ranks: Sequence[MeshSizes], order: str = "auto") -> Self:
        """Return the mesh of ranks with these sizes."""
        if len({*ranks}) == 1:
            return cls(**replace(ranks[0], pp=len(ranks)).by_axis, order=order)
        entries = list[RankAxes]()
        for numbers, sizes in equal_runs(ranks):
            entries.append(RankAxes(ranks=numbers))
            for axis in RANK_AXES:
                setattr(entries[-1], axis, getattr(sizes, axis))
        return cls(pp=len(ranks), order=order, ranks=entries)

    def check(self) -> None:
        Settings.check(self)
        for number, each in enumerate(self.ranks):
            domains(f"mesh.ranks[{number}]", each)
        if not self.ranks:
            return
        number = len(self.by_rank)
        for axis, size in self.sizes.by_axis.items():
            if size not in (1, number if axis == "pp" else 1):
                what = f"mesh.ranks states the sizes of {number} ranks"
                remedy = "Leave it out" if axis == "pp" else f"Use mesh.{axis}=1"
                raise ConfigError(f"mesh.{axis}={size}, but {what}. {remedy}.")
        if self.order != "auto":
            what = f"mesh.order={self.order} orders the axes of equal ranks over hosts"
            raise ConfigError(f"{what}, but mesh.ranks takes devices rank by rank. Use auto.")

    @property
    def sizes(self) -> MeshSizes:
        """The sizes of a mesh of equal ranks."""
        return MeshSizes.of(vars(self))

    @property
    def by_rank(self) -> tuple[MeshSizes, ...]:
        """The sizes of each rank."""
        if not self.ranks:
            return (self.sizes.only(RANK_AXES),) * self.sizes.pp
        return mesh_axes.rank_sizes([vars(each) for each in self.ranks])

    @property
    def num_devices(self) -> int:
        return sum(sizes.num_devices for sizes in self.by_rank)

    @property
    def text(self) -> str:
        """The sizes as typed after `mesh=`, without trailing sizes of 1."""
        return mesh_axes.mesh_text(asdict(self))

    @property
    def axes_text(self) -> str:
        """The axes with their sizes; axes inside a stage only with a size above 1."""
        return mesh_axes.axes_text(asdict(self))


# --- partitions: the layers of each stage ---------------------------------------------------------


@dataclass
class Uniform(Settings, prefix="partition"):
    """Equally many layers on each stage, or one more on the first ones."""

    name: str = "uniform"


@dataclass
class Balanced(Uniform):
    """The division with the fewest FLOPs on the largest stage; embedding and head count too."""

    name: str = "balanced"


@dataclass
class Explicit(Uniform):
    """The stated layers of each stage: [3,2,2,3], or "Et*3|(tt|)*2,tL" as in Megatron-LM."""

    name: str = "explicit"
    # list: layers of each stage; text: E embedding, t layer, L loss, | next stage
    layers: Any = "???"

    def check(self) -> None:
        counts: Any = self.layers
        is_list = isinstance(counts, list) and all(
            type(count) is int for count in cast("list[Any]", counts)
        )
        if not is_list and not isinstance(counts, str):  # schedule/partition/ parses text
            raise ConfigError(
                f"partition.layers={counts} is neither a list with the number of layers of each "
                "stage, [3,2,2,3], nor text such as 'Et*3|(tt|)*2,tL'."
            )


AnyPartition = Uniform | Balanced | Explicit

# --- executors: how the tasks of a schedule run on devices ---------------------------------------


@dataclass
class Reference(Settings, prefix="executor"):
    """The un-pipelined model: one program on one device accumulates over the microbatches."""

    name: str = "reference"
    # part that the backward recomputes: none | layer | full
    remat: Annotated[str, one_of(*Remat)] = "none"
    # auto: flags for the devices, added to XLA_FLAGS | traced: the same without CUDA graphs, which
    # hide tasks from traces; run.profile turns auto into traced | none
    xla_flags: Annotated[str, one_of("auto", "traced", "none")] = "auto"

    ENGINE: ClassVar[EngineTraits] = ALONE
    REMAT: ClassVar[tuple[str, ...]] = tuple(map(str, Remat))


@dataclass
class Pipelined(Reference):
    """Settings of pipelined executors: the division of stages over the devices of a rank."""

    # maximum layers of a device that are unrolled; more are scanned
    unroll: Natural = 16
    # gathers over fsdp: step (all layers at once) | layer (each before its use)
    gather: Annotated[str, one_of("step", "layer")] = "step"
    sequence_parallel: bool = True  # with mesh.tp: divide tokens between layers, too


@dataclass
class Spmd(Pipelined):
    """One XLA program: a scan over ticks, with one ring permute each way per tick."""

    name: str = "spmd"

    ENGINE: ClassVar[EngineTraits] = IN_TICKS


@dataclass
class Mpmd(Pipelined):
    """One compiled function for each stage and kind of task, dispatched in the schedule's order."""

    name: str = "mpmd"
    # with mesh.cp: keys and values are gathered (gather) | sent round a ring (ring)
    context: Annotated[str, one_of("gather", "ring")] = "gather"
    # update before the global gradient norm is known; if it clips, repeat the update
    post_validation: bool = False
    # adjacent forward and backward: two programs (none) | one program, with the sends of each
    # overlapping the products of the other (fb)
    fuse: Annotated[str, one_of("none", "fb")] = "none"

    ENGINE: ClassVar[EngineTraits] = BY_TASKS


AnyExecutor = Reference | Spmd | Mpmd
