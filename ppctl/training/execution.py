"""How a schedule is run: by which executor, and with which of its settings."""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import Mesh

from ppctl.config import Mpmd, Reference, Spmd
from ppctl.errors import ConfigError
from ppctl.executors.mesh import AXES
from ppctl.executors.xla_flags import Flags
from ppctl.model.parallel import WHOLE, StageAxes
from ppctl.schedule.remat import Remat
from ppctl.schedule.ticks import Ticks

EXECUTORS = {each.name: each for each in (Spmd, Mpmd, Reference)}


@dataclass(frozen=True)
class Execution:
    """How a schedule is run; nothing of it changes what is computed.

    remat: none | layer | full, what the backward recomputes. unroll: layers of a device that are unrolled up to this
    many, scanned above. idle (spmd): skip | compute, what a rank without a task does in a tick. gather: step | tick
    (spmd) | layer, when layers are gathered over fsdp. post_validation (mpmd): a rank updates before the global norm is
    known, and again if that was wrong. xla_flags: options of the compiler, of every program of a step.
    """

    executor: str
    remat: Remat
    unroll: int
    idle: str
    gather: str
    post_validation: bool
    xla_flags: Flags = ()
    axes: StageAxes = WHOLE  # how the devices of a rank divide its stages

    @property
    def gathers_each_tick(self) -> bool:
        return self.gather == "tick"

    @property
    def gathers_by_layer(self) -> bool:
        return self.gather == "layer"

    @property
    def is_pipelined(self) -> bool:
        return EXECUTORS[self.executor].IS_PIPELINED

    @property
    def in_ticks(self) -> bool:
        """Return whether ranks run in lockstep, and a rank keeps all its stages padded to the largest."""
        return EXECUTORS[self.executor].IN_TICKS

    @property
    def dispatches_tasks(self) -> bool:
        """Return whether each task is a program of its own that the host dispatches."""
        return EXECUTORS[self.executor].DISPATCHES_TASKS


def check_execution(execution: Execution, mesh: Mesh) -> None:
    """Raise ConfigError for an executor or a setting that there is not, does not apply, or does not fit the mesh."""
    gathers = Mpmd.GATHER if execution.executor == Mpmd.name else Spmd.GATHER
    choices = {
        "executor": tuple(EXECUTORS),
        "idle": Spmd.IDLE,
        "gather": gathers,
        "context": Spmd.CONTEXT,
    }
    for name, allowed in choices.items():
        value = execution.axes.context if name == "context" else getattr(execution, name)
        if value not in allowed:
            raise ConfigError(f"{name}={value} is not one of {', '.join(allowed)}.")
    ignored = list[str]()
    if execution.idle != "skip" and not execution.in_ticks:
        ignored.append(f"idle={execution.idle}")
    if execution.gather != "step" and not execution.is_pipelined:
        ignored.append(f"gather={execution.gather}")
    if execution.post_validation and not execution.dispatches_tasks:
        ignored.append("post_validation=True")
    if ignored:
        raise ConfigError(f"{', '.join(ignored)} does not apply to executor={execution.executor}. Leave it out.")
    if tuple(mesh.axis_names) != AXES:
        raise ConfigError(
            f"The mesh has axes {mesh.axis_names}, not {AXES}. Make it with ppctl.mesh(dp=, pp=, fsdp=, tp=, cp=)."
        )
    if not execution.is_pipelined and mesh.size > 1:
        raise ConfigError(
            f"executor=reference is the un-pipelined model on one device, but the mesh has {mesh.size}. Use "
            "ppctl.mesh(), executor=spmd or executor=mpmd."
        )

    on_ring = execution.axes.cp > 1 and execution.axes.context == "ring"
    if on_ring and execution.in_ticks and mesh.shape["pp"] > 1 and execution.idle == "skip":
        raise ConfigError(
            f"context=ring with cp={execution.axes.cp} sends by collective-permutes, and all devices of a program take "
            "part in one; but executor=spmd is one program of all ranks, and idle=skip lets a rank pass over what it "
            "has no task for. Use context=gather, executor=mpmd, or idle=compute."
        )


def check_lowering(lowered: Ticks, execution: Execution) -> None:
    """Raise ConfigError for ticks that this execution does not run."""
    if not execution.in_ticks:
        raise ConfigError(
            f"Ticks are run by executor=spmd, not by executor={execution.executor}. Give it the schedule."
        )
    if lowered.remat is not execution.remat:
        raise ConfigError(
            f"The ticks were lowered for remat={lowered.remat}, but remat={execution.remat}. Use "
            f'remat="{lowered.remat}", or give the schedule itself.'
        )
