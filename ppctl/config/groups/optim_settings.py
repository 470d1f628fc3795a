"""The optimizers, and their learning rate over the steps of a run."""

from dataclasses import dataclass, fields
from typing import Annotated

from ppctl.config.field_checks import (
    Count,
    Natural,
    NotNegative,
    Positive,
    Rate,
    Settings,
    Share,
    one_of,
)
from ppctl.errors import ConfigError

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass
class Optim(Settings):
    """Settings of every optimizer: global-norm clipping over all stages, warm-up and cosine
    lr_schedule.

    warmup_steps=0 min_lr_fraction=1 is a constant rate.
    """

    name: str = "???"
    lr: NotNegative = 2e-3  # peak
    min_lr_fraction: Share = 0.1  # of the peak, where the cosine ends, at run.num_steps
    warmup_steps: Natural = 20  # of linear growth to the peak
    clip_norm: NotNegative | None = 1.0  # None: no clipping
    # all parameters | lora: low-rank adapters of a transformer's linear maps, all else frozen
    train: Annotated[str, one_of("all", "lora")] = "all"
    lora_rank: Count = 16  # r of PEFT: an adapter is A [inputs, rank] times B [rank, outputs]
    lora_alpha: Positive = 32.0  # adapters count alpha/rank times
    # of q, k, v, o, gate, up, down; None: all in a block
    lora_targets: list[Annotated[str, one_of(*TARGETS)]] | None = None

    KEY = "optim"

    def check(self) -> None:
        super().check()
        self._check_lora()
        if self.clip_norm == 0:
            raise ConfigError("optim.clip_norm=0 would erase every gradient. Use null for none.")

    def _check_lora(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if self.train != "lora" and field.name.startswith("lora_") and value != field.default:
                raise ConfigError(
                    f"optim.{field.name}={value} is of adapters, and optim.train={self.train} "
                    "trains none. Leave it out, or use optim.train=lora."
                )


@dataclass
class AdamW(Optim):
    """AdamW, without decay on norms and biases."""

    name: str = "adamw"
    weight_decay: NotNegative = 0.1
    b1: Rate = 0.9
    b2: Rate = 0.95
    eps: NotNegative = 1e-8


@dataclass
class SGD(Optim):
    """Stochastic gradient descent: w <- w - lr*g, or of g summed up with momentum."""

    name: str = "sgd"
    lr: NotNegative = 1e-2  # peak
    momentum: Rate | None = None  # v <- momentum*v + g takes the place of g; None: no v is kept

    def check(self) -> None:
        super().check()
        if self.momentum == 0:
            raise ConfigError("optim.momentum=0 would only copy gradients. Use null for none.")
