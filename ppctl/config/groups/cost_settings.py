"""The times that `ppctl schedule` assumes, for it knows no model."""

from dataclasses import dataclass

from ppctl.config.field_checks import NotNegative, Settings
from ppctl.errors import ConfigError

TIMES = ("forward_s", "input_grad_s", "weight_grad_s")


@dataclass
class Costs(Settings):
    """Seconds of one microbatch through 1/p of the model, and its memory, as `ppctl schedule`
    assumes them. A chunk costs 1/V of it.
    """

    forward_s: NotNegative = 1.0  # F
    input_grad_s: NotNegative = 1.0  # I; a full backward B is I and W
    weight_grad_s: NotNegative = 1.0  # W
    transfer_s: NotNegative = 0.0  # one activation or gradient from a rank to the next
    activation_gib: NotNegative = 0.0  # residuals of a forward through 1/p of the layers
    fixed_gib: NotNegative = 0.0  # parameters, optimizer and gradient sums of 1/p of the layers

    KEY = "costs"

    def check(self) -> None:
        super().check()
        if not any(getattr(self, key) for key in TIMES):
            times = "=".join(f"costs.{key}" for key in TIMES)
            raise ConfigError(f"{times}=0: give one of them a time.")
