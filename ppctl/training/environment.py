"""The environment of a run: versions of the packages that compute and save, and the devices."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from typing import Any

import jax
from jax.sharding import Mesh

PACKAGES = ("ppctl", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")


def versions() -> dict[str, str]:
    """Return the versions of Python and of PACKAGES, by name."""
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def environment(mesh: Mesh) -> dict[str, Any]:
    """Return versions, system and devices, as a start of a run records them. Names of devices are JAX's."""
    device = mesh.devices.flat[0]
    return {
        "versions": versions(),
        "system": platform.platform(),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "num_devices": mesh.size,
        "num_processes": jax.process_count(),
        "num_cores": num_cores(mesh),
    }


def num_cores(mesh: Mesh) -> int | None:
    """Return the cores of this machine where the devices are simulated and share them, else None."""
    return os.cpu_count() if mesh.devices.flat[0].platform == "cpu" else None
