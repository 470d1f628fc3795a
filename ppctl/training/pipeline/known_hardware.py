"""The hardware of a config, described in `conf/hardware/`."""

import copy
import os
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import yaml

from ppctl.config.config_dirs import ROOT
from ppctl.config.field_checks import settings_from
from ppctl.config.groups.hardware_settings import PER_CORE, AutoHardware, Hardware
from ppctl.errors import ConfigError
from ppctl.executors.described_devices import GpuTarget

Request = Hardware | AutoHardware  # hardware=NAME or auto
NOMINAL = "host"  # hardware with nominal numbers, not those of a real machine


def known() -> dict[str, Hardware]:
    """Return the described hardware by name, a copy.

    >>> known()["h100"].peak_flops["bfloat16"]
    989400000000000.0
    """
    return copy.deepcopy(_known())  # a caller may change its copy


@cache
def _known() -> dict[str, Hardware]:
    files = sorted((ROOT / "conf/hardware").glob("*.yaml"))
    values = {file.stem: yaml.safe_load(file.read_text()) for file in files if file.stem != "auto"}
    for of_one in values.values():
        del of_one["defaults"]
    return {name: settings_from(Hardware, of_one, "hardware") for name, of_one in values.items()}


def of_device(device_kind: str) -> Hardware | None:
    """Return the hardware with this device_kind; None if unknown.

    >>> of_device("TPU v5 lite").name, of_device("Quadro")
    ('v5e', None)
    """
    return next((each for each in known().values() if device_kind in each.device_kinds), None)


def of_rank(request: Request, rank: int) -> Request:
    """Return the hardware requested for a pipeline rank. ConfigError for an unknown name."""
    if not isinstance(request, AutoHardware) or not request.ranks:
        return request
    name = request.ranks[rank]
    if name not in known():
        what = f"hardware.ranks has {name}, which is not described"
        raise ConfigError(f"{what}. Use one of {', '.join(known())}.")
    return known()[name]


def resolved(request: Request, device_kind: str, topology: str | None = None) -> Hardware:
    """Return the requested hardware; for `auto` that of plan.topology, else of the devices.

    topology: plan.topology, such as "v5e:4x4". ConfigError if the hardware is unknown, or differs
    from that of the topology.
    """
    there = of_device(device_kind) if topology is None else of_topology(request, topology)
    if isinstance(request, Hardware):
        is_other = there is None or not set(request.device_kinds) & set(there.device_kinds)
        if topology is not None and is_other:
            what = f"hardware={request.name} is not that of plan.topology={topology}"
            raise ConfigError(f"{what}. Use hardware=auto, or another topology.")
        return request
    if there is None:
        which = device_kind if topology is None else f"plan.topology={topology}"
        raise ConfigError(
            f"hardware=auto: no description of {which}. Use hardware=NAME "
            f"({', '.join(known())}), or describe it: DIR/hardware/NAME.yaml and --config-dir "
            "DIR."
        )
    return there


def described_only(request: Request, device_kind: str) -> Hardware | None:
    """Return the requested hardware; None for auto, or if attached devices are of this hardware.

    >>> described_only(known()["h100"], "cpu").name, described_only(known()["host"], "cpu")
    ('h100', None)
    """
    if isinstance(request, AutoHardware) or device_kind in request.device_kinds:
        return None
    return request


def planned_for(request: Request, device_kind: str, topology: str | None) -> Hardware | None:
    """Return the hardware that a plan describes; None if it is for the attached devices."""
    if topology is not None:
        return of_topology(request, topology)
    return described_only(request, device_kind)


def default_dtype(request: Request, device: Any, topology: str | None = None) -> str:
    """Return the default compute dtype: bfloat16 on accelerators, else float32.

    The devices may be only described. Hardware without a bfloat16 peak computes in float32.

    >>> from types import SimpleNamespace
    >>> cpu = SimpleNamespace(platform="cpu", device_kind="cpu")
    >>> default_dtype(AutoHardware(), cpu), default_dtype(known()["h100"], cpu)
    ('float32', 'bfloat16')
    """
    there = planned_for(request, device.device_kind, topology)
    is_fast = topology is not None or device.platform != "cpu"
    if there is not None:
        is_fast = there.name != NOMINAL and "bfloat16" in there.peak_flops
    return "bfloat16" if is_fast else "float32"


def of_topology(request: Request, topology: str) -> Hardware | None:
    """Return the hardware of plan.topology; None if unknown, such as a TPU only libtpu knows."""
    chip = topology.partition(":")[0]
    return request if isinstance(request, Hardware) and request.name == chip else known().get(chip)


def host_devices(hardware: Hardware, topology: str | None) -> int | None:
    """Return the devices per host, or None if one host has all devices.

    topology: plan.topology, which gives the number for GPUs; None: that of the hardware.

    >>> host_devices(known()["h100"], "h100:4x2"), host_devices(known()["h100"], None)
    (2, 8)
    """
    if topology is None or hardware.cuda is None:
        return hardware.host_devices
    return int(topology.rpartition("x")[2])


def gpu_target(hardware: Hardware | None) -> GpuTarget | None:
    """Return the GPU description for XLA's NVIDIA compiler; None for other hardware."""
    if hardware is None or hardware.gpu is None:
        return None
    facts = hardware.name, hardware.device_kinds[0], hardware.memory_bytes_per_s
    lanes, shared_bytes = PER_CORE[hardware.gpu.capability]
    return GpuTarget(
        *facts, **asdict(hardware.gpu), fp32_per_core=lanes, shared_bytes_per_core=shared_bytes
    )


@dataclass(frozen=True)
class DescribedDevice:
    """Stand-in for a jax.Device that is not attached: its attributes that select kernels."""

    platform: str
    device_kind: str
    compute_capability: str | None = None


def described_device(hardware: Hardware) -> DescribedDevice | None:
    """Return a stand-in for a device of this hardware; None unless an NVIDIA GPU or a TPU.

    >>> described_device(known()["h100"]).compute_capability, described_device(known()["host"])
    ('9.0', None)
    """
    kind = hardware.device_kinds[0] if hardware.device_kinds else ""
    if hardware.gpu is not None:
        return DescribedDevice("gpu", kind, hardware.gpu.capability)
    return DescribedDevice("tpu", kind) if kind.startswith("TPU") else None


def gpu_names() -> list[str]:
    """Return the names of hardware allowed in a topology of GPUs."""
    return [name for name, hardware in known().items() if hardware.cuda is not None]


def stated_bytes(device: Any) -> int | None:
    """Return a device's memory in bytes, None if unknown; for a CPU device the machine's memory."""
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (device.memory_stats() or {}).get("bytes_limit")
