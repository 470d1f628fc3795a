"""The settings of `ppctl verify`."""

from __future__ import annotations

from dataclasses import dataclass

from ppctl.config.checks import at_least


@dataclass
class Verify:
    """The train steps that `ppctl verify` compares after the gradients of the first batch."""

    steps: int = 3  # full train steps, by the engine of `ppctl train` and by optax alone; 0: gradients alone

    def check(self) -> None:
        at_least("verify.steps", self.steps, 0)
