"""The device mesh: axes dp (data-parallel rows), pp (pipeline ranks), fsdp (parameter shards)."""

from __future__ import annotations

import jax
from jax.sharding import AxisType, Mesh

from ppctl.errors import ConfigError

AXES = ("dp", "pp", "fsdp")
DATA_AXES = ("dp", "fsdp")  # the batch is divided over both


def make_mesh(dp: int, pp: int, fsdp: int) -> Mesh:
    """A mesh of the first dp*pp*fsdp devices, in an order that suits the hardware. ConfigError when there are fewer."""
    need = dp * pp * fsdp
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts where a platform's plugin is not installed
        platforms: str = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue] made at run time
        reason = str(error).split("\n")[0] or "there are no such devices, or JAX's plugin for them is not installed"
        raise ConfigError(
            f"JAX cannot start on {platforms}: {reason}. Use run.platform=cpu, or install ppctl[cuda12], ppctl[cuda13] "
            "or ppctl[tpu]."
        ) from error
    if need > len(devices):
        kind = devices[0].platform
        raise ConfigError(
            f"mesh dp*pp*fsdp = {dp}*{pp}*{fsdp} = {need} needs {need} devices, but there are {len(devices)} ({kind}). "
            f"Use a smaller mesh, such as mesh=1x{len(devices)}, or run.platform=cpu, which simulates devices."
        )
    return jax.make_mesh((dp, pp, fsdp), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[:need])
