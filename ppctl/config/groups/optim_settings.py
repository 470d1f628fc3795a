"""The optimizers, and their learning rate over the steps of a run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from ppctl.config.field_checks import above_zero, at_least, choice, fraction
from ppctl.errors import ConfigError


@dataclass
class Optim:
    """Settings of every optimizer: global-norm clipping over all stages, warm-up and cosine
    lr_schedule.

    warmup_steps=0 min_lr_fraction=1 is a constant rate.
    """

    name: str = "???"
    lr: float = 2e-3  # peak
    min_lr_fraction: float = 0.1  # of the peak, where the cosine ends, at run.num_steps
    warmup_steps: int = 20  # of linear growth to the peak
    clip_norm: float | None = 1.0  # None: no clipping
    # all parameters | lora: low-rank adapters of a transformer's linear maps, all else frozen
    train: str = "all"
    lora_rank: int = 16  # r of PEFT: an adapter is A [inputs, rank] times B [rank, outputs]
    lora_alpha: float = 32.0  # adapters count alpha/rank times
    lora_targets: list[str] | None = None  # of q, k, v, o, gate, up, down; None: all in a block

    TRAINS: ClassVar[tuple[str, ...]] = ("all", "lora")
    TARGETS: ClassVar[tuple[str, ...]] = ("q", "k", "v", "o", "gate", "up", "down")

    def check(self) -> None:
        self._check_lora()
        for key in ("lr", "warmup_steps", "clip_norm"):
            at_least(f"optim.{key}", getattr(self, key), 0)
        fraction("optim.min_lr_fraction", self.min_lr_fraction)
        if self.clip_norm == 0:
            raise ConfigError("optim.clip_norm=0 would erase every gradient. Use null for none.")

    def _check_lora(self) -> None:
        choice("optim.train", self.train, self.TRAINS)
        for field in fields(self):
            value = getattr(self, field.name)
            if self.train != "lora" and field.name.startswith("lora_") and value != field.default:
                raise ConfigError(
                    f"optim.{field.name}={value} is of adapters, and optim.train={self.train} "
                    "trains none. Leave it out, or use optim.train=lora."
                )
        at_least("optim.lora_rank", self.lora_rank, 1)
        above_zero("optim.lora_alpha", self.lora_alpha)
        if self.lora_targets == []:
            raise ConfigError("optim.lora_targets=[] trains nothing. Use null for all linear maps.")
        for name in self.lora_targets or ():
            choice("optim.lora_targets", name, self.TARGETS)


@dataclass
class AdamW(Optim):
    """AdamW, without decay on norms and biases."""

    name: str = "adamw"
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8

    def check(self) -> None:
        super().check()
        for key in ("weight_decay", "eps"):
            at_least(f"optim.{key}", getattr(self, key), 0)
        fraction("optim.b1", self.b1, below_one=True)
        fraction("optim.b2", self.b2, below_one=True)


@dataclass
class SGD(Optim):
    """Stochastic gradient descent: w <- w - lr*g, or of g summed up with momentum."""

    name: str = "sgd"
    lr: float = 1e-2  # peak
    momentum: float | None = None  # v <- momentum*v + g takes the place of g; None: no v is kept

    def check(self) -> None:
        super().check()
        if self.momentum is not None:
            fraction("optim.momentum", self.momentum, below_one=True)
        if self.momentum == 0:
            raise ConfigError("optim.momentum=0 would only copy gradients. Use null for none.")
