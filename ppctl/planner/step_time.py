"""Predict the time of a step: op times counted for described hardware or measured here, then simulation."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ppctl.config import Analytic, Config, Hardware, Measure
from ppctl.config.files import user_cache_dir
from ppctl.errors import ConfigError
from ppctl.executors.mpmd.tasks import Model
from ppctl.executors.spmd.memory import tree_bytes
from ppctl.executors.xla_flags import LATENCY_HIDING
from ppctl.model.trainable import trained_part
from ppctl.planner import analytic
from ppctl.planner.analytic import Machine, ParamBytes, PlannedLayout
from ppctl.planner.count import work_of
from ppctl.planner.measure import measured_op_times
from ppctl.planner.op_times import OpTimes, StepTime
from ppctl.planner.roofline import Link, Speed
from ppctl.planner.step_runs import time_of
from ppctl.training.job import ModelFlops, TrainingJob
from ppctl.training.known_hardware import NOMINAL, host_devices, links_of, mfu_peak_flops, peak_flops, resolved
from ppctl.training.pipeline import Pipeline

Tree = Any


def predicted_time(job: TrainingJob, costs: Analytic | None = None) -> tuple[StepTime | None, str | None]:
    """Return (the time of a train step by `costs`, None), or (None, why nothing is known of it).

    costs: None for those of the request. ConfigError where the request is wrong.
    """
    request: Analytic = job.config.costs if costs is None else costs
    if not isinstance(request, Measure):
        try:
            _described(job.config, device_kind(job.pipe), str(job.pipe.dtype))
        except ConfigError as error:
            if job.config.hardware.name == "auto":
                return None, str(error)
            raise
    return time_of(job.pipe, op_times_of(job, request)), None


def op_times_of(job: TrainingJob, request: Analytic) -> OpTimes:
    """Return the op times of a job: measured, or counted for the hardware that is described."""
    config, pipe = job.config, job.pipe
    if not isinstance(request, Measure):
        return counted_op_times(job, machine_of(config, device_kind(pipe), str(pipe.dtype)))
    if not pipe.stack.are_alike:
        raise ConfigError(
            "costs=measure times one layer for all, but the layers of this model differ: a ppctl.Network is cut into "
            "unequal ones, and model.window_pattern gives a window to some. Use costs=analytic."
        )
    if config.run.distributed != "off":
        raise ConfigError(
            f"costs=measure times the devices of one process, but run.distributed={config.run.distributed}. "
            "Use costs=analytic."
        )
    if config.plan.topology is not None:
        raise ConfigError(
            f"costs=measure times devices that are here, but plan.topology={config.plan.topology} describes "
            "others. Use costs=analytic."
        )
    if pipe.execution.gathers_by_layer and config.mesh.fsdp > 1:
        raise ConfigError(
            f"costs=measure times layers that are whole, but executor.gather=layer gathers each over mesh.fsdp="
            f"{config.mesh.fsdp} in every task. Use costs=analytic, or executor.gather=step."
        )
    if pipe.layout.auto:
        raise ConfigError(
            f"costs=measure times pieces of one device, but mesh.tp={config.mesh.tp} is divided by XLA (sharding of "
            "the model), which divides whole programs. Use costs=analytic."
        )
    return measured_op_times(job, cache_dir(request))


def counted_op_times(job: TrainingJob, machine: Machine) -> OpTimes:
    """Return the op times of a job on these devices, by counting operations and bytes."""
    pipe, execution, casts = job.pipe, job.pipe.execution, 1
    if not execution.is_pipelined:  # the reference's gradients of a microbatch are whole before they are added
        machine = replace(machine, speed=replace(machine.speed, adds=False))
        casts = job.config.schedule.num_microbatches  # and each casts the parameters
    return analytic.op_times(
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
    sizes, rank_of = [len(layers) for layers in pipe.partition], pipe.schedule.rank_of
    held = [sum(n for n, r in zip(sizes, rank_of, strict=True) if r == rank) for rank in set(rank_of)]
    largest = max(sizes) * pipe.schedule.num_chunks if pipe.execution.in_ticks else max(held)
    axes = pipe.mesh.shape
    inside = {"tp": axes["tp"], "cp": axes["cp"]}
    has_parts = pipe.schedule.divides_vocabulary
    return PlannedLayout(
        axes["dp"], axes["pp"], axes["fsdp"], largest, chunk_layers=max(sizes), **inside, has_parts=has_parts
    )


def device_kind(pipe: Pipeline) -> str:
    """Return what JAX calls the devices of the mesh."""
    return pipe.mesh.devices.flat[0].device_kind


def _described(config: Config, device_kind: str, dtype: str) -> tuple[Hardware, float]:
    """Return the hardware of a request and its peak FLOP/s. ConfigError where they are not known."""
    hardware = resolved(config.hardware, device_kind, config.plan.topology)
    peak = peak_flops(hardware, dtype)
    if peak is None:
        raise ConfigError(
            f"hardware={hardware.name} states no peak for {dtype}. Say it: hardware={hardware.name} "
            f"+hardware.peak_flops.{dtype}=FLOP/S, or use run.dtype={'|'.join(hardware.peak_flops)}."
        )
    return hardware, peak


def machine_of(config: Config, device_kind: str, dtype: str) -> Machine:
    """Return the devices that a plan is for. ConfigError where nothing is known of them."""
    hardware, peak = _described(config, device_kind, dtype)
    link = Link(hardware.link_latency_s, hardware.link_bytes_per_s)
    if config.costs.doctor is not None:
        link = Link(*links_of(config.costs.doctor))
    network = None
    if hardware.network_bytes_per_s is not None and hardware.network_latency_s is not None:
        network = Link(hardware.network_latency_s, hardware.network_bytes_per_s)
    return Machine(
        speed_of(hardware, peak),
        link,
        network,
        host_devices(hardware, config.plan.topology),
        hardware.task_s,
        cores=os.cpu_count() if hardware.name == NOMINAL else None,
        order=config.mesh.order,
        unroll=config.executor.unroll,
        gathers_ahead=_gathers_ahead(config, hardware),
    )


def _gathers_ahead(config: Config, hardware: Hardware) -> bool:
    """Return whether compilers for this hardware let gathers travel while other work runs: on GPUs, by their flags."""
    if hardware.name == NOMINAL:
        return False
    flags = config.executor.xla_flags
    is_told = flags == "auto" or (flags != "none" and any(f"{LATENCY_HIDING}=true" in text for text in flags))
    return hardware.cuda is None or is_told


def speed_of(hardware: Hardware, peak_flops_per_s: float) -> Speed:
    """Return the speed of a device of this hardware, whose peak in the dtype of compute is given."""

    def reached(fraction: float | None) -> float | None:
        return None if fraction is None else peak_flops_per_s * fraction

    return Speed(
        peak_flops_per_s * hardware.flops_fraction,
        hardware.memory_bytes_per_s * hardware.bandwidth_fraction,
        reached(hardware.attention_forward_fraction),
        reached(hardware.attention_backward_fraction),
        cores=None if hardware.cuda is None else hardware.cuda.cores,
        adds=hardware.adds_products,
    )


def hardware_of(job: TrainingJob) -> Hardware | None:
    """Return the description of the devices that the request is for, or None."""
    try:
        return resolved(job.config.hardware, device_kind(job.pipe), job.config.plan.topology)
    except ConfigError:
        return None


class Mfu(NamedTuple):
    """Model FLOPs of a step over what the devices' peak would do in its time, 0..1; None where no peak is known."""

    full: float | None
    causal: float | None  # attention to later tokens not counted


def mfu_of(job: TrainingJob, step_s: float | None, flops: ModelFlops) -> Mfu:
    """Return the MFU of a step that takes so long."""
    hardware = hardware_of(job)
    peak = mfu_peak_flops(job.config.hardware if hardware is None else hardware, "", str(job.pipe.dtype))
    if step_s is None or peak is None:
        return Mfu(None, None)
    most = step_s * peak * job.pipe.mesh.size
    return Mfu(flops.full / most, flops.causal / most)


def param_bytes_of(pipe: Pipeline) -> ParamBytes:
    """Return the sizes of the parameters of a model, of one device's shards over tp."""
    return of_one_device(param_bytes(pipe.states.natural, pipe.dtype, pipe.stack.trainable), pipe.model)


def of_one_device(whole: ParamBytes, model: Model) -> ParamBytes:
    """Return the sizes of what one device holds of a model, where tp divides it."""
    layer, embed_head = tree_bytes(model.held["layers"]), tree_bytes(model.held["ends"])
    trained = trained_part(model.held, model.stack.trainable)
    return replace(
        whole,
        layer=layer,
        embed_head=embed_head,
        frozen_layer=layer - tree_bytes(trained["layers"]),
        frozen_embed_head=embed_head - tree_bytes(trained["ends"]),
    )


def param_bytes(state: Tree, dtype: Any, trainable: Tree = True) -> ParamBytes:
    """Return the sizes of the parameters of a state in natural order; `dtype` is that of compute.

    trainable: as of a `Stack`.
    """
    params, trained = state["params"], trained_part(state["params"], trainable)
    layers = jax.tree.leaves(params["layers"])
    whole = tree_bytes(params)
    return ParamBytes(
        layer=tree_bytes(params["layers"]) // layers[0].shape[0],
        embed_head=tree_bytes(params["ends"]),
        moments=tree_bytes(state["optimizer"]) / tree_bytes(trained),
        compute_ratio=sum(math.prod(a.shape) for a in jax.tree.leaves(params)) * jnp.dtype(dtype).itemsize / whole,
        frozen_layer=(tree_bytes(params["layers"]) - tree_bytes(trained["layers"])) // layers[0].shape[0],
        frozen_embed_head=tree_bytes(params["ends"]) - tree_bytes(trained["ends"]),
    )


def cache_dir(costs: Measure) -> Path:
    """Return the directory in which measurements are kept."""
    if costs.cache_dir is not None:
        return Path(costs.cache_dir).expanduser()
    return user_cache_dir()
