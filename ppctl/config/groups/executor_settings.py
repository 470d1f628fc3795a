"""The executors: how the tasks of a schedule run on devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ppctl.config.field_checks import at_least, choice
from ppctl.schedule.engine_traits import ALONE, BY_TASKS, IN_TICKS, EngineTraits
from ppctl.schedule.remat import Remat


@dataclass
class Reference:
    """The un-pipelined model: one program on one device accumulates over the microbatches."""

    name: str = "reference"
    remat: str = "none"  # none | layer | full: what the backward recomputes
    xla_flags: str = "auto"  # auto: flags that suit the devices, besides XLA_FLAGS' | none

    ENGINE: ClassVar[EngineTraits] = ALONE
    REMAT: ClassVar[tuple[str, ...]] = tuple(map(str, Remat))

    def check(self) -> None:
        choice("executor.remat", self.remat, self.REMAT)
        choice("executor.xla_flags", self.xla_flags, ("auto", "none"))


@dataclass
class Pipelined(Reference):
    """Settings of pipelined executors: the division of stages over the devices of a rank."""

    unroll: int = 16  # layers of a device unrolled in the program up to this many, scanned above
    gather: str = "step"  # over fsdp: step (all layers at once) | layer (each before its use)
    sequence_parallel: bool = True  # with mesh.tp: tokens between layers are divided, too

    GATHER: ClassVar[tuple[str, ...]] = ("step", "layer")

    def check(self) -> None:
        super().check()
        at_least("executor.unroll", self.unroll, 0)
        choice("executor.gather", self.gather, self.GATHER)


@dataclass
class Spmd(Pipelined):
    """One XLA program: a scan over ticks, one ring permute each way a tick."""

    name: str = "spmd"

    ENGINE: ClassVar[EngineTraits] = IN_TICKS


@dataclass
class Mpmd(Pipelined):
    """A compiled function for each stage and kind of task, dispatched in the schedule's order."""

    name: str = "mpmd"
    context: str = "gather"  # with mesh.cp: keys and values are gathered | go round a ring
    post_validation: bool = False  # update before the global norm is known, again if wrong

    ENGINE: ClassVar[EngineTraits] = BY_TASKS

    def check(self) -> None:
        super().check()
        choice("executor.context", self.context, ("gather", "ring"))
