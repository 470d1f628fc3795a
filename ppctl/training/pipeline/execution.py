"""How a schedule is run: by which executor, and with which of its settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

from jax.sharding import Mesh

from ppctl.config import Mpmd, Reference, Spmd
from ppctl.errors import ConfigError
from ppctl.executors.compiler_options import Flags, flags_for
from ppctl.executors.reference import MOST_UNROLLED
from ppctl.model.parallel import WHOLE, StageAxes
from ppctl.schedule.mesh_axes import AXES, STAGE_AXES
from ppctl.schedule.remat import Remat
from ppctl.schedule.tick_lowering import Ticks

EXECUTORS: dict[str, type[Reference]] = {each.name: each for each in (Spmd, Mpmd, Reference)}
ARGUMENTS = (  # settings of the command line, and arguments of `ppctl.pipeline` that replace them
    ("executor.", ""),
    ("model.num_layers", "num_layers"),
    ("model.layers", "layers"),
    ("model.mixes_examples=true", "mixes_examples=True of the Network or Stack"),
    ("partition.layers=", "partition="),
    *((f"mesh.{axis}", axis) for axis in STAGE_AXES),
    ("partition=explicit", "partition=[layers of each stage]"),
)


@contextmanager
def in_arguments() -> Iterator[None]:
    """Re-raise ConfigErrors with setting names replaced by argument names."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        for setting, argument in ARGUMENTS:
            text = text.replace(setting, argument)
        raise ConfigError(text) from None


@dataclass(frozen=True)
class Execution:
    """How a schedule is run, which does not change the results.

    remat: none | layer | full, what the backward recomputes. unroll: the number of a device's
    layers up to which they are unrolled, scanned above. gather: step | tick (spmd) | layer, when
    layers are gathered over fsdp. post_validation (mpmd): a rank updates before the global norm is
    known, and again if that was wrong. xla_flags: compiler options of every program of a step.
    """

    executor: str
    remat: Remat
    unroll: int = MOST_UNROLLED
    gather: str = "step"
    post_validation: bool = False
    xla_flags: Flags = ()
    axes: StageAxes = WHOLE  # how the devices of a rank divide its stages

    @property
    def gathers_by_layer(self) -> bool:
        return self.gather == "layer"

    @property
    def is_pipelined(self) -> bool:
        return EXECUTORS[self.executor].IS_PIPELINED

    @property
    def in_ticks(self) -> bool:
        """Return whether ranks run in lockstep, with stages padded to the largest."""
        return EXECUTORS[self.executor].IN_TICKS

    @property
    def dispatches_tasks(self) -> bool:
        """Return whether each task is a separate program that the host dispatches."""
        return EXECUTORS[self.executor].DISPATCHES_TASKS


def _settings_of(executor: type[Reference]) -> set[str]:
    return {each.name for each in fields(executor)} - {"name"}


def execution_of(
    executor: str, mesh: Mesh, options: Mapping[str, Any]
) -> tuple[Execution, dict[str, Any]]:
    """Return how an executor runs a schedule on a mesh, and the options that are not executors'.

    ConfigError for an executor or setting that is unknown, inapplicable, or does not fit the mesh.
    """
    if executor not in EXECUTORS:
        raise ConfigError(f"executor={executor} is not one of {', '.join(EXECUTORS)}.")
    # 1. options that are settings of this executor, of others, or of a schedule's family
    of_this, of_any = _settings_of(EXECUTORS[executor]), set[str]()
    of_any = of_any.union(*map(_settings_of, EXECUTORS.values()))
    settings = {name: value for name, value in options.items() if name in of_this}
    foreign = [f"{name}={value}" for name, value in options.items() if name in of_any - of_this]
    if foreign:
        what = f"{', '.join(foreign)} does not apply to executor={executor}"
        raise ConfigError(f"{what}. Leave it out.")
    # 2. the settings, checked
    config = EXECUTORS[executor](**settings)
    with in_arguments():
        config.check()
    given = asdict(config)
    division = {name: given[name] for name in ("sequence_parallel", "context") if name in given}
    axes = StageAxes.of(mesh.shape, **division)
    how = {name: given[name] for name in ("unroll", "gather", "post_validation") if name in given}
    flags = flags_for(config.xla_flags, mesh.devices.flat[0])
    execution = Execution(executor, Remat.of(config.remat), xla_flags=flags, axes=axes, **how)
    _check_mesh(execution, mesh)
    return execution, {name: value for name, value in options.items() if name not in of_any}


def _check_mesh(execution: Execution, mesh: Mesh) -> None:
    if tuple(mesh.axis_names) != AXES:
        raise ConfigError(
            f"The mesh has axes {mesh.axis_names}, not {AXES}. Make it with "
            f"ppctl.mesh({', '.join(f'{axis}=' for axis in AXES)})."
        )
    if not execution.is_pipelined and mesh.size > 1:
        raise ConfigError(
            "executor=reference is the un-pipelined model on one device, but the mesh has "
            f"{mesh.size}. Use ppctl.mesh(), executor=spmd or executor=mpmd."
        )


def check_lowering(lowered: Ticks, execution: Execution) -> None:
    """Raise ConfigError for ticks that this execution does not run."""
    if not execution.in_ticks:
        what = f"Ticks are run by executor=spmd, not by executor={execution.executor}"
        raise ConfigError(f"{what}. Give it the schedule.")
    if lowered.remat is not execution.remat:
        raise ConfigError(
            f"The ticks were lowered for remat={lowered.remat}, but remat={execution.remat}. Use "
            f'remat="{lowered.remat}", or give the schedule itself.'
        )
