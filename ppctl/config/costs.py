"""Where the seconds of tasks and transfers come from: assumed, from FLOPs and bytes, or measured."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ppctl.config.checks import at_least
from ppctl.errors import ConfigError


@dataclass
class Costs:
    """Seconds of one microbatch through 1/p of the model, as `ppctl schedule` assumes them. A chunk costs 1/V of it."""

    name: str = "unit"
    forward_s: float = 1.0  # F
    input_grad_s: float = 1.0  # I; a full backward B is I and W
    weight_grad_s: float = 1.0  # W
    transfer_s: float = 0.0  # one activation or gradient from a rank to the next
    logits_s: float = 0.25  # S, of a rank's part of the vocabulary (schedule.vocab=parallel)
    logits_grad_s: float = 0.5  # T likewise
    embedding_s: float = 0.0  # E likewise
    embedding_grad_s: float = 0.0  # G likewise

    def check(self) -> None:
        for field in fields(self):
            if field.name != "name":
                at_least(f"costs.{field.name}", getattr(self, field.name), 0)
        if self.forward_s + self.input_grad_s + self.weight_grad_s == 0:
            raise ConfigError("costs.forward_s=costs.input_grad_s=costs.weight_grad_s=0: give one of them a time.")


@dataclass
class Analytic:
    """Seconds from the FLOPs and bytes of tasks and the speeds of `hardware`."""

    name: str = "analytic"
    doctor: str | None = None  # file of `ppctl doctor --json`, for links as measured; None: those of hardware

    def check(self) -> None:
        """Check nothing here: `ppctl.training.known_hardware.links_of` reads the file."""


@dataclass
class Measure(Analytic):
    """Seconds of tasks as measured on a device that is here; links as in costs=analytic."""

    name: str = "measure"
    cache_dir: str | None = None  # where measurements are kept; None: ~/.cache/ppctl, or XDG_CACHE_HOME's
