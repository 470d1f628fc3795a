"""The executors: how the tasks of a schedule run on devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

from ppctl.config.checks import at_least, choice
from ppctl.errors import ConfigError
from ppctl.schedule.remat import Remat


@dataclass
class Reference:
    """The un-pipelined model: gradient accumulation over the microbatches in one program, on one device."""

    name: str = "reference"
    remat: str = "none"  # none | layer | full: what the backward recomputes
    unroll: int = 16  # layers of a device unrolled in the program up to this many, scanned above
    xla_flags: Any = "auto"  # of the compiler: auto: what suits the devices | none | a list of 'NAME=VALUE'

    IS_PIPELINED: ClassVar[bool] = False
    IN_TICKS: ClassVar[bool] = False  # ranks run in lockstep, in one program
    DISPATCHES_TASKS: ClassVar[bool] = False  # each task is a program of its own
    REMAT: ClassVar[tuple[str, ...]] = tuple(map(str, Remat))

    def check(self) -> None:
        choice("executor.remat", self.remat, self.REMAT)
        at_least("executor.unroll", self.unroll, 0)
        flags: Any = self.xla_flags
        texts = cast("list[object]", flags) if isinstance(flags, list) else [] if flags in ("auto", "none") else [""]
        if not all("=" in str(text)[1:] for text in texts):
            raise ConfigError(
                f"executor.xla_flags={flags} is neither auto nor none nor a list of NAME=VALUE, which a command line "
                "has in quotes: executor.xla_flags=\"['xla_gpu_enable_triton_gemm=false']\"."
            )


@dataclass
class Pipelined(Reference):
    """What all executors of a pipeline have: how the devices of a rank divide its stages."""

    gather: str = (
        "step"  # when layers are gathered over fsdp: step | tick (spmd: a chunk's in each) | layer: before use
    )
    sequence_parallel: bool = True  # with mesh.tp: devices divide the tokens between layers too, or all hold all
    context: str = "gather"  # with mesh.cp: keys and values of other devices are gathered | go round a ring

    IS_PIPELINED: ClassVar[bool] = True
    CONTEXT: ClassVar[tuple[str, ...]] = ("gather", "ring")
    GATHER: ClassVar[tuple[str, ...]] = ("step", "layer")

    def check(self) -> None:
        super().check()
        choice("executor.gather", self.gather, self.GATHER)
        choice("executor.context", self.context, self.CONTEXT)


@dataclass
class Spmd(Pipelined):
    """One XLA program: a scan over ticks, one ring permute each way a tick."""

    name: str = "spmd"
    idle: str = "skip"  # in a tick without a task: skip | compute (and mask the result)

    IN_TICKS: ClassVar[bool] = True
    IDLE: ClassVar[tuple[str, ...]] = ("skip", "compute")
    GATHER: ClassVar[tuple[str, ...]] = ("step", "tick", "layer")

    def check(self) -> None:
        super().check()
        choice("executor.idle", self.idle, self.IDLE)


@dataclass
class Mpmd(Pipelined):
    """One compiled function for each stage and kind of task, dispatched by the host in the order of the schedule."""

    name: str = "mpmd"
    post_validation: bool = False  # a rank updates before the global norm is known, and again if that was wrong

    DISPATCHES_TASKS: ClassVar[bool] = True
