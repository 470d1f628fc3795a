"""The execution of a schedule: the executor and its settings."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

from jax.sharding import Mesh

from ppctl.config import Mpmd, Reference, Spmd
from ppctl.config.field_checks import domains
from ppctl.config.groups.layout_settings import Pipelined
from ppctl.errors import ConfigError, nearest, suggested
from ppctl.executors.compiler_options import Flags, flags_for
from ppctl.executors.rank_meshes import RankMeshes
from ppctl.executors.reference import MOST_UNROLLED
from ppctl.model.parallel import WHOLE, StageAxes
from ppctl.schedule.engine_traits import EngineTraits
from ppctl.schedule.mesh_axes import AXES, STAGE_AXES, check_unequal
from ppctl.schedule.remat import Remat

T = TypeVar("T", bound=Reference)
Options = Mapping[str, Any]
EXECUTORS: dict[str, type[Reference]] = {each.name: each for each in (Spmd, Mpmd, Reference)}


@dataclass(frozen=True)
class Execution:
    """The settings of an executor. They change time and memory, not the results of a step.

    remat: the part that the backward recomputes: none | layer | full. unroll: a program of at most
    this number of layers unrolls them; a longer one scans them. gather: with fsdp, gather all
    layers at once (step) or each before its use (layer). post_validation (mpmd): each rank updates
    before the global norm is known, and repeats the update if it must be clipped. fuse (mpmd): none
    | fb, run an F and a backward of another microbatch as one program. xla_flags: compiler options
    of every program of a step.
    """

    executor: str
    remat: Remat
    unroll: int = MOST_UNROLLED
    gather: str = "step"
    post_validation: bool = False
    fuse: str = "none"
    xla_flags: Flags = ()
    axes: StageAxes = WHOLE  # division of the stages over the devices of a rank

    @property
    def engine(self) -> EngineTraits:
        return EXECUTORS[self.executor].ENGINE

    def on(self, mesh: Mesh) -> Self:
        """Return the execution on ranks with the sizes of a mesh."""
        sizes = {name: mesh.shape[name] for name in STAGE_AXES}
        return replace(self, axes=replace(self.axes, **sizes))


def spmd(**options: Any) -> Spmd:
    """Return executor=spmd with options, for `ppctl.pipeline`: one XLA program, a scan over ticks.

    Args:
        options: Settings of the executor; `ppctl train --help executor=spmd` lists all of them with
            their defaults.
            remat: The part that the backward recomputes: none | layer | full.
            gather: With fsdp, gather all layers at once (step) or each before its use (layer).
            unroll: A program of at most this number of layers unrolls them; others scan them.
            sequence_parallel: With tp, whether activations between layers are divided by tokens.
            xla_flags: auto (ppctl's compiler options for the devices) | traced (the same without
            CUDA graphs, which hide tasks from traces) | none.

    Raises:
        ConfigError: An option is unknown or impossible.
    """
    return _with_options(Spmd, options)


def mpmd(**options: Any) -> Mpmd:
    """Return executor=mpmd with options: a program for each stage and kind of task.

    Args:
        options: Options of `spmd`, and others; `ppctl train --help executor=mpmd` lists all.
            post_validation: Whether each rank updates before the global norm is known, and repeats
            the update if it must be clipped.
            fuse: none | fb: run a forward and a backward of different microbatches as one program
            if they are next to each other in the schedule.

    Raises:
        ConfigError: An option is unknown or impossible.
    """
    return _with_options(Mpmd, options)


def reference(**options: Any) -> Reference:
    """Return executor=reference with options (remat, xla_flags): the un-pipelined model.

    Raises:
        ConfigError: An option is unknown or impossible.
    """
    return _with_options(Reference, options)


def _with_options(executor: type[T], options: Options) -> T:
    """Return an executor with these options. ConfigError for unknown or impossible ones."""
    known = _options_of(executor)
    for name, value in options.items():
        if name not in known:
            remedy = suggested(nearest(name, known)[:1]) or f" It has {', '.join(known)}."
            what = f"{name}={value} is not an option of executor={executor.name}"
            raise ConfigError(f"{what}.{remedy}")
        if type(value) is not type(known[name]):
            usual = f"{name}={known[name]!r}"
            raise ConfigError(f"{name}={value!r} has another type than the default, {usual}.")
    made = executor(**options)
    domains("", made)
    return made


def _options_of(executor: type[Reference]) -> dict[str, Any]:
    """Return the options of an executor: name -> default."""
    return {each.name: each.default for each in fields(executor) if each.name != "name"}


def execution_of(
    executor: str | Reference, meshes: RankMeshes, vocab: str, options: Options
) -> tuple[Execution, dict[str, Any]]:
    """Return (the execution on rank 0, the remaining options: settings of a schedule family).

    ConfigError for an unknown executor, an unknown or inapplicable option, or a mesh that does not
    fit.
    """
    config, rest = _configured(executor, options)
    has_loops = not config.ENGINE.dispatches_tasks
    flags = flags_for(config.xla_flags, meshes.device, has_loops=has_loops)
    mesh = meshes.groups[0].mesh
    axes = StageAxes.of(mesh.shape)
    execution = Execution(config.name, Remat.of(config.remat), xla_flags=flags, axes=axes)
    if isinstance(config, Pipelined):
        axes = replace(axes, sequence_parallel=config.sequence_parallel)
        execution = replace(execution, unroll=config.unroll, gather=config.gather, axes=axes)
    if isinstance(config, Mpmd):
        axes = replace(axes, context=config.context)
        own = {"post_validation": config.post_validation, "fuse": config.fuse}
        execution = replace(execution, axes=axes, **own)
    if tuple(mesh.axis_names) != AXES:
        what = f"The mesh has axes {mesh.axis_names}, not {AXES}"
        call = f"ppctl.mesh({', '.join(f'{axis}=' for axis in AXES)})"
        raise ConfigError(f"{what}. Make it with {call}.")
    if not execution.engine.is_pipelined and meshes.num_devices > 1:
        raise ConfigError(
            "executor=reference is the un-pipelined model on one device, but the mesh has "
            f"{meshes.num_devices}. Use ppctl.mesh(), executor=spmd or executor=mpmd."
        )
    by_tasks = execution.engine.dispatches_tasks
    check_unequal(meshes.sizes_by_rank, execution.executor, vocab, dispatches_tasks=by_tasks)
    return execution, rest


def _configured(executor: str | Reference, options: Options) -> tuple[Reference, dict[str, Any]]:
    """Return (an executor with its options, the remaining options: those of a schedule family)."""
    of_any = {name: each for each in EXECUTORS.values() for name in _options_of(each)}
    rest = {name: value for name, value in options.items() if name not in of_any}
    named = {name: value for name, value in options.items() if name in of_any}
    # 1. an executor value already has its options
    if isinstance(executor, Reference):
        if named:
            name, value = next(iter(named.items()))
            call = f"ppctl.{executor.name}({name}={value!r})"
            raise ConfigError(f"{name}={value} is an option of the executor. Use executor={call}.")
        return executor, rest
    # 2. an executor name: separate its options from those of the family
    if executor not in EXECUTORS:
        call = 'ppctl.spmd(remat="layer")'
        names = ", ".join(EXECUTORS)
        raise ConfigError(f"executor={executor} is not one of {names}, or a value such as {call}.")
    own = _options_of(EXECUTORS[executor])
    if foreign := [f"{name}={value}" for name, value in named.items() if name not in own]:
        what = f"{', '.join(foreign)} does not apply to executor={executor}"
        raise ConfigError(f"{what}. Leave it out.")
    for name, value in rest.items():
        if near := nearest(name, of_any):
            what = f"{name}={value} is not an option of executor={executor} or of a schedule"
            raise ConfigError(f"{what}.{suggested(near[:1])}")
    return _with_options(EXECUTORS[executor], named), rest
