"""A composed request: one choice of each part, and the checks that involve more than one of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from ppctl.config.checks import numbers
from ppctl.config.costs import Analytic, Costs, Measure
from ppctl.config.data import CustomData, Mixture, Regression, Stdlib, Synthetic, Text, Tokens
from ppctl.config.executor import Mpmd, Reference, Spmd
from ppctl.config.extent import check_bounds, check_parameters, check_tasks
from ppctl.config.hardware import AutoHardware, Hardware
from ppctl.config.inspection import Inspect
from ppctl.config.launch import Launch
from ppctl.config.mesh import Mesh
from ppctl.config.model import MLP, CustomModel, Transformer
from ppctl.config.optim import SGD, AdamW
from ppctl.config.partition import Balanced, Explicit, Uniform
from ppctl.config.plan import Plan, Rehearse
from ppctl.config.run import Run
from ppctl.config.schedule import Auto, Chunked, Csv, Eager1F1B, Gis, Hanayo, Interleaved, Schedule
from ppctl.config.tune import Tune
from ppctl.config.verify import Verify
from ppctl.errors import ConfigError
from ppctl.schedule.partition.division import check_sequences, check_widths


@dataclass
class Config:
    """A composed request. Of a part with several classes, an option of `conf/` chooses one."""

    model: Transformer | MLP | CustomModel = field(default_factory=Transformer)
    mesh: Mesh = field(default_factory=Mesh)
    schedule: Schedule | Eager1F1B | Chunked | Interleaved | Gis | Hanayo | Auto | Csv = field(default_factory=Schedule)
    partition: Uniform | Balanced | Explicit = field(default_factory=Uniform)
    executor: Reference | Spmd | Mpmd = field(default_factory=Spmd)
    optim: AdamW | SGD = field(default_factory=AdamW)
    data: Stdlib | Text | Mixture | Tokens | Synthetic | Regression | CustomData = field(default_factory=Stdlib)
    hardware: AutoHardware | Hardware = field(default_factory=AutoHardware)
    costs: Analytic | Measure = field(default_factory=Analytic)
    run: Run = field(default_factory=Run)
    launch: Launch = field(default_factory=Launch)
    verify: Verify = field(default_factory=Verify)
    plan: Plan = field(default_factory=Plan)
    rehearse: Rehearse = field(default_factory=Rehearse)
    tune: Tune = field(default_factory=Tune)
    inspect: Inspect = field(default_factory=Inspect)


@dataclass
class ScheduleConfig:
    """A composed request of `ppctl schedule`, which knows no model: its costs are assumed."""

    mesh: Mesh
    schedule: Schedule
    costs: Costs

    def check(self) -> None:
        for key in ("mesh", "schedule", "costs"):
            getattr(self, key).check()
            numbers(key, getattr(self, key))
        check_bounds(self)
        cap_gib = getattr(self.schedule, "max_memory_gib", None)
        if cap_gib is not None and not self.costs.activation_gib:
            raise ConfigError(
                f"schedule.max_memory_gib={cap_gib:g} needs the size of activations, and `ppctl schedule` knows no "
                "model. Set costs.activation_gib and costs.fixed_gib, or use schedule.max_activations."
            )


def check(config: Config) -> None:
    """Raise ConfigError for the first setting or combination that is impossible."""
    for part in fields(config):
        getattr(config, part.name).check()
        if part.name != "hardware":  # a GPU's memory is more bytes than there are steps
            numbers(part.name, getattr(config, part.name))
    check_bounds(config)
    check_parameters(config.model)
    check_tasks(config.schedule, config.mesh)
    _check_batch(config)
    _check_launch(config)
    _check_topology(config)
    _check_executor(config)
    _check_division(config)
    _check_data(config)
    _check_trained(config)
    _check_timeline(config)
    _check_inspected(config)
    _check_profile(config)


def _check_batch(config: Config) -> None:
    mesh, batch_size, num_microbatches = config.mesh, config.data.batch_size, config.schedule.num_microbatches
    pieces = num_microbatches * mesh.dp * mesh.fsdp
    if batch_size % pieces:
        raise ConfigError(
            f"data.batch_size={batch_size} is not a multiple of schedule.num_microbatches*mesh.dp*mesh.fsdp = "
            f"{num_microbatches}*{mesh.dp}*{mesh.fsdp} = {pieces}. "
            f"Use data.batch_size={math.ceil(batch_size / pieces) * pieces}, or fewer microbatches."
        )


def _check_launch(config: Config) -> None:
    processes, mesh = config.launch.processes, config.mesh
    if config.launch.is_used and config.run.distributed != "off":
        raise ConfigError(
            f"launch.processes={processes} launch.max_restarts={config.launch.max_restarts} is for processes that this "
            f"command starts, but run.distributed={config.run.distributed} says that they are started elsewhere. "
            "Use run.distributed=off, or leave out launch."
        )
    if config.launch.max_restarts and not config.run.checkpoint.enabled:
        raise ConfigError(
            f"launch.max_restarts={config.launch.max_restarts} starts a crashed run again from its newest checkpoint, "
            "but run.checkpoint.enabled=false writes none. Use launch.max_restarts=0, or leave the other out."
        )
    if mesh.num_devices % processes:
        divisors = [n for n in range(1, mesh.num_devices + 1) if mesh.num_devices % n == 0]
        raise ConfigError(
            f"mesh={mesh.text} has {mesh.num_devices} devices, not a multiple of launch.processes={processes}. "
            f"Use launch.processes={max(n for n in divisors if n <= processes)}, or another mesh."
        )
    if processes > 1 and config.run.platform == "tpu":
        raise ConfigError(
            f"launch.processes={processes} divides GPUs or simulated CPU devices, but run.platform=tpu. "
            "Use launch.processes=1: one process takes all TPU chips of a host."
        )


def _check_topology(config: Config) -> None:
    topology = config.plan.topology
    if topology is not None and config.run.platform not in (None, "cpu"):
        raise ConfigError(
            f"plan.topology={topology} is described here, but run.platform={config.run.platform} starts devices. "
            "Use run.platform=cpu, or leave it out."
        )


def _check_executor(config: Config) -> None:
    mesh, partition = config.mesh, config.partition.name
    if not config.executor.IS_PIPELINED and mesh.num_devices > 1:
        raise ConfigError(
            f"executor=reference is the un-pipelined model on one device, but mesh={mesh.text} has {mesh.num_devices}. "
            "Use mesh=1x1, executor=spmd or executor=mpmd."
        )
    if not config.executor.IS_PIPELINED and partition != "uniform":
        raise ConfigError(
            f"partition={partition} divides layers over stages, and executor=reference has none. "
            "Use partition=uniform or another executor."
        )


def _check_division(config: Config) -> None:
    """Refuse what tp and cp cannot divide; a model of the user's own says itself what that is."""
    model, mesh = config.model, config.mesh
    if isinstance(model, Transformer):
        check_widths(mesh.tp, model.num_heads, model.kv_heads, model.hidden_width)
        check_sequences(mesh.cp, model.seq_len)


def _check_data(config: Config) -> None:
    model, data = config.model, config.data
    if isinstance(data, Stdlib) and data.packing and not isinstance(model, Transformer):
        raise ConfigError(
            f"data.packing=true puts several documents into a sequence, which model={model.name} does not tell apart. "
            "Use data.packing=false, or model=transformer."
        )
    is_custom = isinstance(model, CustomModel) or isinstance(data, CustomData)
    is_mlp, has_features = isinstance(model, MLP), isinstance(data, Regression)
    if is_mlp != has_features and not is_custom:
        raise ConfigError(
            f"model={model.name} cannot learn from data={data.name}. "
            f"Use {'data=regression' if is_mlp else 'data=stdlib (or text, tokens, synthetic)'}"
            f" or model={'transformer' if is_mlp else 'mlp'}."
        )
    if isinstance(model, CustomModel):
        is_text = not isinstance(data, Regression | CustomData)
        if is_text != (model.seq_len is not None):
            remedy = "Set model.seq_len" if is_text else "Leave model.seq_len out"
            reason = "is cut into sequences" if is_text else "has no sequences to be cut"
            raise ConfigError(f"data={data.name} {reason}, but model.seq_len={model.seq_len}. {remedy}.")


def _check_trained(config: Config) -> None:
    model, optim = config.model, config.optim
    if optim.train == "lora" and not isinstance(model, Transformer):
        own = " A model of your own says itself what is trained: Stack(trainable=...), Network(trainable=...)."
        raise ConfigError(
            f"optim.train=lora puts adapters into a transformer's blocks, and model={model.name} has none."
            f"{own if isinstance(model, CustomModel) else ''} Use optim.train=all, or model=transformer."
        )
    if isinstance(model, Transformer) and "gate" in (optim.lora_targets or ()) and model.activation not in model.GATED:
        raise ConfigError(
            f"optim.lora_targets has gate, and with model.activation={model.activation} an MLP has no gate. Leave it "
            f"out, or use one of {', '.join(model.GATED)}."
        )


def _check_timeline(config: Config) -> None:
    run = config.run
    if run.timeline and not config.executor.DISPATCHES_TASKS:
        raise ConfigError(
            f"run.timeline=true measures tasks that are programs of their own, but executor={config.executor.name} is "
            "one program. Use executor=mpmd, or run.profile.start=N, which traces any executor."
        )
    if run.timeline and run.distributed != "off":
        raise ConfigError(
            f"run.timeline=true measures the ranks of one process, but run.distributed={run.distributed} has "
            "those of several. Use run.distributed=off, or run.profile.start=N, which traces process 0."
        )
    if run.timeline and run.profile.start is not None:
        raise ConfigError(
            f"run.timeline=true and run.profile.start={run.profile.start} both trace, and one trace can run "
            "at a time. Leave one of them out."
        )


def _check_inspected(config: Config) -> None:
    request, executor = config.inspect, config.executor
    chosen = [f"inspect.{key}={value}" for key in ("stage", "task") if (value := getattr(request, key)) is not None]
    if chosen and not executor.DISPATCHES_TASKS:
        raise ConfigError(
            f"{' '.join(chosen)} chooses among the programs of executor=mpmd, but executor={executor.name} is one "
            "program. Leave it out, or use executor=mpmd."
        )
    if request.what == "program" and not executor.IS_PIPELINED:
        raise ConfigError(
            "inspect.what=program shows what ranks run, but executor=reference has neither ticks nor tasks. "
            "Use inspect.what=jaxpr, stablehlo or hlo, or executor=spmd or mpmd."
        )


def _check_profile(config: Config) -> None:
    profile, num_steps = config.run.profile, config.run.num_steps
    if profile.start is not None and profile.start + profile.num_steps > num_steps:
        raise ConfigError(
            f"run.profile.start+run.profile.num_steps = {profile.start}+{profile.num_steps} is past the last step "
            f"(run.num_steps={num_steps}). "
            f"Use run.profile.start={max(0, num_steps - profile.num_steps)} at most, or fewer run.profile.num_steps."
        )
