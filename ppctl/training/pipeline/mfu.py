"""Model FLOPs utilization (MFU): FLOPs of the model over those of the devices' peak."""

from ppctl.config import AutoHardware, Hardware
from ppctl.training.pipeline.known_hardware import NOMINAL, known, of_device


def mfu_peak_flops(request: Hardware | AutoHardware, device_kind: str, dtype: str) -> float | None:
    """Return the peak that MFU is relative to; None for unknown devices and nominal peaks (CPUs).

    >>> mfu_peak_flops(AutoHardware(), "TPU v4", "float32")
    275000000000000.0
    >>> mfu_peak_flops(AutoHardware(), "cpu", "float32")
    """
    hardware = request if isinstance(request, Hardware) else of_device(device_kind)
    if hardware is None:
        return None
    peak = hardware.peak_flops.get(dtype)
    is_nominal = hardware.name == NOMINAL and peak == known()[NOMINAL].peak_flops.get(dtype)
    return None if is_nominal else peak


def mfu(step_flops: float, step_s: float | None, peak_flops_per_s: float | None) -> float | None:
    """Return a step's model FLOPs over the peak's in its time, 0..1; None if one is unknown.

    >>> mfu(3e12, 2.0, 4e12)
    0.375
    """
    if step_s is None or peak_flops_per_s is None:
        return None
    return step_flops / (step_s * peak_flops_per_s)
