"""The device mesh: axes dp (data-parallel replicas), pp (pipeline ranks), fsdp (parameter shards)."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from ppctl.errors import ConfigError

AXES = ("dp", "pp", "fsdp")
DATA_AXES = ("dp", "fsdp")  # the batch is divided over both


def make_mesh(dp: int, pp: int, fsdp: int) -> Mesh:
    """Return a mesh of dp*pp*fsdp devices, in an order that suits the hardware. ConfigError when there are fewer.

    One process takes the first devices. Several take all devices of all of them, process by process where the hardware
    prefers no other order: dp goes over processes, pp and fsdp stay within one as far as its devices reach.
    """
    need, devices = dp * pp * fsdp, all_devices()
    request, kind, num_processes = (
        f"mesh dp*pp*fsdp = {dp}*{pp}*{fsdp} = {need}",
        devices[0].platform,
        jax.process_count(),
    )
    if num_processes > 1 and need != len(devices):
        raise ConfigError(
            f"{request} needs {need} devices, but {num_processes} processes have {len(devices)} ({kind}), and none may "
            f"be left out. Use a mesh of {len(devices)}, such as mesh=1x{len(devices)}, or another number of processes."
        )
    if need > len(devices):
        raise ConfigError(
            f"{request} needs {need} devices, but there are {len(devices)} ({kind}). "
            f"Use a smaller mesh, such as mesh=1x{len(devices)}, or run.platform=cpu, which simulates devices."
        )
    return jax.make_mesh((dp, pp, fsdp), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[:need])


def all_devices() -> list[Any]:
    """Return the devices of every process; starts JAX. ConfigError where it cannot start."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts where a platform's plugin is not installed
        platforms: str = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue] made at run time
        reason = str(error).split("\n")[0] or "there are no such devices, or JAX's plugin for them is not installed"
        raise ConfigError(
            f"JAX cannot start on {platforms}: {reason}. Use run.platform=cpu, or install ppctl[cuda12], ppctl[cuda13] "
            "or ppctl[tpu]."
        ) from error
