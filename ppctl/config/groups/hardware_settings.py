"""Speeds and memory of accelerators, and of their links. The numbers are in `conf/hardware/`."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from ppctl.config import field_checks as checks
from ppctl.config.field_checks import Count, NotNegative, Positive, Settings
from ppctl.errors import ConfigError

REACHED = (
    "flops",  # share of peak_flops in large matrix products
    "bytes",  # share of memory_bytes_per_s in element-wise operations; default 1
    "attention_forward",  # share of peak_flops, all pairs of tokens counted; default: as flops
    "attention_backward",  # share of peak_flops, likewise
    "fp8",  # share of peak_flops.fp8 in large matrix products; default: as flops
    "experts",  # share of peak_flops in grouped products of experts; default: as flops
)


@dataclass(frozen=True)
class Network:
    """The network that joins hosts."""

    host_devices: Count  # devices of a host, joined by links
    bytes_per_s: Positive  # bandwidth one way, from a device to one on another host
    latency_s: NotNegative  # seconds per message to another host


# (float32 lanes, bytes of shared memory) of a multiprocessor, by compute capability: CUDA C++
# Programming Guide
PER_CORE = {
    "8.0": (64, 167936),
    "8.6": (128, 102400),
    "8.9": (128, 102400),
    "9.0": (128, 233472),
    "10.0": (128, 233472),
    "12.0": (128, 102400),
}


@dataclass(frozen=True)
class Cuda:
    """Properties of an NVIDIA GPU that XLA's compiler needs for plan.topology."""

    capability: Annotated[str, checks.one_of(*PER_CORE)]  # compute capability
    cores: Count  # streaming multiprocessors
    clock_ghz: Positive
    memory_bytes: Annotated[int, checks.above_zero]  # bytes of memory as CUDA states them
    l2_bytes: Count


@dataclass
class AutoHardware(Settings, prefix="hardware"):
    """The hardware of the attached devices, or of plan.topology."""

    name: str = "auto"
    # names of the hardware of each pipeline rank, if they differ: [h100, h100, a100, a100]
    ranks: list[str] = field(default_factory=list[str])


@dataclass
class Hardware(Settings, prefix="hardware"):
    """Speeds and memory of one device (as JAX counts devices), and of its links to others."""

    name: str
    device_kinds: list[str]  # values of jax.Device.device_kind
    # dense FLOP/s by dtype of compute; fp8: of products of 8-bit floats, if the device has them
    peak_flops: dict[str, Positive]
    reached: dict[str, Positive]  # shares of the peaks, 0..1, see REACHED
    memory_bytes_per_s: Positive  # bandwidth of the device memory
    link_bytes_per_s: Positive  # bandwidth one way, to a neighbour (NVLink, ICI)
    link_latency_s: NotNegative  # seconds per message to a neighbour
    task_s: NotNegative  # seconds to start a task or a tick, without its work
    memory_gib: Positive | None = None  # GiB available to programs; None: a share of the machine's
    # network of hosts: {host_devices: 8, bytes_per_s: 50e9, latency_s: 2e-5};
    # None: links join all devices
    network: Any = None
    # properties of NVIDIA GPUs, for their compiler and for tiles of matrix products;
    # example: conf/hardware/h100
    cuda: Any = None
    power_w: Positive | None = None  # maximum watts of one device, by its maker; None: unknown

    @property
    def hosts(self) -> Network | None:
        """The values in `network`. ConfigError if one is missing or unknown."""
        value = self.network
        return None if value is None else checks.settings_from(Network, value, "hardware.network")

    @property
    def host_devices(self) -> int | None:
        """The number of devices per host; None: links join all devices."""
        return None if self.hosts is None else self.hosts.host_devices

    @property
    def gpu(self) -> Cuda | None:
        """The properties in `cuda`. ConfigError if one is missing or unknown."""
        return None if self.cuda is None else checks.settings_from(Cuda, self.cuda, "hardware.cuda")

    def check(self) -> None:
        super().check()
        if not self.peak_flops:
            raise ConfigError("hardware.peak_flops={} has no dtype. Give it one: {bfloat16: 1e14}.")
        if "flops" not in self.reached:
            missing = f"hardware.reached={self.reached} has no flops"
            raise ConfigError(f"{missing}, the share that matrix products reach.")
        for key, share in self.reached.items():
            checks.choice("hardware.reached", key, REACHED)
            # attention may exceed 1: its FLOPs count all pairs, but kernels may skip half of them
            if share > 1 and not key.startswith("attention"):
                raise ConfigError(f"hardware.reached.{key}={share} must lie in (0, 1].")
        if self.hosts is not None:
            checks.domains("hardware.network", self.hosts)
        if self.gpu is not None:
            checks.domains("hardware.cuda", self.gpu)
