"""Every setting of ppctl: field, default, unit and one-field check. Standard library only.

The YAML files under `conf/` hold only choices and values that differ from these defaults. The
classes are not frozen because Hydra's structured configs must not be. `Config` is a composed
request; `check` holds the checks of several parts together.
"""
# ruff: noqa: F401
# pyright: reportUnusedImport=false

import math
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from ppctl.config.field_checks import DESCRIPTION
from ppctl.config.groups import layout_settings, schedule_settings
from ppctl.config.groups.command_settings import Inspect, Launch, Plan, Tune, Verify
from ppctl.config.groups.data_settings import AnyData, Regression, Stdlib, Synthetic, Text, Tokens
from ppctl.config.groups.hardware_settings import AutoHardware, Hardware
from ppctl.config.groups.layout_settings import AnyExecutor, Mesh, Mpmd, Reference, Spmd, Uniform
from ppctl.config.groups.model_settings import MLP, AnyModel, CustomModel, Transformer, UserFunction
from ppctl.config.groups.optim_settings import SGD, AdamW, AnyOptim, CustomOptim, Lamb, Muon, Optim
from ppctl.config.groups.run_settings import DTYPES, Checkpoint, Run
from ppctl.config.groups.schedule_settings import Auto, Chunked, Costs, Csv, Interleaved, Schedule
from ppctl.config.groups.transformer_sizes import GATED
from ppctl.errors import ConfigError, as_setting, written_as
from ppctl.schedule.ir import MOST_TASKS
from ppctl.schedule.mesh_axes import check_batch, check_experts, check_sequences, check_unequal


@dataclass
class Config:
    """A composed request. For a part with several classes, an option of `conf/` chooses one."""

    model: AnyModel = field(default_factory=Transformer)
    mesh: Mesh = field(default_factory=Mesh)
    schedule: schedule_settings.AnySchedule = field(default_factory=Schedule)
    partition: layout_settings.AnyPartition = field(default_factory=Uniform)
    executor: AnyExecutor = field(default_factory=Spmd)
    optim: AnyOptim = field(default_factory=AdamW)
    data: AnyData = field(default_factory=Stdlib)
    hardware: AutoHardware | Hardware = field(default_factory=AutoHardware, metadata=DESCRIPTION)
    run: Run = field(default_factory=Run)
    launch: Launch = field(default_factory=Launch)
    verify: Verify = field(default_factory=Verify)
    plan: Plan = field(default_factory=Plan)
    tune: Tune = field(default_factory=Tune)
    inspect: Inspect = field(default_factory=Inspect)
    costs: Costs = field(default_factory=Costs, metadata=DESCRIPTION)


class ScheduleConfig(NamedTuple):
    """A composed request of `ppctl schedule`. It has no model, so its costs are assumed."""

    mesh: Mesh
    schedule: Schedule
    costs: Costs

    def check(self) -> None:
        for part in self:
            part.check()
        cap_gib = getattr(self.schedule, "max_memory_gib", None)
        if cap_gib is not None and not self.costs.activation_gib:
            raise ConfigError(
                f"schedule.max_memory_gib={cap_gib:g} needs the size of activations, but "
                "`ppctl schedule` has no model. Set costs.activation_gib and costs.fixed_gib, "
                "or use schedule.max_activations."
            )


@written_as(as_setting)
def check(config: Config) -> None:
    """Raise ConfigError for the first impossible setting or combination of settings."""
    for part in fields(config):
        getattr(config, part.name).check()
    check_parameters(config.model)
    check_tasks(config.schedule, config.mesh)
    check_batch(config.data.batch_size, config.schedule.num_microbatches, config.mesh.by_rank)
    check_unequal(
        config.mesh.by_rank,
        config.executor.name,
        config.schedule.vocab,
        dispatches_tasks=config.executor.ENGINE.dispatches_tasks,
    )
    _check_chips(config.hardware, config.plan, config.mesh)
    _check_launch(config.launch, config.run, config.mesh)
    _check_executor(config.executor, config.mesh, config.partition.name, config.model)
    _check_data(config.model, config.data)
    _check_trained(config.model, config.optim)
    _check_views(config.run, config.executor, config.plan, config.inspect)


def _check_chips(hardware: AutoHardware | Hardware, plan: Plan, mesh: Mesh) -> None:
    ranks = hardware.ranks if isinstance(hardware, AutoHardware) else []
    if ranks and len(ranks) != mesh.pp:
        raise ConfigError(
            f"hardware.ranks has {len(ranks)} names, but mesh.pp={mesh.pp}. Name the hardware of "
            "each rank."
        )
    if mesh.ranks and plan.topology is not None:
        raise ConfigError(
            f"plan.topology={plan.topology} has equal ranks, but mesh.ranks={mesh.text}. Use "
            "hardware=NAME, which predicts without a topology, or leave out mesh.ranks."
        )
    if ranks and plan.topology is not None:
        raise ConfigError(
            f"hardware.ranks={ranks} describes devices, and so does plan.topology={plan.topology}. "
            "Leave one of them out."
        )


def _check_launch(launch: Launch, run: Run, mesh: Mesh) -> None:
    devices = mesh.num_devices
    processes, restarts = launch.processes, f"launch.max_restarts={launch.max_restarts}"
    if launch.is_used and run.distributed != "off":
        raise ConfigError(
            f"launch.processes={processes} {restarts} is for processes that this command starts, "
            f"but with run.distributed={run.distributed} they are started elsewhere. Use "
            "run.distributed=off, or leave out launch."
        )
    if launch.max_restarts and not run.checkpoint.enabled:
        raise ConfigError(
            f"{restarts} starts a crashed run again from its newest checkpoint, but "
            "run.checkpoint.enabled=false writes none. Use launch.max_restarts=0, or "
            "run.checkpoint.enabled=true."
        )
    if devices % processes:
        most = max(n for n in range(1, min(devices, processes) + 1) if devices % n == 0)
        raise ConfigError(
            f"mesh={mesh.text} has {devices} devices, not a multiple of "
            f"launch.processes={processes}. Use launch.processes={most}, or another mesh."
        )
    if processes > 1 and run.platform == "tpu":
        raise ConfigError(
            f"launch.processes={processes} divides GPUs or simulated CPU devices, but "
            "run.platform=tpu. Use launch.processes=1: a process takes all TPU chips of a host."
        )


def _check_executor(executor: AnyExecutor, mesh: Mesh, partition: str, model: AnyModel) -> None:
    if not executor.ENGINE.is_pipelined and mesh.num_devices > 1:
        raise ConfigError(
            f"executor=reference is the un-pipelined model on one device, but mesh={mesh.text} "
            f"has {mesh.num_devices}. Use mesh=1x1, executor=spmd or executor=mpmd."
        )
    if not executor.ENGINE.is_pipelined and partition != "uniform":
        raise ConfigError(
            f"partition={partition} divides layers over stages, but executor=reference has none. "
            "Use partition=uniform or another executor."
        )
    if isinstance(model, Transformer):
        divides_rows = isinstance(executor, Spmd | Mpmd) and executor.sequence_parallel
        for sizes in dict.fromkeys(mesh.by_rank):
            model.check_divides(sizes.tp, sizes.cp, sizes.ep, divides_rows=divides_rows)
            check_sequences(sizes.cp, model.seq_len)
    if isinstance(model, MLP):
        for sizes in dict.fromkeys(mesh.by_rank):
            check_experts(None, sizes.ep, sizes.tp, divides_rows=False)


def _check_data(model: AnyModel, data: AnyData) -> None:
    if isinstance(data, Stdlib) and data.packing and not isinstance(model, Transformer):
        raise ConfigError(
            f"data.packing=true puts several documents into a sequence, but model={model.name} "
            "cannot separate them. Use data.packing=false, or model=transformer."
        )
    is_custom = isinstance(model, UserFunction) or isinstance(data, UserFunction)
    is_mlp, has_features = isinstance(model, MLP), isinstance(data, Regression)
    if is_mlp != has_features and not is_custom:
        remedy = "data=stdlib (or text, tokens, synthetic) or model=mlp"
        if is_mlp:
            remedy = "data=regression or model=transformer"
        raise ConfigError(f"model={model.name} cannot learn from data={data.name}. Use {remedy}.")
    if isinstance(model, CustomModel):
        is_text = not isinstance(data, Regression | UserFunction)
        if is_text != (model.seq_len is not None):
            remedy = "Set model.seq_len" if is_text else "Leave model.seq_len out"
            seq_len = "null" if model.seq_len is None else model.seq_len
            reason = "is cut into sequences" if is_text else "has no sequences to be cut"
            raise ConfigError(f"data={data.name} {reason}, but model.seq_len={seq_len}. {remedy}.")


def _check_trained(model: AnyModel, optim: Optim) -> None:
    if optim.train == "lora" and not isinstance(model, Transformer):
        custom = " A custom model has trainable=... in StackOptions or Network instead."
        raise ConfigError(
            f"optim.train=lora puts adapters into a transformer's blocks, but model={model.name} "
            f"has none.{custom if isinstance(model, CustomModel) else ''} Use optim.train=all, or "
            "model=transformer."
        )
    if optim.train != "lora" or not isinstance(model, Transformer):
        return
    model.moe.check_frozen()
    targets = {each.target for each in model.linear_maps}
    lacking = next((name for name in optim.lora_targets or () if name not in targets), None)
    if lacking is not None and all(model.has_experts):
        raise ConfigError(
            f"optim.lora_targets has {lacking}, but with model.moe.num_experts="
            f"{model.moe.num_experts} all layers have experts instead of an MLP, and experts take "
            "no adapters. Leave it out."
        )
    if lacking is not None:
        raise ConfigError(
            f"optim.lora_targets has {lacking}, but with model.activation={model.activation} an "
            f"MLP has no gate. Leave it out, or use one of {', '.join(GATED)}."
        )


def _check_views(run: Run, executor: AnyExecutor, plan: Plan, inspect: Inspect) -> None:
    # 1. run.timeline
    if run.timeline and not executor.ENGINE.dispatches_tasks:
        raise ConfigError(
            "run.timeline=true measures tasks that are separate programs, but "
            f"executor={executor.name} is one program. Use executor=mpmd, or "
            "run.profile=N, which traces any executor."
        )
    if run.timeline and isinstance(executor, Mpmd) and executor.fuse != "none":
        raise ConfigError(
            "run.timeline=true measures single tasks, but "
            f"executor.fuse={executor.fuse} runs two as one program. Use executor.fuse=none, or "
            "run.profile=N, which traces any program."
        )
    if run.timeline and run.distributed != "off":
        raise ConfigError(
            "run.timeline=true measures the ranks of one process, but "
            f"run.distributed={run.distributed} runs several processes. Use run.distributed=off, "
            "or run.profile=N, which traces process 0."
        )
    if run.timeline and run.profile is not None:
        raise ConfigError(
            f"run.timeline=true and run.profile={run.profile} both trace, but only one trace can "
            "run at a time. Leave one of them out."
        )
    # 2. inspect.what and plan.topology
    if inspect.what == "program" and not executor.ENGINE.in_ticks:
        raise ConfigError(
            f"inspect.what=program shows the ticks of ranks, but executor={executor.name} has "
            "none. Use inspect.what=jaxpr, stablehlo or hlo, or executor=spmd."
        )
    if plan.topology is not None and run.platform not in (None, "cpu"):
        raise ConfigError(
            f"plan.topology={plan.topology} needs no devices, but run.platform={run.platform} "
            "starts devices. Use run.platform=cpu, or leave it out."
        )


# --- sizes that no machine can lay out or hold ---------------------------------------------------

MOST_PARAMETERS = 10**15  # 12 petabytes with moments: more than the largest machines hold


def check_tasks(schedule: Schedule, mesh: Mesh) -> None:
    """Raise ConfigError if the forwards and backwards of a step are more than MOST_TASKS."""
    knobs = schedule.knobs()
    chunks = knobs.get("num_chunks", 2 * knobs.get("num_waves", 0) or 1)
    number = 2 * mesh.pp * chunks * schedule.num_microbatches
    if number > MOST_TASKS:
        raise ConfigError(
            f"2*mesh.pp*stages of a rank*schedule.num_microbatches = 2*{mesh.pp}*{chunks}*"
            f"{schedule.num_microbatches} = {number} tasks of a step, more than the {MOST_TASKS} "
            "that ppctl lays out. Use fewer and larger microbatches."
        )


def check_parameters(model: AnyModel) -> None:
    """Raise ConfigError for a built-in model with more than MOST_PARAMETERS parameters."""
    if isinstance(model, CustomModel):
        return
    of_layer = model.num_weights if isinstance(model, Transformer) else model.d_model**2
    number = model.num_layers * of_layer
    if number > MOST_PARAMETERS:
        raise ConfigError(
            f"model.num_layers={model.num_layers} of model.d_model={model.d_model} have "
            f"{number:.3g} parameters, more than the {MOST_PARAMETERS:.0e} that any machine holds. "
            "Use fewer or narrower layers."
        )
