"""The target devices of a plan: their speeds and links, and the memory that programs can use."""

import os
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ppctl.config import DTYPES, AutoHardware, Hardware, Plan
from ppctl.errors import ConfigError
from ppctl.executors.work.planned_step import Machine
from ppctl.executors.work.roofline import Link, Speed
from ppctl.reports.terminal_output import size_text
from ppctl.training.pipeline import known_hardware
from ppctl.training.pipeline.jax_start import JAX_MEMORY_FRACTION, is_gpu, memory_share
from ppctl.training.pipeline.mfu import mfu_peak_flops

GIB = 2**30


class DeviceLimit(NamedTuple):
    """The bytes of a device that programs can use, and the source of this number."""

    size_bytes: int
    source: str
    fraction: float | None = None  # share of a GPU's memory, 0..1; None: no GPU, or plan.memory_gib


@dataclass(frozen=True)
class Target:
    """The devices of a request: described by hardware= or plan.topology, else attached ones."""

    request: Hardware | AutoHardware
    device: Any  # attached device
    number: int
    dtype: str  # compute dtype
    plan: Plan = field(default_factory=Plan)  # topology, memory of a device, compilation
    order: str = "auto"  # mesh.order
    xla_flags: str = "auto"
    memory_fraction: float | None = None  # share of a GPU's memory: run.memory_fraction

    @property
    def kind(self) -> str:
        return self.device.device_kind

    @cached_property
    def hardware(self) -> Hardware:
        """Return the hardware description of the devices. ConfigError if they are unknown."""
        return known_hardware.resolved(self.request, self.kind, self.plan.topology)

    @property
    def known_hardware(self) -> Hardware | None:
        try:
            return self.hardware
        except ConfigError:
            return None

    @property
    def is_away(self) -> bool:
        """Return whether hardware= describes devices that differ from the attached ones."""
        return known_hardware.described_only(self.request, self.kind) is not None

    @property
    def adds_products(self) -> bool:
        """Return whether matrix products can add their results to gradient sums, as cuBLAS's do."""
        return self.known_hardware is not None and self.known_hardware.cuda is not None

    @property
    def peak_flops(self) -> float | None:
        """Return the peak FLOP/s of all devices together, the denominator of MFU; None: unknown."""
        peak = mfu_peak_flops(self.known_hardware or self.request, "", self.dtype)
        return None if peak is None else peak * self.number

    @property
    def unknown(self) -> str | None:
        """Return why speeds are unknown; None: known. ConfigError if hardware= lacks a speed."""
        try:
            _ = self.machine
        except ConfigError as error:
            if isinstance(self.request, Hardware):
                raise
            return str(error)
        return None

    @property
    def machine(self) -> Machine:
        """Return the speeds and links of the devices. ConfigError if they are unknown."""
        hardware = self.hardware
        peak = hardware.peak_flops.get(self.dtype)
        if peak is None:
            name = f"hardware={hardware.name}"
            dtypes = "|".join(dtype for dtype in hardware.peak_flops if dtype in DTYPES)
            raise ConfigError(
                f"{name} states no peak for {self.dtype}. Add it by {name} "
                f"+hardware.peak_flops.{self.dtype}=FLOP/S, or use run.dtype={dtypes}."
            )
        hosts, is_nominal = hardware.hosts, hardware.name == known_hardware.NOMINAL
        return Machine(
            speed_of(hardware, peak),
            Link(hardware.link_latency_s, hardware.link_bytes_per_s),
            None if hosts is None else Link(hosts.latency_s, hosts.bytes_per_s),
            known_hardware.host_devices(hardware, self.plan.topology),
            hardware.task_s,
            cores=os.cpu_count() if is_nominal else None,
            order=self.order,
            # compilers overlap gathers with other work, except on GPUs with executor.xla_flags=none
            gathers_ahead=not is_nominal and (hardware.cuda is None or self.xla_flags != "none"),
        )

    @property
    def limit(self) -> DeviceLimit | None:
        """Return the usable memory of a device, requested, described or reported; None: unknown."""
        # 1. the limit of the request, or of described hardware
        if (gib := self.plan.memory_gib) is not None:
            return DeviceLimit(round(gib * GIB), f"plan.memory_gib={gib:g}")
        if isinstance(self.request, Hardware):
            described = self._limit_of(self.request, here=not self.is_away)
            if described is not None:
                return described
        if self.plan.topology is not None:
            there = known_hardware.of_topology(self.request, self.plan.topology)
            if there is None or (there.cuda is None and self.plan.compiles):
                return None  # limit checked by the compiler for TPUs
            return self._limit_of(there, here=False)
        device = self.device
        stated = None if self.is_away else known_hardware.stated_bytes(device)
        if stated is None:
            return None

        # 2. the limit of an attached device
        if is_gpu(device):
            return self._limit_of_gpu(stated, self.kind, here=True)
        if device.platform != "cpu":
            return DeviceLimit(stated, f"stated by {self.kind}")
        shared = "" if self.number == 1 else f", shared by {self.number} simulated devices"
        return DeviceLimit(stated // self.number, f"this machine's memory{shared}")

    def _limit_of(self, hardware: Hardware, *, here: bool) -> DeviceLimit | None:
        """Return the memory of described hardware (of a GPU: what JAX reserves); None: unknown."""
        if hardware.memory_gib is None:
            return None
        name, gib = f"hardware={hardware.name}", hardware.memory_gib
        if hardware.cuda is None:
            return DeviceLimit(round(gib * GIB), name)
        share = memory_share(self.memory_fraction, here=here)
        # memory_gib of a GPU is the part that JAX reserves by default
        size_bytes = round(gib * share.fraction / JAX_MEMORY_FRACTION * GIB)
        return self._limit_of_gpu(size_bytes, name, here=here)

    def _limit_of_gpu(self, size_bytes: int, name: str, *, here: bool) -> DeviceLimit:
        """Return a limit of size_bytes, with the share of the GPU's memory in its source."""
        share = memory_share(self.memory_fraction, here=here)
        whole = size_text(round(size_bytes / share.fraction))
        source = f"{share.fraction * 100:g}% of the {whole} of {name}: {share.source}"
        return DeviceLimit(size_bytes, source, share.fraction)


def speed_of(hardware: Hardware, peak_flops_per_s: float) -> Speed:
    """Return the speed of a device, given its peak in the compute dtype."""
    reached, kernels = hardware.reached, ("attention_forward", "attention_backward", "experts")
    of_fp8 = reached.get("fp8", reached["flops"])
    return Speed(
        peak_flops_per_s * reached["flops"],
        hardware.memory_bytes_per_s * reached.get("bytes", 1.0),
        *(peak_flops_per_s * reached[name] if name in reached else None for name in kernels),
        fp8=hardware.peak_flops["fp8"] * of_fp8 if "fp8" in hardware.peak_flops else None,
        cores=None if hardware.gpu is None else hardware.gpu.cores,
    )
