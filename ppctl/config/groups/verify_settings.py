"""The settings of `ppctl verify`."""

from __future__ import annotations

from dataclasses import dataclass

from ppctl.config.field_checks import at_least


@dataclass
class Verify:
    """The train steps that `ppctl verify` compares after the gradients of the first batch."""

    steps: int = 3  # train steps to compare with plain optax; 0: only gradients

    def check(self) -> None:
        at_least("verify.steps", self.steps, 0)
