"""The models: sizes of their networks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any, ClassVar, NamedTuple, cast

from ppctl.config.field_checks import above_zero, at_least, choice, dotted, fraction, record_of
from ppctl.errors import ConfigError


@dataclass
class UserFunction:
    """A function of the user's, and its arguments."""

    target: str = "???"  # package.module.function, looked for in the current directory first
    # other arguments: +PART.options.NAME=VALUE
    options: dict[str, Any] = field(default_factory=dict[str, Any])


class Family(NamedTuple):
    """The parts of a transformer that all members of a family of models share."""

    norm_plus_one: bool = False  # norms multiply by 1 + scale instead of scale
    post_norms: bool = False  # norms after attention and MLP too, before the residual sum
    scale_embedding: bool = False  # embeddings are multiplied by sqrt(d_model)
    qkv_bias: bool = False  # queries, keys and values have biases
    qk_norm: bool = False  # norms of each head's queries and keys, before the rotary positions


FAMILIES = {
    "llama": Family(),  # Llama, Mistral, SmolLM
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "gemma2": Family(norm_plus_one=True, post_norms=True, scale_embedding=True),
    "gemma3": Family(norm_plus_one=True, post_norms=True, scale_embedding=True, qk_norm=True),
}


class Linear(NamedTuple):
    """Wavelengths stretched by factor (Chen et al. 2023)."""

    factor: float


class Llama3(NamedTuple):
    """Wavelengths above original_max_position_embeddings/low_freq_factor stretched by factor, those
    below original_max_position_embeddings/high_freq_factor unchanged, mixed between them.
    """

    factor: float
    original_max_position_embeddings: int  # tokens of a sequence before
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


class Yarn(NamedTuple):
    """Pairs with fewer than beta_slow turns in original_max_position_embeddings stretched by
    factor, those with more than beta_fast unchanged, mixed between them; queries and keys times
    attention_factor, None: 1 + log(factor)/10.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


Scaling = Linear | Llama3 | Yarn
SCALINGS: dict[str, type[Scaling]] = {"linear": Linear, "llama3": Llama3, "yarn": Yarn}
BELOW = {"low_freq_factor": "high_freq_factor", "beta_slow": "beta_fast"}


@dataclass
class Rope:
    """Rotary positions."""

    theta: float = 10000.0  # base of the wavelengths
    local_theta: float | None = None  # base of windowed layers, without scaling; None: theta
    scaling: Any = None  # {rope_type: linear | llama3 | yarn, factor: 8, ...}, as in config.json

    @property
    def record(self) -> Scaling | None:
        """The scaling with its defaults. ConfigError where a parameter is missing or unknown."""
        scaling: Any = self.scaling
        if scaling is None:
            return None
        if not isinstance(scaling, Mapping):
            example = "{rope_type: linear, factor: 8}"
            raise ConfigError(f"model.rope.scaling={scaling} is no mapping, such as {example}.")
        values = cast("Mapping[str, Any]", scaling)
        kind = values.get("rope_type")
        choice("model.rope.scaling.rope_type", kind, tuple(SCALINGS))
        return record_of("model.rope.scaling", SCALINGS[str(kind)], values, but=("rope_type",))

    def check(self) -> None:
        at_least("model.rope.theta", self.theta, 1.0)
        at_least("model.rope.local_theta", self.local_theta, 1.0)
        values = {} if self.record is None else self.record._asdict()
        for key, value in values.items():
            above_zero(f"model.rope.scaling.{key}", value)
        at_least("model.rope.scaling.factor", values.get("factor"), 1.0)
        for low, high in BELOW.items():
            if low in values and values[low] >= values[high]:
                raise ConfigError(
                    f"model.rope.scaling.{low}={values[low]} is not below {high}={values[high]}: "
                    "between them wavelengths are stretched in part."
                )


@dataclass
class Layered:
    """A model that consists of layers."""

    name: str = "???"
    num_layers: int = 8  # divided over the stages


@dataclass
class Transformer(Layered):
    """Decoder-only transformer: pre-norm, RMSNorm, rotary positions, grouped-query attention."""

    name: str = "transformer"
    d_model: int = 128  # width of the residual stream
    num_heads: int = 4
    num_kv_heads: int | None = None  # None: num_heads
    head_dim: int | None = None  # width of a head; None: d_model/num_heads
    mlp_width: int | None = None  # hidden width of the MLP; None: 4*d_model
    # gelu (by tanh) | gelu_exact | silu; gated, three matrices: swiglu | geglu | geglu_exact
    activation: str = "gelu"
    vocab_size: int | None = None  # None: the data set's
    seq_len: int = 128  # tokens a sequence
    tied: bool = False  # head shares the embedding's weights
    # norms, biases and scale of the embedding: llama | qwen2 | qwen3 | gemma2 | gemma3
    family: str = "llama"
    norm_eps: float = 1e-6  # added to the mean square in a norm
    # scores are divided by its square root; None: by that of head_dim
    query_pre_attn_scalar: float | None = None
    attention_softcap: float | None = None  # scores become cap*tanh(score/cap)
    logit_softcap: float | None = None  # logits likewise
    # last tokens that a token attends to, itself included; None: all before it
    window: int | None = None
    window_pattern: str = "W"  # cycle of layers with the window (W) and without (F): WWWWWF
    dropout: float = 0.0  # rate of dropped entries of both branches of a block, in training
    rope: Rope = field(default_factory=Rope)
    # kernel: auto (by device, dtype and seq_len) | xla | chunked | cudnn | pallas
    attention: str = "auto"

    GATED: ClassVar[tuple[str, ...]] = ("swiglu", "geglu", "geglu_exact")
    ACTIVATIONS: ClassVar[tuple[str, ...]] = ("gelu", "gelu_exact", "silu", *GATED)
    ATTENTIONS: ClassVar[tuple[str, ...]] = ("auto", "xla", "chunked", "cudnn", "pallas")

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d_model // self.num_heads

    @property
    def hidden_width(self) -> int:
        """Hidden width of the MLP."""
        return 4 * self.d_model if self.mlp_width is None else self.mlp_width

    @property
    def linear_maps(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of the linear maps of a layer, by the names of optim.lora_targets.

        >>> Transformer(d_model=8, num_heads=2, num_kv_heads=1, mlp_width=16).linear_maps
        {'q': (8, 8), 'k': (8, 4), 'v': (8, 4), 'o': (8, 8), 'up': (8, 16), 'down': (16, 8)}
        """
        d, hidden = self.d_model, self.hidden_width
        queries, keys = self.num_heads * self.head_width, self.kv_heads * self.head_width
        maps = {"q": (d, queries), "k": (d, keys), "v": (d, keys), "o": (queries, d)}
        gate = {"gate": (d, hidden)} if self.activation in self.GATED else {}
        return maps | gate | {"up": (d, hidden), "down": (hidden, d)}

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer.

        >>> Transformer(num_layers=3, window=8, window_pattern="WF").windows
        (8, None, 8)
        """
        layers = islice(cycle(self.window_pattern), self.num_layers)
        return tuple(self.window if letter == "W" else None for letter in layers)

    def check(self) -> None:
        widths = ("d_model", "num_heads", "num_kv_heads", "head_dim", "mlp_width", "vocab_size")
        for key in ("num_layers", *widths, "seq_len", "window"):
            at_least(f"model.{key}", getattr(self, key), 1)
        choice("model.activation", self.activation, self.ACTIVATIONS)
        choice("model.attention", self.attention, self.ATTENTIONS)
        choice("model.family", self.family, tuple(FAMILIES))
        for key in ("norm_eps", "query_pre_attn_scalar", "attention_softcap", "logit_softcap"):
            above_zero(f"model.{key}", getattr(self, key))
        fraction("model.dropout", self.dropout, below_one=True)
        self.rope.check()
        self._check_widths()
        self._check_windows()

    def _check_widths(self) -> None:
        d_model, heads = self.d_model, self.num_heads
        if self.head_dim is None and d_model % heads:
            raise ConfigError(
                f"model.d_model={d_model} is not a multiple of model.num_heads={heads}. Use "
                f"d_model={math.ceil(d_model / heads) * heads} or another num_heads."
            )
        if heads % self.kv_heads:
            raise ConfigError(
                f"model.num_heads={heads} is not a multiple of "
                f"model.num_kv_heads={self.kv_heads}. Use a divisor of {heads}."
            )
        if self.head_width % 2:
            width = f"model.head_dim={self.head_dim}"
            if self.head_dim is None:
                width = f"model.d_model/model.num_heads = {d_model}/{heads} = {self.head_width}"
            raise ConfigError(f"{width} is odd, and rotary positions turn pairs. Use an even one.")

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
    d_model: int = 64  # width of a layer
    activation: str = "relu"  # relu | tanh | gelu
    dropout: float = 0.0  # rate of dropped outputs of layers, in training

    ACTIVATIONS: ClassVar[tuple[str, ...]] = ("relu", "tanh", "gelu")

    def check(self) -> None:
        at_least("model.num_layers", self.num_layers, 1)
        at_least("model.d_model", self.d_model, 1)
        choice("model.activation", self.activation, self.ACTIVATIONS)
        fraction("model.dropout", self.dropout, below_one=True)


@dataclass
class CustomModel(UserFunction, Layered):
    """A user's function that returns a ppctl.Stack, or a ppctl.Network, which is cut into layers.

    Its parameters are (num_layers, dtype, data, **options), and device if it has one.
    """

    name: str = "custom"
    layers: str = "marks"  # of a Network: marks (between stage_boundary calls) | auto (clustered)
    seq_len: int | None = None  # tokens a sequence, of data that are text
    mixes_examples: bool = False  # whether examples of a microbatch may depend on each other

    LAYERS: ClassVar[tuple[str, ...]] = ("marks", "auto")

    def check(self) -> None:
        dotted("model.target", self.target)
        choice("model.layers", self.layers, self.LAYERS)
        at_least("model.num_layers", self.num_layers, 1)
        at_least("model.seq_len", self.seq_len, 1)


AnyModel = Transformer | MLP | CustomModel
