"""`ppctl.plan`: the prediction for a pipeline of any model, as `ppctl plan` makes it."""

import difflib

from ppctl.config import AutoHardware, Hardware, Plan
from ppctl.errors import ConfigError
from ppctl.planner.cost.predict_step import PipelinePlan, predict_pipeline
from ppctl.planner.cost.target_devices import Target
from ppctl.training.pipeline.job import model_on
from ppctl.training.pipeline.known_hardware import described_only, known
from ppctl.training.pipeline.pipeline import Pipeline


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
    counted = model_on(pipe, described_only(request, device.device_kind))
    return predict_pipeline(pipe, counted, Target(request, *how, Plan(memory_gib=memory_gib)))


def hardware_named(name: str) -> Hardware | AutoHardware:
    """Return the description of hardware, or "auto"; ConfigError for an unknown name."""
    if name == "auto":
        return AutoHardware()
    if name not in known():
        near = difflib.get_close_matches(name, known(), n=1)
        remedy = f"Did you mean {near[0]}?" if near else f"Use one of auto, {', '.join(known())}."
        raise ConfigError(f"hardware={name} is not described. {remedy}")
    return known()[name]
