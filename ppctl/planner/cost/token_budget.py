"""The cost of training on a number of tokens: steps, days, device-hours, energy."""

import math
from dataclasses import dataclass

from ppctl.config import Hardware
from ppctl.errors import ConfigError
from ppctl.training.pipeline.known_hardware import described_device

HOUR_S = 3600


@dataclass(frozen=True)
class TokenBudget:
    """The cost of training steps over a number of tokens."""

    tokens: float
    num_steps: int
    days: float
    device_hours: float
    devices: str  # name of a device: GPU | chip | device
    power_w: float | None  # maximum watts of a device, without host and cooling; None: unknown
    energy_kwh: float | None  # energy of all devices at that power

    @property
    def text(self) -> str:
        """Return the budget as text: time, steps, device-hours, and energy if power is known."""
        tokens = f"{self.tokens:.6g}".replace("e+0", "e").replace("e+", "e")
        time = f"{self.days:,.1f} days" if self.days >= 2 else f"{self.days * 24:,.3g} hours"
        words = [f"{self.num_steps:,} steps", f"{self.device_hours:,.0f} {self.devices}-hours"]
        if (kwh := self.energy_kwh) is not None:
            energy = f"{kwh / 1000:,.1f} MWh" if kwh >= 1000 else f"{kwh:,.3g} kWh"
            power = f"{self.power_w:,.0f} W a {self.devices}, without hosts and cooling"
            words.append(f"{energy} at {power}")
        not_counted = "evaluations, checkpoints and restarts not counted"
        return f"{tokens} in {time}: {', '.join(words)} ({not_counted})"


def check_tokens(key: str, tokens: float | None, step_tokens: int | None) -> None:
    """Raise ConfigError if tokens are set and the data are not text (step_tokens is None)."""
    if tokens is not None and step_tokens is None:
        raise ConfigError(
            f"{key}={tokens:g} counts tokens of text, but the data are not text. Leave it out."
        )


def token_budget(
    tokens: float | None,
    step_tokens: int | None,
    step_s: float | None,
    num_devices: int,
    hardware: Hardware | None,
) -> TokenBudget | None:
    """Return the cost of `tokens` tokens; None if unset, or if the step time is unknown.

    >>> token_budget(1e9, 1_000_000, 3.6, 8, None).device_hours
    8.0
    """
    if tokens is None or step_tokens is None or step_s is None:
        return None
    num_steps = math.ceil(tokens / step_tokens)
    hours = num_steps * step_s / HOUR_S
    power_w = None if hardware is None else hardware.power_w
    energy_kwh = None if power_w is None else power_w * num_devices * hours / 1000
    device = None if hardware is None else described_device(hardware)
    name = "device" if device is None else "GPU" if device.platform == "gpu" else "chip"
    hours_of_all = num_devices * hours
    return TokenBudget(tokens, num_steps, hours / 24, hours_of_all, name, power_w, energy_kwh)
