"""`ppctl.tune`: the fastest layouts of any model on a number of devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import optax

from ppctl.config import Mpmd, Spmd, Tune
from ppctl.errors import ConfigError
from ppctl.executors.device_mesh import all_devices, repeated_mesh
from ppctl.model.network import Network
from ppctl.model.stack import Stack
from ppctl.planner.cost import predict_step
from ppctl.planner.cost.target_devices import Target
from ppctl.planner.search.layout_candidate import Candidate
from ppctl.planner.search.tune_layouts import Row, planned_layouts, search_of
from ppctl.schedule.families.registry import family
from ppctl.training.pipeline.build_pipeline import pipeline
from ppctl.training.pipeline.call_checks import compute_dtype, whole_number
from ppctl.training.pipeline.execution import spmd
from ppctl.training.pipeline.known_hardware import default_dtype, described_device, described_only
from ppctl.training.pipeline.pipeline_request import layered_stack, shapes_of
from ppctl.training.pipeline.pipeline_step import model_on


@dataclass(frozen=True)
class TunedLayout:
    """A layout of a model, with its predicted step. Made by `tune`."""

    mesh: Mapping[str, int]  # arguments of `ppctl.mesh`
    arguments: Mapping[str, Any]  # arguments of `ppctl.pipeline`: schedule, executor, ...
    plan: predict_step.PipelinePlan


def tune(
    model: Stack | Network,
    num_devices: int,
    optimizer: optax.GradientTransformation,
    *,
    batch: Any,
    executor: Spmd | Mpmd | None = None,
    hardware: str = "auto",
    memory_gib: float | None = None,
    dtype: Any = None,
    schedules: Sequence[str] | None = None,
    layers: int | None = None,
    best: int = 10,
) -> tuple[TunedLayout, ...]:
    """Return the layouts of a model that fit, fastest first, as `ppctl.plan` predicts each.

    Searches mesh, schedule, stages a rank, partition, microbatches and remat; compiles nothing.
    `ppctl.pipeline(model, ppctl.mesh(**row.mesh), ..., **row.arguments)` builds a layout `row`.

    Args:
        num_devices: The number of devices, all of them used.
        batch: A global batch, or its shapes and dtypes.
        executor: As in `ppctl.pipeline`; None: `ppctl.spmd()`. The search sets its remat.
        hardware, memory_gib: As in `ppctl.plan`.
        schedules: Names of families; None: all that the executor runs.
        layers, dtype: As in `ppctl.pipeline`; the default dtype is that of `hardware`.
        best: The largest number of layouts; () is returned if no layout fits.

    Raises:
        ConfigError: The hardware is unknown, or a choice is impossible.
    """
    # 1. the request
    num_devices, best = whole_number("num_devices", num_devices, 1), whole_number("best", best, 1)
    executor = spmd() if executor is None else executor
    if not isinstance(executor, Spmd | Mpmd):
        raise ConfigError(
            f"executor={executor!r} has one layout. Use ppctl.spmd() or ppctl.mpmd()."
        )
    shapes, device = shapes_of(batch), all_devices()[0]
    request = predict_step.hardware_named(hardware)
    dtype = compute_dtype(dtype, model, default_dtype(request, device))
    stack = layered_stack(model, batch, layers, dtype)
    target = Target(request, device, num_devices, str(dtype), predict_step.limits_of(memory_gib))
    names = None if schedules is None else [family(name).name for name in schedules]
    # 2. the model with the hardware's kernels
    other, make = described_only(request, device.device_kind), stack.options.on_device
    there = stack if other is None or make is None else make(described_device(other) or device)
    # 3. the search
    counted, choices = there.counted(), Tune(schedules=names, best=best)
    search = search_of(executor, choices, optimizer, counted, shapes, target)
    pipelined = partial(pipeline, stack, batch=shapes, optimizer=optimizer, dtype=dtype)

    def planned(layout: Candidate) -> Row:
        arguments = _arguments(layout, executor)
        pipe = pipelined(repeated_mesh(layout.mesh), **arguments)
        plan = predict_step.predict_pipeline(pipe, model_on(pipe, None, counted), target)
        return Row(layout, plan, arguments)

    rows = planned_layouts(search, planned, best).best
    return tuple(TunedLayout(row.layout.mesh.by_axis, row.request, row.plan) for row in rows)


def _arguments(layout: Candidate, executor: Spmd | Mpmd) -> dict[str, Any]:
    return {
        "schedule": family(layout.family, **layout.knobs),
        "num_microbatches": layout.num_microbatches,
        "partition": list(layout.partition),
        "executor": replace(executor, remat=str(layout.remat)),
        "vocab": layout.vocab,
    }
