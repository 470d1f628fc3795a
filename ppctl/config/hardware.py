"""Speeds and memory of accelerators, and of the links between them. The numbers stand in `conf/hardware/`."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from ppctl.config.checks import above_zero, at_least
from ppctl.errors import ConfigError

CAPABILITY = re.compile(r"\d+\.\d")
ABOVE_ZERO = (
    "flops_fraction",
    "attention_forward_fraction",
    "attention_backward_fraction",
    "bandwidth_fraction",
    "memory_bytes_per_s",
    "link_bytes_per_s",
    "memory_gib",
    "network_bytes_per_s",
    "power_w",
)


@dataclass
class AutoHardware:
    """The hardware that the devices say they are, or that plan.topology names."""

    name: str = "auto"

    def check(self) -> None:
        """Check nothing: there is no setting."""


@dataclass
class Cuda:
    """Properties of an NVIDIA GPU that is not here, as XLA's compiler needs them for plan.topology."""

    capability: str  # compute capability, such as "9.0"
    cores: int  # streaming multiprocessors
    fp32_per_core: int  # float32 lanes
    clock_ghz: float
    memory_bytes: int  # as CUDA states it
    l2_bytes: int
    shared_bytes_per_core: int  # shared memory

    def check(self) -> None:
        if CAPABILITY.fullmatch(self.capability) is None:
            raise ConfigError(f"hardware.cuda.capability={self.capability!r} is not a compute capability, such as 9.0.")
        for field in fields(self):
            if field.name != "capability":
                above_zero(f"hardware.cuda.{field.name}", getattr(self, field.name))


@dataclass
class Hardware:
    """Speeds and memory of one device (as JAX counts devices), and of its links to others."""

    name: str
    device_kinds: list[str]  # as jax.Device.device_kind names it
    peak_flops: dict[str, float]  # dense FLOP/s by dtype of compute
    flops_fraction: float  # 0..1: share of the peak that large matrix products reach
    memory_bytes_per_s: float  # of the device's own memory
    link_bytes_per_s: float  # one way, from a device to its neighbour (NVLink, ICI)
    link_latency_s: float  # of a message to a neighbour
    task_s: float  # to start a task or a tick, its work not included
    memory_gib: float | None = None  # that programs can use; None: a share of the machine's
    host_devices: int | None = None  # devices of a host joined by links; None: links join all of them
    network_bytes_per_s: float | None = None  # one way, of a device to one of another host
    network_latency_s: float | None = None  # of a message to another host
    cuda: Cuda | None = None  # of NVIDIA GPUs: for their compiler, and the tiles of matrix products
    attention_forward_fraction: float | None = None  # as flops_fraction, of kernels, all pairs of tokens counted
    attention_backward_fraction: float | None = None  # likewise; null: as matrix products
    power_w: float | None = None  # of one device at most, as its maker states it; None: not known
    bandwidth_fraction: float = 1.0  # 0..1: share of memory_bytes_per_s that element-wise operations reach

    @property
    def adds_products(self) -> bool:
        """Whether matrix products add to sums of gradients themselves, as cuBLAS's do."""
        return self.cuda is not None

    def check(self) -> None:
        for key in ABOVE_ZERO:
            above_zero(f"hardware.{key}", getattr(self, key))
        for dtype, flops in self.peak_flops.items():
            above_zero(f"hardware.peak_flops.{dtype}", flops)
        if not self.peak_flops:
            raise ConfigError("hardware.peak_flops={} has no dtype. Give it one: {bfloat16: 1e14}.")
        for key in ("flops_fraction", "bandwidth_fraction"):  # kernels of attention may skip half of what is counted
            if getattr(self, key) > 1:
                raise ConfigError(f"hardware.{key}={getattr(self, key)} must lie in (0, 1].")
        for key in ("link_latency_s", "task_s", "network_latency_s"):
            at_least(f"hardware.{key}", getattr(self, key), 0)
        at_least("hardware.host_devices", self.host_devices, 1)
        if self.cuda is not None:
            self.cuda.check()
        of_hosts = ("host_devices", "network_bytes_per_s", "network_latency_s")
        given = [key for key in of_hosts if getattr(self, key) is not None]
        if 0 < len(given) < len(of_hosts):
            listed = " ".join(f"hardware.{key}={getattr(self, key)}" for key in given)
            missing = " and ".join(f"hardware.{key}" for key in of_hosts if key not in given)
            raise ConfigError(f"{listed} needs {missing} too: all three say how hosts are joined, or all are null.")
