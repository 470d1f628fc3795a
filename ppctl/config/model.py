"""The models: sizes of their networks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ppctl.config.checks import at_least, choice, dotted
from ppctl.errors import ConfigError


@dataclass
class Transformer:
    """Decoder-only transformer: pre-norm, RMSNorm, rotary positions, grouped-query attention."""

    name: str = "transformer"
    num_layers: int = 8  # blocks, divided over the stages
    d_model: int = 128  # width of the residual stream
    num_heads: int = 4
    num_kv_heads: int | None = None  # None: as many as num_heads
    mlp_ratio: float = 4.0  # hidden width of the MLP over d_model
    activation: str = "gelu"  # gelu | swiglu (three matrices instead of two)
    vocab_size: int | None = None  # None: the data set's
    seq_len: int = 128  # tokens a sequence
    tied: bool = False  # head shares the embedding's weights
    rope_theta: float = 10000.0
    attention: str = "auto"  # kernel: auto (by device, dtype and seq_len) | xla | chunked | cudnn | pallas

    ACTIVATIONS: ClassVar[tuple[str, ...]] = ("gelu", "swiglu")
    ATTENTIONS: ClassVar[tuple[str, ...]] = ("auto", "xla", "chunked", "cudnn", "pallas")

    def check(self) -> None:
        for key in ("num_layers", "d_model", "num_heads", "num_kv_heads", "vocab_size", "seq_len"):
            at_least(f"model.{key}", getattr(self, key), 1)
        choice("model.activation", self.activation, self.ACTIVATIONS)
        choice("model.attention", self.attention, self.ATTENTIONS)
        at_least("model.rope_theta", self.rope_theta, 1.0)
        if self.d_model % self.num_heads:
            raise ConfigError(
                f"model.d_model={self.d_model} is not a multiple of model.num_heads={self.num_heads}. "
                f"Use d_model={math.ceil(self.d_model / self.num_heads) * self.num_heads} or another num_heads."
            )
        if self.d_model // self.num_heads % 2:
            raise ConfigError(
                f"model.d_model/model.num_heads = {self.d_model}/{self.num_heads} = {self.d_model // self.num_heads} "
                "is odd, and rotary positions turn pairs. Use an even width of a head."
            )
        kv = self.num_kv_heads or self.num_heads
        if self.num_heads % kv:
            raise ConfigError(
                f"model.num_heads={self.num_heads} is not a multiple of model.num_kv_heads={kv}. "
                f"Use a divisor of {self.num_heads}."
            )
        hidden = self.mlp_ratio * self.d_model
        if not 1 <= hidden < math.inf or hidden != int(hidden):  # written so that NaN fails
            raise ConfigError(
                f"model.mlp_ratio*model.d_model = {self.mlp_ratio}*{self.d_model} = {hidden} is not a whole positive "
                "width. Choose a ratio that makes it one."
            )


@dataclass
class MLP:
    """Linear embedding, equal layers of the same width, linear head, mean squared error."""

    name: str = "mlp"
    num_layers: int = 8  # divided over the stages
    d_model: int = 64  # width of a layer
    activation: str = "relu"  # relu | tanh | gelu

    ACTIVATIONS: ClassVar[tuple[str, ...]] = ("relu", "tanh", "gelu")

    def check(self) -> None:
        at_least("model.num_layers", self.num_layers, 1)
        at_least("model.d_model", self.d_model, 1)
        choice("model.activation", self.activation, self.ACTIVATIONS)


@dataclass
class CustomModel:
    """A model of one's own: a function that returns a ppctl.Stack, or a ppctl.Network, which is cut into layers.

    The function takes (num_layers, dtype, data, **options).
    """

    name: str = "custom"
    target: str = "???"  # the function: package.module.function, looked for in the current directory first
    num_layers: int = 8  # divided over the stages
    layers: str = "marks"  # of a Network: marks (between its stage_boundary) | auto (clustered, whatever its marks)
    seq_len: int | None = None  # tokens a sequence, of data that are text
    mixes_examples: bool = False  # true: examples of a microbatch may depend on each other; false: that is refused
    options: dict[str, Any] = field(default_factory=dict[str, Any])  # its other arguments: +model.options.NAME=VALUE

    LAYERS: ClassVar[tuple[str, ...]] = ("marks", "auto")

    def check(self) -> None:
        dotted("model.target", self.target)
        choice("model.layers", self.layers, self.LAYERS)
        at_least("model.num_layers", self.num_layers, 1)
        at_least("model.seq_len", self.seq_len, 1)
