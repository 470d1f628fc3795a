"""The device mesh: axes dp (data-parallel rows), pp (pipeline ranks), fsdp (parameter shards)."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh

from ppctl.errors import ConfigError

AXES = ("dp", "pp", "fsdp")
DATA_AXES = ("dp", "fsdp")  # the batch is divided over both

AWAY_FROM_TPU = {  # libtpu asks a metadata server for these and complains of each
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}


def make_mesh(dp: int, pp: int, fsdp: int) -> Mesh:
    """A mesh of dp*pp*fsdp devices, in an order that suits the hardware. ConfigError when there are fewer.

    One process takes the first devices. Several take all devices of all of them, process by process where the hardware
    prefers no other order: dp goes over processes, pp and fsdp stay within one as far as its devices reach.
    """
    need, devices = dp * pp * fsdp, all_devices()
    asked, kind, num_processes = (
        f"mesh dp*pp*fsdp = {dp}*{pp}*{fsdp} = {need}",
        devices[0].platform,
        jax.process_count(),
    )
    if num_processes > 1 and need != len(devices):
        raise ConfigError(
            f"{asked} needs {need} devices, but {num_processes} processes have {len(devices)} ({kind}), and none may "
            f"be left out. Use a mesh of {len(devices)}, such as mesh=1x{len(devices)}, or another number of processes."
        )
    if need > len(devices):
        raise ConfigError(
            f"{asked} needs {need} devices, but there are {len(devices)} ({kind}). "
            f"Use a smaller mesh, such as mesh=1x{len(devices)}, or run.platform=cpu, which simulates devices."
        )
    return jax.make_mesh((dp, pp, fsdp), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[:need])


def described_mesh(dp: int, pp: int, fsdp: int, topology: str) -> Mesh:
    """A mesh of all chips of a TPU topology, such as "v5e:4x4", that need not be here: programs compile for it.

    ConfigError where libtpu is missing, or knows no such topology, or where it has another number of chips.
    Source: jax.experimental.topologies; libtpu describes and compiles without a chip.
    """
    for name, value in AWAY_FROM_TPU.items():
        os.environ.setdefault(name, value)
    if find_spec("libtpu") is None:
        raise ConfigError(
            f"plan.topology={topology} needs libtpu, which holds the compiler for TPUs. Install ppctl[tpu]; a TPU is "
            "not needed."
        )
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(
            f"plan.topology={topology} is none that libtpu describes: {reason}. Use one such as v5e:4x4."
        ) from error
    need = dp * pp * fsdp
    if need != len(devices):
        raise ConfigError(
            f"mesh dp*pp*fsdp = {dp}*{pp}*{fsdp} = {need}, but plan.topology={topology} has {len(devices)} devices. "
            f"Use a mesh of {len(devices)}, such as mesh={len(devices)}x1, or another topology."
        )
    order = mesh_utils.create_device_mesh((dp, pp, fsdp), devices, allow_split_physical_axes=True)
    return Mesh(order, AXES, axis_types=(AxisType.Auto,) * 3)


def all_devices() -> list[Any]:
    """The devices of every process; starts JAX. ConfigError where it cannot start."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts where a platform's plugin is not installed
        platforms: str = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue] made at run time
        reason = str(error).split("\n")[0] or "there are no such devices, or JAX's plugin for them is not installed"
        raise ConfigError(
            f"JAX cannot start on {platforms}: {reason}. Use run.platform=cpu, or install ppctl[cuda12], ppctl[cuda13] "
            "or ppctl[tpu]."
        ) from error
