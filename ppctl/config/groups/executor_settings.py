"""The executors: how the tasks of a schedule run on devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

from ppctl.config.field_checks import at_least, choice
from ppctl.errors import ConfigError
from ppctl.schedule.remat import Remat


@dataclass
class Reference:
    """The un-pipelined model: one program on one device accumulates over the microbatches."""

    name: str = "reference"
    remat: str = "none"  # none | layer | full: what the backward recomputes
    xla_flags: Any = "auto"  # auto: flags that suit the devices | none | a list of 'NAME=VALUE'

    IS_PIPELINED: ClassVar[bool] = False
    IN_TICKS: ClassVar[bool] = False  # ranks run in lockstep, in one program
    DISPATCHES_TASKS: ClassVar[bool] = False  # each task is a program of its own
    REMAT: ClassVar[tuple[str, ...]] = tuple(map(str, Remat))

    def check(self) -> None:
        choice("executor.remat", self.remat, self.REMAT)
        flags: Any = self.xla_flags
        is_list = isinstance(flags, list | tuple)
        texts = cast("list[object]", flags) if is_list else []
        if not (is_list or flags in ("auto", "none")) or not all("=" in str(t)[1:] for t in texts):
            raise ConfigError(
                f"executor.xla_flags={flags} is neither auto nor none nor a list of NAME=VALUE, "
                "which a command line has in quotes: "
                "executor.xla_flags=\"['xla_gpu_enable_triton_gemm=false']\"."
            )


@dataclass
class Pipelined(Reference):
    """Settings of pipelined executors: the division of stages over the devices of a rank."""

    unroll: int = 16  # layers of a device unrolled in the program up to this many, scanned above
    gather: str = "step"  # over fsdp: step (all layers at once) | layer (each before its use)
    sequence_parallel: bool = True  # with mesh.tp: tokens between layers are divided, too

    IS_PIPELINED: ClassVar[bool] = True
    GATHER: ClassVar[tuple[str, ...]] = ("step", "layer")

    def check(self) -> None:
        super().check()
        at_least("executor.unroll", self.unroll, 0)
        choice("executor.gather", self.gather, self.GATHER)


@dataclass
class Spmd(Pipelined):
    """One XLA program: a scan over ticks, one ring permute each way a tick."""

    name: str = "spmd"

    IN_TICKS: ClassVar[bool] = True


@dataclass
class Mpmd(Pipelined):
    """A compiled function for each stage and kind of task, dispatched in the schedule's order."""

    name: str = "mpmd"
    post_validation: bool = False  # update before the global norm is known, again if wrong

    DISPATCHES_TASKS: ClassVar[bool] = True
