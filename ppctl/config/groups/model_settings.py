"""The models: sizes of their networks."""

import math
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from ppctl.config.field_checks import Count, Rate, Settings, dotted, one_of, up_to
from ppctl.config.groups.transformer_sizes import Architecture, NumLayers
from ppctl.errors import ConfigError


@dataclass
class UserFunction:
    """The user's function, and its arguments."""

    # package.module.function, searched in the current directory first
    target: Annotated[str, dotted] = "???"
    # other arguments: +PART.options.NAME=VALUE
    options: dict[str, Any] = field(default_factory=dict[str, Any])


# features that the transformer lacks, by the start of the model's name (letters and digits only)
LACKING = {
    "deepseek": "multi-head latent attention (MLA)",
    "gptoss": "attention sinks, and biases and clamped activations of experts",
    "llama4": "chunked attention, layers without rotary positions, and experts of weighted inputs",
}


def lacking(model: str) -> str | None:
    """Return the features that the transformer lacks for a model of this name; None: unknown.

    >>> lacking("deepseek_v3")
    'multi-head latent attention (MLA)'
    """
    letters = "".join(filter(str.isalnum, model.lower()))
    return next((what for name, what in LACKING.items() if letters.startswith(name)), None)


MLP_ACTIVATIONS = ("relu", "tanh", "gelu")
ATTENTIONS = ("auto", "xla", "chunked", "cudnn", "pallas")
SeqLen = Annotated[int, up_to(2**20, "a sequence is read whole")]


@dataclass
class Layered(Settings, prefix="model"):
    """A model that consists of layers."""

    name: str = "???"


@dataclass
class Transformer(Architecture, Layered):
    """Decoder-only transformer: pre-norm, RMSNorm, rotary positions, grouped-query attention."""

    name: str = "transformer"
    seq_len: SeqLen = 128  # tokens per sequence
    # kernel: auto (by device, dtype and seq_len) | xla | chunked | cudnn | pallas
    attention: Annotated[str, one_of(*ATTENTIONS)] = "auto"

    @property
    def architecture(self) -> Architecture:
        """The sizes without the name, the length of sequences and the kernel of attention."""
        values = {each.name: getattr(self, each.name) for each in fields(Architecture)}
        return Architecture(**values)

    def check(self) -> None:
        super().check()
        self.rope.check()
        self.moe.check(self.num_layers)
        if self.linear_dtype is not None and self.moe.num_experts is not None:
            raise ConfigError(
                f"model.linear_dtype={self.linear_dtype} with model.moe.num_experts="
                f"{self.moe.num_experts}: the grouped products of experts have no 8-bit form. Use "
                "model.linear_dtype=null."
            )
        self._check_widths()
        self._check_windows()

    def _check_widths(self) -> None:
        d_model, heads = self.d_model, self.num_heads
        use = f"Use model.d_model={math.ceil(d_model / (2 * heads)) * 2 * heads}"
        if self.head_dim is None and d_model % heads:
            raise ConfigError(
                f"model.d_model={d_model} is not a multiple of model.num_heads={heads}. {use} "
                "or another model.num_heads."
            )
        if heads % self.kv_heads:
            raise ConfigError(
                f"model.num_heads={heads} is not a multiple of "
                f"model.num_kv_heads={self.kv_heads}. Use model.num_kv_heads="
                f"{math.gcd(heads, self.kv_heads)} or another divisor of {heads}."
            )
        if self.head_width % 2:
            width = f"model.head_dim={self.head_dim}"
            if self.head_dim is not None:
                use = f"Use model.head_dim={self.head_dim + 1}"
            else:
                width = f"model.d_model/model.num_heads = {d_model}/{heads} = {self.head_width}"
            raise ConfigError(f"{width} is odd, but rotary positions rotate pairs. {use}.")
        turned = self.rope.fraction * self.head_width
        even = max(2, 2 * round(turned / 2))
        if abs(turned - even) > 1e-3:  # tolerance for rounded fractions such as 0.66667
            raise ConfigError(
                f"model.rope.fraction={self.rope.fraction} of heads {self.head_width} wide are "
                f"{turned:g} dims, not an even number: rotary positions rotate pairs. Use "
                f"model.rope.fraction={even / self.head_width:g}."
            )

    def _check_windows(self) -> None:
        if self.window is None:
            pattern = None if self.window_pattern == "W" else self.window_pattern
            unused = {"window_pattern": pattern, "rope.local_theta": self.rope.local_theta}
            for key, value in unused.items():
                if value is not None:
                    raise ConfigError(
                        f"model.{key}={value} is not used: model.window=null, so that no layer "
                        "has a window. Leave it out, or set model.window."
                    )
        elif not self.window_pattern or set(self.window_pattern) - set("WF"):
            raise ConfigError(
                f"model.window_pattern={self.window_pattern} is not made of W (a layer with the "
                "window) and F (one that attends to all before it). Write it as WWWWWF."
            )


@dataclass
class MLP(Layered):
    """Linear embedding, equal layers of the same width, linear head, mean squared error."""

    name: str = "mlp"
    num_layers: NumLayers = 8  # layers, divided over the stages
    d_model: Count = 64  # width of a layer
    activation: Annotated[str, one_of(*MLP_ACTIVATIONS)] = "relu"  # relu | tanh | gelu
    dropout: Rate = 0.0  # rate of dropped outputs of layers, in training


@dataclass
class CustomModel(UserFunction, Layered):
    """A user's function that returns a ppctl.Stack, or a ppctl.Network, which is cut into layers.

    Its parameters are (num_layers, dtype, data, **options), and device if it has one.
    """

    name: str = "custom"
    num_layers: NumLayers | None = None  # null: as many as the function's model has
    # layers of a Network: marks (between stage_boundary calls) | auto (clustered)
    layers: Annotated[str, one_of("marks", "auto")] = "marks"
    seq_len: SeqLen | None = None  # tokens per sequence, for text
    mixes_examples: bool = False  # whether examples of a microbatch may depend on each other


AnyModel = Transformer | MLP | CustomModel
