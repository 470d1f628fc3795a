"""`ppctl.plan`: the prediction for a pipeline of any model, as `ppctl plan` makes it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from ppctl.config import AutoHardware, Hardware
from ppctl.errors import ConfigError
from ppctl.planner.cost.predict_step import JobPrediction, predict_pipeline
from ppctl.planner.cost.target_devices import Target
from ppctl.training.pipeline.job import model_on
from ppctl.training.pipeline.known_hardware import described_only, known
from ppctl.training.pipeline.pipeline import Pipeline


@dataclass(frozen=True)
class PipelinePlan:
    """The predicted step of a pipeline, before anything is compiled. Made by `plan`."""

    hardware: str | None  # name of the description used; None: the devices are unknown
    step_s: float | None  # seconds of a train step; None: unknown
    overhead_s: float | None  # a part: parameters gathered, gradients summed, optimizer
    unknown: str | None  # why the seconds are unknown
    ideal_bubble: float | None  # 0..1: equal stages, no transfers; None: no pipeline
    bubble: float | None  # 0..1: by the seconds of the step
    memory: tuple[Mapping[str, int], ...]  # bytes of one device of each rank, by part
    limit_bytes: int | None  # memory of a device; None: unknown

    @property
    def total_bytes(self) -> tuple[int, ...]:
        """Bytes of one device of each rank."""
        return tuple(sum(held.values()) for held in self.memory)

    @property
    def fits(self) -> bool | None:
        """Whether every rank's bytes fit a device; None: its memory is unknown."""
        return None if self.limit_bytes is None else max(self.total_bytes) <= self.limit_bytes


def plan(
    pipe: Pipeline, *, hardware: str = "auto", memory_gib: float | None = None
) -> PipelinePlan:
    """Return the predicted seconds and bytes of a pipeline's step; compiles nothing.

    The numbers are those of `ppctl plan` for the same request: FLOPs and bytes of the traced
    layers, at the speeds of the hardware.

    Args:
        hardware: Of the devices: a name of conf/hardware, such as h100 or v5e, or "auto": that of
            the mesh's. Simulated devices may so stand for accelerators.
        memory_gib: Of a device; None: the hardware's.

    ConfigError: the hardware is unknown, or states no speed for the dtype of compute.
    """
    device = pipe.mesh.devices.flat[0]
    request = hardware_named(hardware)
    how = device, pipe.mesh.size, str(pipe.dtype)
    target = Target(request, *how, memory_gib=memory_gib)
    counted = model_on(pipe, described_only(request, device.device_kind))
    return plan_of(predict_pipeline(pipe, counted, target), target)


def plan_of(found: JobPrediction, target: Target) -> PipelinePlan:
    """Return the plan of a prediction for the target devices."""
    limit, used = target.limit, target.known_hardware
    return PipelinePlan(
        hardware=None if used is None else used.name,
        step_s=None if found.time is None else found.time.total_s,
        overhead_s=None if found.time is None else found.time.overhead_s,
        unknown=found.unknown,
        ideal_bubble=found.ideal_bubble,
        bubble=found.bubble,
        memory=found.memory,
        limit_bytes=None if limit is None else limit.size_bytes,
    )


def hardware_named(name: str) -> Hardware | AutoHardware:
    """Return the description of hardware, or "auto"; ConfigError for an unknown name."""
    if name == "auto":
        return AutoHardware()
    if name not in known():
        near = difflib.get_close_matches(name, known(), n=1)
        remedy = f"Did you mean {near[0]}?" if near else f"Use one of auto, {', '.join(known())}."
        raise ConfigError(f"hardware={name} is not described. {remedy}")
    return known()[name]
