"""What a step of a request takes: prices from the hardware's description or from measurements, then simulation."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.config import Analytic, AutoHardware, Config, Hardware, Measure
from ppctl.errors import ConfigError
from ppctl.executors.spmd.memory import tree_bytes
from ppctl.planner import analytic
from ppctl.planner.analytic import Layout, Machine, ParamBytes
from ppctl.planner.count import work_of
from ppctl.planner.measure import measured
from ppctl.planner.op_times import Prices, StepTime
from ppctl.planner.roofline import Link, Speed
from ppctl.planner.step_runs import time_of
from ppctl.training.job import Parts
from ppctl.training.known_hardware import NOMINAL, links_of, of_topology, peak_flops, resolved

Tree = Any
GIB = 2**30


def priced(parts: Parts, costs: Analytic | None = None) -> tuple[StepTime | None, str | None]:
    """(what a train step takes by `costs` (None: as the config asks), None), or (None, why nothing is known of it).

    ConfigError where what is asked for is wrong.
    """
    asked: Analytic = parts.config.costs if costs is None else costs
    if not isinstance(asked, Measure):
        try:
            _described(parts.config, parts.mesh.devices.flat[0].device_kind, str(parts.dtype))
        except ConfigError as error:
            if parts.config.hardware.name == "auto":
                return None, str(error)
            raise
    return time_of(parts, prices_of(parts, asked)), None


def prices_of(parts: Parts, asked: Analytic) -> Prices:
    """The prices that these costs are."""
    config = parts.config
    if isinstance(asked, Measure):
        if not parts.stack.are_alike:
            raise ConfigError(
                "costs=measure times one layer for all, but the layers that a ppctl.Network is cut into differ. Use "
                "costs=analytic."
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
        return measured(parts, cache_dir(asked))
    machine = machine_of(config, parts.mesh.devices.flat[0].device_kind, str(parts.dtype))
    return analytic.priced(
        work_of(parts.model),
        param_bytes(parts.states.natural, parts.dtype),
        machine,
        layout_of(parts),
        microbatch_rows=parts.model.microbatch["inputs"].shape[0],
        remat=config.executor.remat,
        gathers_each_tick=config.executor.name == "spmd" and config.executor.gather == "tick",
    )


def layout_of(parts: Parts) -> Layout:
    """How the model lies on the mesh."""
    sizes, rank_of = [len(layers) for layers in parts.states.layout.partition], parts.schedule.rank_of
    held = [sum(n for n, r in zip(sizes, rank_of, strict=True) if r == rank) for rank in set(rank_of)]
    is_padded, mesh = parts.config.executor.name == "spmd", parts.config.mesh
    largest = max(sizes) * parts.schedule.num_chunks if is_padded else max(held)
    return Layout(mesh.dp, mesh.pp, mesh.fsdp, largest, chunk_layers=max(sizes))


def _described(config: Config, device_kind: str, dtype: str) -> tuple[Hardware, float]:
    """The hardware of a request and its peak FLOP/s. ConfigError where they are not known."""
    hardware = resolved(config.hardware, device_kind, config.plan.topology)
    peak = peak_flops(hardware, dtype)
    if peak is None:
        raise ConfigError(
            f"hardware={hardware.name} states no peak for {dtype}. Say it: hardware={hardware.name} "
            f"+hardware.peak_flops.{dtype}=FLOP/S, or use run.dtype={'|'.join(hardware.peak_flops)}."
        )
    return hardware, peak


def machine_of(config: Config, device_kind: str, dtype: str) -> Machine:
    """The devices as a plan sees them. ConfigError where nothing is known of them."""
    hardware, peak = _described(config, device_kind, dtype)
    link = Link(hardware.link_latency_s, hardware.link_bytes_per_s)
    if config.costs.doctor is not None:
        link = Link(*links_of(config.costs.doctor))
    network = None
    if hardware.network_bytes_per_s is not None and hardware.network_latency_s is not None:
        network = Link(hardware.network_latency_s, hardware.network_bytes_per_s)
    return Machine(
        Speed(peak * hardware.flops_fraction, hardware.memory_bytes_per_s),
        link,
        network,
        hardware.host_devices,
        hardware.task_s,
        cores=os.cpu_count() if hardware.name == NOMINAL else None,
    )


def hardware_of(parts: Parts) -> Hardware | None:
    """The description of the devices that the request is for, or None."""
    try:
        return resolved(parts.config.hardware, parts.mesh.devices.flat[0].device_kind, parts.config.plan.topology)
    except ConfigError:
        return None


def device_bytes(config: Config, device: Any) -> int | None:
    """Memory of a device: as asked, as the chosen hardware has, as the device states; None where it is not known.

    Simulated devices share the machine's evenly.
    """
    if config.plan.memory_gib is not None:
        return round(config.plan.memory_gib * GIB)
    chosen = None if isinstance(config.hardware, AutoHardware) else config.hardware
    if isinstance(chosen, Hardware) and chosen.memory_gib is not None:
        return round(chosen.memory_gib * GIB)
    if config.plan.topology is not None:
        there = of_topology(config.hardware, config.plan.topology)
        if there is None or there.cuda is None or there.memory_gib is None:
            return None  # the compiler for TPUs says it itself
        return round(there.memory_gib * GIB)
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // config.mesh.num_devices
    stats = device.memory_stats()
    return None if stats is None else stats.get("bytes_limit")


def param_bytes(state: Tree, dtype: Any) -> ParamBytes:
    """Sizes of the parameters of a state in natural order; `dtype` is that of compute."""
    params = state["params"]
    layers = jax.tree.leaves(params["layers"])
    whole = tree_bytes(params)
    return ParamBytes(
        layer=tree_bytes(params["layers"]) // layers[0].shape[0],
        ends=tree_bytes(params["ends"]),
        moments=tree_bytes(state["optimizer"]) / whole,
        compute_ratio=sum(math.prod(a.shape) for a in jax.tree.leaves(params)) * jnp.dtype(dtype).itemsize / whole,
    )


def cache_dir(costs: Measure) -> Path:
    """Where measurements are kept."""
    if costs.cache_dir is not None:
        return Path(costs.cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ppctl"
