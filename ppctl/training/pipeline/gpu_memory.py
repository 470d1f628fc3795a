"""The share of a GPU's memory for programs: run.memory_fraction, or JAX's default."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from ppctl.config import Config
from ppctl.errors import ConfigError
from ppctl.training.pipeline.known_hardware import described_only, of_topology

JAX_MEMORY_FRACTION = 0.75  # JAX's default, and that of memory_gib of GPUs in conf/hardware
MOST_MEMORY_FRACTION = 0.9  # the most to try where memory is short: CUDA and NCCL need the rest
VARIABLE = "XLA_CLIENT_MEM_FRACTION"
OLDER_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # jaxlib refuses both


class MemoryShare(NamedTuple):
    """The share that programs get, and what states it."""

    fraction: float
    source: str


def memory_share(config: Config, *, here: bool) -> MemoryShare:
    """Return the share of a GPU's memory for programs; here: the environment may state it.

    >>> memory_share(Config(), here=False)
    MemoryShare(fraction=0.75, source="run.memory_fraction=null, JAX's default")
    """
    asked = config.run.memory_fraction
    if asked is not None:
        return MemoryShare(asked, f"run.memory_fraction={asked:g}")
    for name in (VARIABLE, OLDER_VARIABLE) if here else ():
        if text := os.environ.get(name):
            return MemoryShare(float(text), f"{name}={text}")
    return MemoryShare(JAX_MEMORY_FRACTION, "run.memory_fraction=null, JAX's default")


def set_memory_fraction(fraction: float | None) -> None:
    """Let JAX take this share when it starts; None: that of the environment, or its default."""
    if fraction is not None:
        os.environ.pop(OLDER_VARIABLE, None)
        os.environ[VARIABLE] = str(fraction)


def check_memory_fraction(config: Config, device: Any, *, only_planned: bool) -> None:
    """Raise ConfigError for run.memory_fraction where the devices are no GPUs.

    device: an attached one; only_planned: hardware= or plan.topology may name another.
    """
    asked, topology, planned = config.run.memory_fraction, config.plan.topology, None
    if asked is None:
        return
    if topology is not None:
        planned = of_topology(config.hardware, topology)
    elif only_planned:
        planned = described_only(config.hardware, device.device_kind)
    if is_gpu(device) if planned is None else planned.cuda is not None:
        return
    devices = device.device_kind if planned is None else f"hardware={planned.name}"
    raise ConfigError(
        f"run.memory_fraction={asked} is of GPUs, but the devices are {devices}. Leave it out."
    )


def is_gpu(device: Any) -> bool:
    return device.platform in ("gpu", "cuda")
