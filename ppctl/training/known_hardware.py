"""The hardware of a config: descriptions in `conf/hardware/`, and links as `ppctl doctor` measured them."""

from __future__ import annotations

import copy
import json
import math
import os
import typing
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ppctl.config.files import ROOT
from ppctl.config.hardware import AutoHardware, Cuda, Hardware
from ppctl.errors import ConfigError
from ppctl.executors.topology import GpuTarget

NOMINAL = "host"  # its numbers are of no machine in particular


def known() -> dict[str, Hardware]:
    """Return the hardware that ppctl describes, by name.

    >>> known()["h100"].peak_flops["bfloat16"]
    989400000000000.0
    """
    return copy.deepcopy(_known())  # whoever changes a description changes his own


@cache
def _known() -> dict[str, Hardware]:
    return {file.stem: _read(file) for file in sorted((ROOT / "conf/hardware").glob("*.yaml")) if file.stem != "auto"}


def _read(file: Path) -> Hardware:
    """A description in a file of ppctl's own, which Hydra reads likewise."""
    values: dict[str, Any] = yaml.safe_load(file.read_text())
    hints = typing.get_type_hints(Hardware)
    found: dict[str, Any] = {}
    for field in fields(Hardware):
        if field.name not in values:
            continue
        value = values[field.name]
        if hints[field.name] in (float, float | None):
            value = float(value)  # to YAML 1.1, 1e12 is text
        elif field.name == "peak_flops":
            value = {dtype: float(flops) for dtype, flops in value.items()}
        elif field.name == "cuda":
            value = Cuda(**value)
        found[field.name] = value
    return Hardware(**found)


def of_device(device_kind: str) -> Hardware | None:
    """Return the hardware whose devices name themselves so, or None.

    >>> of_device("TPU v5 lite").name, of_device("Quadro")
    ('v5e', None)
    """
    return next((hardware for hardware in known().values() if device_kind in hardware.device_kinds), None)


def resolved(request: Hardware | AutoHardware, device_kind: str, topology: str | None = None) -> Hardware:
    """Return the hardware of a request; for `auto` that of plan.topology ("v5e:4x4"), else that of the devices present.

    ConfigError where nothing is known of them, or where the topology is of other hardware than the request.
    """
    there = of_device(device_kind) if topology is None else of_topology(request, topology)
    if isinstance(request, Hardware):
        if topology is not None and (there is None or not set(request.device_kinds) & set(there.device_kinds)):
            raise ConfigError(
                f"hardware={request.name} is not what plan.topology={topology} names. Use hardware=auto, or another "
                "topology."
            )
        return request
    if there is None:
        which = device_kind if topology is None else f"plan.topology={topology}"
        raise ConfigError(
            f"hardware=auto: nothing is known of {which}. Use "
            f"hardware=NAME ({', '.join(known())}), or describe it: DIR/hardware/NAME.yaml and --config-dir DIR."
        )
    return there


def described_only(request: Hardware | AutoHardware, device_kind: str) -> Hardware | None:
    """Return the hardware that a request names where the devices here are others; None where it is what is here.

    >>> described_only(known()["h100"], "cpu").name, described_only(known()["host"], "cpu")
    ('h100', None)
    """
    if isinstance(request, AutoHardware) or device_kind in request.device_kinds:
        return None
    return request


def of_topology(request: Hardware | AutoHardware, topology: str) -> Hardware | None:
    """Return the hardware that plan.topology names, None where nothing is known of it (libtpu knows TPUs by itself)."""
    chip = topology.partition(":")[0]
    return request if isinstance(request, Hardware) and request.name == chip else known().get(chip)


def host_devices(hardware: Hardware, topology: str | None) -> int | None:
    """Return the devices of a host: of GPUs those that plan.topology says, else those of the hardware; None: all.

    >>> host_devices(known()["h100"], "h100:4x2"), host_devices(known()["h100"], None)
    (2, 8)
    """
    if topology is None or hardware.cuda is None:
        return hardware.host_devices
    return int(topology.rpartition("x")[2])


def gpu_target(hardware: Hardware | None) -> GpuTarget | None:
    """Return what XLA's compiler for GPUs has to know of this hardware; None where it is no NVIDIA GPU."""
    if hardware is None or hardware.cuda is None:
        return None
    return GpuTarget(hardware.name, hardware.device_kinds[0], hardware.memory_bytes_per_s, **vars(hardware.cuda))


@dataclass(frozen=True)
class DescribedDevice:
    """A device that need not be here, as far as kernels are chosen by it; named as jax.Device names it."""

    platform: str
    device_kind: str
    compute_capability: str | None = None


def described_device(hardware: Hardware) -> DescribedDevice | None:
    """Return a device of this hardware, None where it is neither an NVIDIA GPU nor a TPU.

    >>> described_device(known()["h100"]).compute_capability, described_device(known()["host"])
    ('9.0', None)
    """
    kind = hardware.device_kinds[0] if hardware.device_kinds else ""
    if hardware.cuda is not None:
        return DescribedDevice("gpu", kind, hardware.cuda.capability)
    return DescribedDevice("tpu", kind) if kind.startswith("TPU") else None


def gpu_names() -> list[str]:
    """Return the names of the hardware that a topology of GPUs may have."""
    return [name for name, hardware in known().items() if hardware.cuda is not None]


def peak_flops(hardware: Hardware, dtype: str) -> float | None:
    """Return the peak dense FLOP/s of one device with this dtype of compute, or None where it is not known.

    >>> peak_flops(known()["h200"], "bfloat16"), peak_flops(known()["h200"], "float64")
    (989400000000000.0, None)
    """
    return hardware.peak_flops.get(dtype)


def mfu_peak_flops(request: Hardware | AutoHardware, device_kind: str, dtype: str) -> float | None:
    """Return the peak that a measured speed may be compared to; None for unknown devices and nominal peaks (CPUs).

    >>> mfu_peak_flops(AutoHardware(), "TPU v4", "float32")
    275000000000000.0
    >>> mfu_peak_flops(AutoHardware(), "cpu", "float32")
    """
    hardware = request if isinstance(request, Hardware) else of_device(device_kind)
    if hardware is None:
        return None
    peak = peak_flops(hardware, dtype)
    is_nominal = hardware.name == NOMINAL and peak == peak_flops(known()[NOMINAL], dtype)
    return None if is_nominal else peak


def links_of(path: str | Path) -> tuple[float, float]:
    """Return (seconds of latency, bytes/s) of the links that `ppctl doctor --json` measured and wrote to a file.

    ConfigError where the file cannot be read or states none.
    """
    where = f"costs.doctor={path}"
    remedy = f"Write it: ppctl doctor mesh=1x2 --json > {path}"
    try:
        document = json.loads(Path(path).expanduser().read_text())
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}. {remedy}") from error
    except (ValueError, RecursionError) as error:  # of text and of JSON
        raise ConfigError(f"{where} is not JSON. {remedy}") from error
    match document:
        case {
            "costs": {"transfer_s": int() | float() as latency_s, "transfer_bytes_per_s": int() | float() as speed}
        } if 0 <= latency_s < math.inf and 0 < speed < math.inf:
            return float(latency_s), float(speed)
        case {"costs": None}:
            raise ConfigError(f"{where} has no link between pipeline ranks: it is of mesh.pp=1. {remedy}")
    raise ConfigError(
        f"{where} is not what `ppctl doctor --json` writes: it has no costs.transfer_s of at least 0 with "
        f"costs.transfer_bytes_per_s above 0. {remedy}"
    )


def stated_bytes(device: Any) -> int | None:
    """Return the memory that a device here states, of a simulated one all of the machine's; None if it states none."""
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (device.memory_stats() or {}).get("bytes_limit")
