"""The optimizers and their learning-rate schedules."""

from dataclasses import dataclass, fields
from typing import Annotated

from ppctl.config import field_checks as checks
from ppctl.config.field_checks import Count, Natural, NotNegative, Positive, Rate, Settings, Share
from ppctl.config.groups.model_settings import UserFunction
from ppctl.config.groups.transformer_sizes import TARGETS
from ppctl.errors import ConfigError

LR_SCHEDULES = ("cosine", "linear", "constant", "wsd")


@dataclass
class Optim(Settings):
    """Settings of every optimizer: learning rate, global-norm clipping over all stages, adapters.

    The rate grows to its peak, then follows lr_schedule; wsd is warm-up, stable, decay.
    """

    name: str = "???"
    lr: NotNegative = 2e-3  # peak rate
    # cosine | linear | constant | wsd: constant, then linear in the last steps
    lr_schedule: Annotated[str, checks.one_of(*LR_SCHEDULES)] = "cosine"
    min_lr_fraction: Share = 0.1  # final rate over the peak rate; unused by constant
    decay_fraction: Share = 0.2  # share of run.num_steps with wsd's falling rate
    warmup_steps: Natural = 20  # steps of linear growth to the peak
    clip_norm: NotNegative | None = 1.0  # maximum global gradient norm; None: no clipping
    # decay of an average of the trained parameters, for evaluations and exports; None: no average
    ema: Rate | None = None
    # all parameters | lora: low-rank adapters of a transformer's linear maps, all else frozen
    train: Annotated[str, checks.one_of("all", "lora")] = "all"
    lora_rank: Count = 16  # r of PEFT: an adapter is A [inputs, rank] times B [rank, outputs]
    lora_alpha: Positive = 32.0  # adapters are multiplied by alpha/rank
    # maps with adapters, of q, k, v, o, gate, up, down; None: all in a block
    lora_targets: list[Annotated[str, checks.one_of(*TARGETS)]] | None = None
    lora_dropout: Rate = 0.0  # rate of dropped entries of adapters' inputs, in training

    def check(self) -> None:
        super().check()
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        changed = {each.name for each in fields(self) if values[each.name] != each.default}
        for name in values:
            if self.train != "lora" and name.startswith("lora_") and name in changed:
                raise ConfigError(
                    f"optim.{name}={values[name]} applies to adapters, but optim.train="
                    f"{self.train} trains none. Leave it out, or use optim.train=lora."
                )
        unused = {"wsd": (), "constant": ("decay_fraction", "min_lr_fraction")}
        for name in unused.get(self.lr_schedule, ("decay_fraction",)):
            if name in changed:
                raise ConfigError(
                    f"optim.{name}={values[name]} has no effect: optim.lr_schedule="
                    f"{self.lr_schedule}. Leave it out, or use optim.lr_schedule=wsd."
                )
        if self.clip_norm == 0:
            raise ConfigError("optim.clip_norm=0 would erase every gradient. Use null for none.")
        if self.ema == 0:
            raise ConfigError("optim.ema=0 would only copy the parameters. Use null for none.")


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
    """Stochastic gradient descent: w <- w - lr*g, where g may have momentum."""

    name: str = "sgd"
    lr: NotNegative = 1e-2  # peak rate
    momentum: Rate | None = None  # v <- momentum*v + g replaces g; None: no momentum

    def check(self) -> None:
        super().check()
        if self.momentum == 0:
            raise ConfigError("optim.momentum=0 would only copy gradients. Use null for none.")


@dataclass
class Lion(Optim):
    """Lion (Chen et al. 2023): the sign of an average of gradients; no decay on norms and biases.

    Use a rate 3 to 10 times smaller than AdamW's, and a decay 3 to 10 times larger.
    """

    name: str = "lion"
    lr: NotNegative = 3e-4  # peak rate
    weight_decay: NotNegative = 0.5
    b1: Rate = 0.9
    b2: Rate = 0.99


@dataclass
class Adafactor(Optim):
    """Adafactor (Shazeer, Stern 2018): second moments by rows and columns, updates of relative
    size; no weight decay.
    """

    name: str = "adafactor"
    lr: NotNegative = 1e-2  # peak rate, relative to the root mean square of a parameter


@dataclass
class Lamb(AdamW):
    """LAMB (You et al. 2019): AdamW's update, scaled by each parameter's norm.

    No decay on norms and biases.
    """

    name: str = "lamb"
    b2: Rate = 0.999
    eps: NotNegative = 1e-6


@dataclass
class Muon(AdamW):
    """Muon (Jordan et al. 2024) for the matrices of layers, each expert's by itself: momentum,
    changed so that all singular values are near 1. AdamW for embedding, head and vectors.
    """

    name: str = "muon"
    momentum: Rate = 0.95  # Nesterov momentum
    # root mean square of a matrix's update over lr, close to AdamW's (Moonlight, 2025); None: scale
    # by sqrt(max(1, columns/rows)) as Jordan does
    update_rms: Positive | None = 0.2


@dataclass
class CustomOptim(Optim, UserFunction):
    """The user's optax transformation: target(learning_rate=rates, **options)."""

    name: str = "custom"


AnyOptim = AdamW | SGD | Lion | Adafactor | Lamb | Muon | CustomOptim
