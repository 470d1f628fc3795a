"""The executors: how the tasks of a schedule run on devices."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from ppctl.config.field_checks import Natural, Settings, one_of
from ppctl.schedule.engine_traits import ALONE, BY_TASKS, IN_TICKS, EngineTraits
from ppctl.schedule.remat import Remat


@dataclass
class Reference(Settings):
    """The un-pipelined model: one program on one device accumulates over the microbatches."""

    name: str = "reference"
    # none | layer | full: what the backward recomputes
    remat: Annotated[str, one_of(*Remat)] = "none"
    # auto: flags that suit the devices, besides XLA_FLAGS' | none
    xla_flags: Annotated[str, one_of("auto", "none")] = "auto"

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

    ENGINE: ClassVar[EngineTraits] = BY_TASKS


AnyExecutor = Reference | Spmd | Mpmd
