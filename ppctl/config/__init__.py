"""Every setting of ppctl: field, default, unit and one-field check. Standard library only.

The YAML files under `conf/` only name choices and what differs from these defaults. The classes are not frozen because
Hydra's structured configs must not be. `check` holds what involves more than one field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from ppctl.config.costs import Analytic, Costs, Measure
from ppctl.config.hardware import AutoHardware, Hardware
from ppctl.config.inspection import Inspect
from ppctl.config.launch import Launch
from ppctl.config.model import MLP, CustomModel, Transformer
from ppctl.config.plan import Plan
from ppctl.config.run import (
    DTYPES,
    SGD,
    AdamW,
    Checkpoint,
    CustomData,
    Data,
    Mpmd,
    Optim,
    Profile,
    Reference,
    Regression,
    Run,
    Spmd,
    Stdlib,
    Synthetic,
    Text,
    Tokens,
)
from ppctl.config.schedule import (
    Auto,
    Balanced,
    Chunked,
    Csv,
    Eager1F1B,
    Explicit,
    Gis,
    Hanayo,
    Interleaved,
    Mesh,
    Schedule,
    Uniform,
)
from ppctl.config.tune import Tune
from ppctl.errors import ConfigError

__all__ = [
    "DTYPES",
    "MLP",
    "SGD",
    "AdamW",
    "Analytic",
    "Auto",
    "AutoHardware",
    "Balanced",
    "Checkpoint",
    "Chunked",
    "Config",
    "Costs",
    "Csv",
    "CustomData",
    "CustomModel",
    "Data",
    "Eager1F1B",
    "Explicit",
    "Gis",
    "Hanayo",
    "Hardware",
    "Inspect",
    "Interleaved",
    "Launch",
    "Measure",
    "Mesh",
    "Mpmd",
    "Optim",
    "Plan",
    "Profile",
    "Reference",
    "Regression",
    "Run",
    "Schedule",
    "ScheduleConfig",
    "Spmd",
    "Stdlib",
    "Synthetic",
    "Text",
    "Tokens",
    "Transformer",
    "Tune",
    "Uniform",
    "check",
]


@dataclass
class Config:
    """A composed request. A part of type Any is one of several classes above."""

    model: Any = field(default_factory=Transformer)
    mesh: Mesh = field(default_factory=Mesh)
    schedule: Any = field(default_factory=Schedule)
    partition: Any = field(default_factory=Uniform)
    executor: Any = field(default_factory=Spmd)
    optim: Any = field(default_factory=AdamW)
    data: Any = field(default_factory=Stdlib)
    hardware: Any = field(default_factory=AutoHardware)
    costs: Any = field(default_factory=Analytic)
    run: Run = field(default_factory=Run)
    launch: Launch = field(default_factory=Launch)
    plan: Plan = field(default_factory=Plan)
    tune: Tune = field(default_factory=Tune)
    inspect: Inspect = field(default_factory=Inspect)


@dataclass
class ScheduleConfig(Config):
    """A composed request of `ppctl schedule`: mesh, schedule and costs matter, which are assumed."""

    costs: Costs = field(default_factory=Costs)

    def check(self) -> None:
        for part in (self.mesh, self.schedule, self.costs):
            part.check()


def check(config: Config) -> None:
    """Nothing, or ConfigError for the first setting or combination that is impossible."""
    for part in fields(config):
        getattr(config, part.name).check()
    mesh, data = config.mesh, config.data
    rows = config.schedule.num_microbatches * mesh.dp * mesh.fsdp
    if data.batch_size % rows:
        least = math.ceil(data.batch_size / rows) * rows
        raise ConfigError(
            f"data.batch_size={data.batch_size} is not a multiple of schedule.num_microbatches*mesh.dp*mesh.fsdp = "
            f"{config.schedule.num_microbatches}*{mesh.dp}*{mesh.fsdp} = {rows}. "
            f"Use data.batch_size={least}, or fewer microbatches."
        )
    _check_launch(config)
    if config.plan.topology is not None and config.executor.DISPATCHES_TASKS:
        raise ConfigError(
            f"plan.topology={config.plan.topology} is compiled for as a whole, but executor=mpmd compiles for each "
            "rank's devices, and starts them for it. Use executor=spmd."
        )
    if config.plan.topology is not None and config.run.platform not in (None, "cpu"):
        raise ConfigError(
            f"plan.topology={config.plan.topology} is described here, but run.platform={config.run.platform} starts "
            "devices. Use run.platform=cpu, or leave it out."
        )
    if not config.executor.IS_PIPELINED and mesh.num_devices > 1:
        raise ConfigError(
            f"executor=reference is the un-pipelined model on one device, but mesh={mesh.text} has {mesh.num_devices}. "
            "Use mesh=1x1, executor=spmd or executor=mpmd."
        )
    if not config.executor.IS_PIPELINED and config.partition.name != "uniform":
        raise ConfigError(
            f"partition={config.partition.name} divides layers over stages, and executor=reference has none. "
            "Use partition=uniform or another executor."
        )
    is_mlp, is_rows = config.model.name == "mlp", data.name == "regression"
    if is_mlp != is_rows and "custom" not in (config.model.name, data.name):
        raise ConfigError(
            f"model={config.model.name} cannot learn from data={data.name}. "
            f"Use {'data=regression' if is_mlp else 'data=stdlib (or text, tokens, synthetic)'}"
            f" or model={'transformer' if is_mlp else 'mlp'}."
        )
    if config.model.name == "custom":
        is_text = data.name not in ("regression", "custom")
        if is_text != (config.model.seq_len is not None):
            remedy = "Set model.seq_len" if is_text else "Leave model.seq_len out"
            what = "is cut into sequences" if is_text else "has no sequences to be cut"
            raise ConfigError(f"data={data.name} {what}, but model.seq_len={config.model.seq_len}. {remedy}.")
    if config.run.timeline and not config.executor.DISPATCHES_TASKS:
        raise ConfigError(
            f"run.timeline=true measures tasks that are programs of their own, but executor={config.executor.name} is "
            "one program. Use executor=mpmd, or run.profile.start=N, which traces any executor."
        )
    if config.run.timeline and config.run.distributed != "off":
        raise ConfigError(
            f"run.timeline=true measures the ranks of one process, but run.distributed={config.run.distributed} has "
            "those of several. Use run.distributed=off, or run.profile.start=N, which traces process 0."
        )
    if config.run.timeline and config.run.profile.start is not None:
        raise ConfigError(
            f"run.timeline=true and run.profile.start={config.run.profile.start} both trace, and one trace can run "
            "at a time. Leave one of them out."
        )
    _check_inspected(config)
    profile = config.run.profile
    if profile.start is not None and profile.start + profile.num_steps > config.run.num_steps:
        raise ConfigError(
            f"run.profile.start+run.profile.num_steps = {profile.start}+{profile.num_steps} is past the last step "
            f"(run.num_steps={config.run.num_steps}). "
            f"Use run.profile.start={max(0, config.run.num_steps - profile.num_steps)} at most, or fewer "
            "run.profile.num_steps."
        )


def _check_inspected(config: Config) -> None:
    asked, executor = config.inspect, config.executor
    chosen = [f"inspect.{key}={getattr(asked, key)}" for key in ("stage", "task") if getattr(asked, key) is not None]
    if chosen and not executor.DISPATCHES_TASKS:
        raise ConfigError(
            f"{' '.join(chosen)} chooses among the programs of executor=mpmd, but executor={executor.name} is one "
            "program. Leave it out, or use executor=mpmd."
        )
    if asked.what == "program" and not executor.IS_PIPELINED:
        raise ConfigError(
            "inspect.what=program shows what ranks run, but executor=reference has neither ticks nor tasks. "
            "Use inspect.what=jaxpr, stablehlo or hlo, or executor=spmd or mpmd."
        )


def _check_launch(config: Config) -> None:
    processes, mesh = config.launch.processes, config.mesh
    if config.launch.is_used and config.run.distributed != "off":
        raise ConfigError(
            f"launch.processes={processes} launch.max_restarts={config.launch.max_restarts} is for processes that this "
            f"command starts, but run.distributed={config.run.distributed} says that they are started elsewhere. "
            "Use run.distributed=off, or leave out launch."
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
