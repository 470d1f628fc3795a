"""Predict the time of a step: op times by counting, then simulation."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.config import Config, Hardware
from ppctl.config.groups.executor_settings import Pipelined
from ppctl.errors import ConfigError
from ppctl.executors.model_shapes import Model, tree_bytes
from ppctl.executors.reference import MOST_UNROLLED
from ppctl.model.trainable_parameters import trained_part
from ppctl.planner.cost.counted_costs import (
    Machine,
    ParamBytes,
    PlannedLayout,
    layers_of_ranks,
    op_times,
)
from ppctl.planner.cost.op_times import OpTimes, StepTime, costs_of_stages, step_time
from ppctl.planner.cost.roofline import Link, Speed
from ppctl.planner.cost.task_flops import work_of
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.registry import BASELINE, build
from ppctl.schedule.mesh_axes import MeshSizes
from ppctl.schedule.partition.partition import stage_costs
from ppctl.schedule.simulator import Timeline
from ppctl.schedule.timeline import timeline_at
from ppctl.training.pipeline.job import TrainingJob
from ppctl.training.pipeline.known_hardware import NOMINAL, host_devices, peak_flops, resolved
from ppctl.training.pipeline.mfu import mfu_peak_flops
from ppctl.training.pipeline.pipeline import Pipeline

Tree = Any


def predicted_time(job: TrainingJob) -> tuple[StepTime | None, str | None]:
    """Return (the time of a train step, None), or (None, why it is unknown).

    ConfigError where the request is wrong.
    """
    try:
        machine = machine_of(job.config, device_kind(job.pipe), str(job.pipe.dtype))
    except ConfigError as error:
        if job.config.hardware.name == "auto":
            return None, str(error)
        raise
    return time_of(job.pipe, counted_op_times(job, machine)), None


def time_of(pipe: Pipeline, op_times: OpTimes, costs: Costs | None = None) -> StepTime:
    """Return the seconds of a train step; costs: of the stages' tasks, None: by op_times."""
    if not pipe.execution.is_pipelined:
        alone = build(BASELINE, 1, pipe.schedule.num_microbatches)
        whole = costs_of_stages(op_times, [pipe.stack.num_layers], keeps_input=False)
        return step_time(op_times, alone, None, whole, 1)
    return step_time(op_times, pipe.schedule, pipe.ticks, *as_run(pipe, op_times, costs))


def timeline_of(pipe: Pipeline, op_times: OpTimes, costs: Costs | None = None) -> Timeline:
    """Return when each task of a step runs, by the rules of `time_of`, without per-step overhead.

    Not for executor=reference, which has no stages.
    """
    of_stages, copies = as_run(pipe, op_times, costs)
    return timeline_at(pipe.schedule, pipe.ticks, of_stages, op_times.capacity / copies)


def as_run(pipe: Pipeline, op_times: OpTimes, costs: Costs | None = None) -> tuple[Costs, int]:
    """Return (costs of each stage's tasks, those given if any; number of a rank's devices)."""
    copies = pipe.mesh.size // pipe.mesh.shape["pp"]
    if costs is not None:
        return costs, copies
    layers, schedule = None if pipe.stack.are_alike else pipe.relative_costs.layers, pipe.schedule
    sizes = stage_costs(pipe.partition, embed=0.0, head=0.0, layers=layers)
    how = {"split": schedule.is_split, "num_parts": schedule.num_parts}
    keeps_input = pipe.execution.remat.keeps_input_only
    return costs_of_stages(op_times, sizes, keeps_input=keeps_input, **how), copies


def op_times_of(job: TrainingJob) -> OpTimes:
    """Return the op times of a job, counted for its hardware."""
    return counted_op_times(job, machine_of(job.config, device_kind(job.pipe), str(job.pipe.dtype)))


def counted_op_times(job: TrainingJob, machine: Machine) -> OpTimes:
    """Return the op times of a job on these devices, by counting operations and bytes."""
    pipe, execution, casts = job.pipe, job.pipe.execution, 1
    if not execution.is_pipelined:
        # the reference adds whole gradients of a microbatch, and each microbatch casts parameters
        machine = replace(machine, speed=replace(machine.speed, adds=False))
        casts = job.config.schedule.num_microbatches
    return op_times(
        work_of(job.counted_model),
        param_bytes_of(pipe),
        machine,
        layout_of(pipe),
        microbatch_examples=pipe.model.microbatch["inputs"].shape[0],
        remat=execution.remat,
        gather=execution.gather,
        casts=casts,
    )


def layout_of(pipe: Pipeline) -> PlannedLayout:
    """Return how the model lies on the mesh."""
    sizes, schedule = [len(layers) for layers in pipe.partition], pipe.schedule
    in_ticks, of_ranks = pipe.execution.in_ticks, layers_of_ranks(sizes, schedule.rank_of)
    largest = max(sizes) * schedule.num_chunks if in_ticks else max(of_ranks)
    mesh = MeshSizes.of(pipe.mesh.shape)
    return PlannedLayout(mesh, largest, max(sizes), has_parts=schedule.divides_vocabulary)


def device_kind(pipe: Pipeline) -> str:
    """Return what JAX calls the devices of the mesh."""
    return pipe.mesh.devices.flat[0].device_kind


def machine_of(config: Config, device_kind: str, dtype: str) -> Machine:
    """Return the devices that a plan is for. ConfigError where nothing is known of them."""
    hardware = resolved(config.hardware, device_kind, config.plan.topology)
    peak = peak_flops(hardware, dtype)
    if peak is None:
        name, dtypes = f"hardware={hardware.name}", "|".join(hardware.peak_flops)
        raise ConfigError(
            f"{name} states no peak for {dtype}. Say it: {name} "
            f"+hardware.peak_flops.{dtype}=FLOP/S, or use run.dtype={dtypes}."
        )
    link, hosts = Link(hardware.link_latency_s, hardware.link_bytes_per_s), hardware.hosts
    network = None if hosts is None else Link(hosts.latency_s, hosts.bytes_per_s)
    return Machine(
        speed_of(hardware, peak),
        link,
        network,
        host_devices(hardware, config.plan.topology),
        hardware.task_s,
        cores=os.cpu_count() if hardware.name == NOMINAL else None,
        order=config.mesh.order,
        unroll=config.executor.unroll if isinstance(config.executor, Pipelined) else MOST_UNROLLED,
        gathers_ahead=_gathers_ahead(config, hardware),
    )


def _gathers_ahead(config: Config, hardware: Hardware) -> bool:
    """Return whether compilers overlap gathers with other work; on GPUs a matter of flags."""
    if hardware.name == NOMINAL:
        return False
    return hardware.cuda is None or config.executor.xla_flags == "auto"


def speed_of(hardware: Hardware, peak_flops_per_s: float) -> Speed:
    """Return the speed of a device, given its peak in the dtype of compute."""
    reached, attention = hardware.reached, ("attention_forward", "attention_backward")
    return Speed(
        peak_flops_per_s * reached["flops"],
        hardware.memory_bytes_per_s * reached.get("bytes", 1.0),
        *(peak_flops_per_s * reached[name] if name in reached else None for name in attention),
        cores=None if hardware.gpu is None else hardware.gpu.cores,
        adds=hardware.adds_products,
    )


def hardware_of(job: TrainingJob) -> Hardware | None:
    """Return the description of the devices that the request is for, or None."""
    try:
        return resolved(job.config.hardware, device_kind(job.pipe), job.config.plan.topology)
    except ConfigError:
        return None


def mesh_peak_flops(job: TrainingJob) -> float | None:
    """Return the peak FLOP/s of all devices that MFU compares with; None if unknown."""
    peak = mfu_peak_flops(hardware_of(job) or job.config.hardware, "", str(job.pipe.dtype))
    return None if peak is None else peak * job.pipe.mesh.size


def param_bytes(state: Tree, model: Model) -> ParamBytes:
    """Return the sizes of one device's parameters; state: shapes of all, in natural order."""
    # 1. of one device's shards, where tp divides the model
    held, trained = model.held, trained_part(model.held, model.stack.trainable)
    layer, embed_head = tree_bytes(held["layers"]), tree_bytes(held["embed_head"])

    # 2. ratios, of all parameters
    params = state["params"]
    moments = tree_bytes(state["optimizer"]) / tree_bytes(
        trained_part(params, model.stack.trainable)
    )
    num_computed = sum(math.prod(a.shape) for a in jax.tree.leaves(params))
    return ParamBytes(
        layer=layer,
        embed_head=embed_head,
        moments=moments,
        compute_ratio=num_computed * jnp.dtype(model.dtype).itemsize / tree_bytes(params),
        frozen_layer=layer - tree_bytes(trained["layers"]),
        frozen_embed_head=embed_head - tree_bytes(trained["embed_head"]),
    )


def param_bytes_of(pipe: Pipeline) -> ParamBytes:
    """Return `param_bytes` of a pipeline's model."""
    return param_bytes(pipe.states.natural, pipe.model)
