"""The models: sizes of their networks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ppctl.config.checks import above_zero, at_least, choice, dotted
from ppctl.errors import ConfigError


@dataclass
class Transformer:
    """Decoder-only transformer: pre-norm, RMSNorm, rotary positions, grouped-query attention."""

    name: str = "transformer"
    num_layers: int = 8  # blocks, divided over the stages
    d_model: int = 128  # width of the residual stream
    num_heads: int = 4
    num_kv_heads: int | None = None  # None: as many as num_heads
    head_dim: int | None = None  # width of a head; None: d_model/num_heads
    mlp_ratio: float = 4.0  # hidden width of the MLP over d_model
    mlp_width: int | None = None  # hidden width of the MLP; None: mlp_ratio*d_model
    activation: str = "gelu"  # gelu (by tanh) | gelu_exact | silu; gated, three matrices: swiglu | geglu | geglu_exact
    vocab_size: int | None = None  # None: the data set's
    seq_len: int = 128  # tokens a sequence
    tied: bool = False  # head shares the embedding's weights
    scale_embedding: bool = False  # embeddings are multiplied by sqrt(d_model)
    norm_eps: float = 1e-6  # added to the mean square in a norm
    norm_plus_one: bool = False  # norms multiply by 1 + scale instead of scale
    post_norms: bool = False  # norms behind attention and MLP too, before these are added
    qkv_bias: bool = False  # queries, keys and values have biases
    qk_norm: bool = False  # norms of each head's queries and keys, before they are turned
    query_pre_attn_scalar: float | None = None  # scores are divided by its square root; None: by that of head_dim
    attention_softcap: float | None = None  # scores become cap*tanh(score/cap)
    logit_softcap: float | None = None  # logits likewise
    window: int | None = None  # a token attends to so many last ones, itself included; None: to all before it
    window_pattern: str = "W"  # layers with the window (W) and without (F), in order and again from the start: WWWWWF
    rope_theta: float = 10000.0  # base of the rotary wavelengths
    rope_local_theta: float | None = None  # of layers with the window, which then have no scaling; None: as the others
    rope_fraction: float = 1.0  # of a head's width that is turned: the first part
    rope_scaling: str = "none"  # of wavelengths, for longer sequences: none | linear | llama3 | yarn
    rope_factor: float = 1.0  # by which rope_scaling stretches wavelengths
    rope_original_len: int | None = None  # tokens of a sequence before llama3 or yarn
    rope_low_freq_factor: float = 1.0  # llama3: wavelengths above rope_original_len over this are stretched whole
    rope_high_freq_factor: float = 4.0  # llama3: those below rope_original_len over this stay
    rope_beta_fast: float = 32.0  # yarn: pairs with more turns than this in rope_original_len stay
    rope_beta_slow: float = 1.0  # yarn: those with fewer than this are stretched whole
    rope_attention_factor: float | None = None  # yarn: of queries and keys; None: 1 + log(rope_factor)/10
    attention: str = "auto"  # kernel: auto (by device, dtype and seq_len) | xla | chunked | cudnn | pallas

    ACTIVATIONS: ClassVar[tuple[str, ...]] = ("gelu", "gelu_exact", "silu", "swiglu", "geglu", "geglu_exact")
    GATED: ClassVar[tuple[str, ...]] = ("swiglu", "geglu", "geglu_exact")
    ATTENTIONS: ClassVar[tuple[str, ...]] = ("auto", "xla", "chunked", "cudnn", "pallas")
    SCALINGS: ClassVar[dict[str, tuple[str, ...]]] = {  # the settings that each reads
        "none": (),
        "linear": ("rope_factor",),
        "llama3": ("rope_factor", "rope_original_len", "rope_low_freq_factor", "rope_high_freq_factor"),
        "yarn": ("rope_factor", "rope_original_len", "rope_beta_fast", "rope_beta_slow", "rope_attention_factor"),
    }

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d_model // self.num_heads

    @property
    def hidden_width(self) -> int:
        """Hidden width of the MLP."""
        return round(self.mlp_ratio * self.d_model) if self.mlp_width is None else self.mlp_width

    @property
    def linear_maps(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of the linear maps of a layer, by the names of optim.lora_targets.

        >>> Transformer(d_model=8, num_heads=2, num_kv_heads=1, mlp_ratio=2.0).linear_maps
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
        if self.window is None:
            return (None,) * self.num_layers
        pattern = self.window_pattern
        return tuple(self.window if pattern[l % len(pattern)] == "W" else None for l in range(self.num_layers))

    def check(self) -> None:
        for key in ("num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "mlp_width", "vocab_size"):
            at_least(f"model.{key}", getattr(self, key), 1)
        for key in ("seq_len", "window"):
            at_least(f"model.{key}", getattr(self, key), 1)
        choice("model.activation", self.activation, self.ACTIVATIONS)
        choice("model.attention", self.attention, self.ATTENTIONS)
        above_zero("model.norm_eps", self.norm_eps)
        for key in ("query_pre_attn_scalar", "attention_softcap", "logit_softcap"):
            above_zero(f"model.{key}", getattr(self, key))
        self._check_widths()
        self._check_windows()
        self._check_rope()

    def _check_widths(self) -> None:
        if self.head_dim is None and self.d_model % self.num_heads:
            raise ConfigError(
                f"model.d_model={self.d_model} is not a multiple of model.num_heads={self.num_heads}. "
                f"Use d_model={math.ceil(self.d_model / self.num_heads) * self.num_heads} or another num_heads."
            )
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"model.num_heads={self.num_heads} is not a multiple of model.num_kv_heads={self.kv_heads}. "
                f"Use a divisor of {self.num_heads}."
            )
        hidden = self.mlp_ratio * self.d_model
        if self.mlp_width is None and (not 1 <= hidden < math.inf or hidden != int(hidden)):  # so that NaN fails
            raise ConfigError(
                f"model.mlp_ratio*model.d_model = {self.mlp_ratio}*{self.d_model} = {hidden} is not a whole positive "
                "width. Choose a ratio that makes it one, or model.mlp_width."
            )

    def _check_windows(self) -> None:
        if self.window is None:
            _unused(self, ("window_pattern", "rope_local_theta"), "model.window=null, so that no layer has a window")
        elif not self.window_pattern or set(self.window_pattern) - set("WF"):
            raise ConfigError(
                f"model.window_pattern={self.window_pattern} is not made of W (a layer with the window) and F (one "
                "that attends to all before it). Write it as WWWWWF."
            )

    def _check_rope(self) -> None:
        choice("model.rope_scaling", self.rope_scaling, tuple(self.SCALINGS))
        at_least("model.rope_theta", self.rope_theta, 1.0)
        at_least("model.rope_local_theta", self.rope_local_theta, 1.0)
        if self.head_width % 2:
            quotient = f"model.d_model/model.num_heads = {self.d_model}/{self.num_heads} = {self.head_width}"
            raise ConfigError(
                f"{quotient if self.head_dim is None else f'model.head_dim={self.head_dim}'} is odd, and rotary "
                "positions turn pairs. Use an even width of a head."
            )
        turned = self.rope_fraction * self.head_width
        if not 0 < turned <= self.head_width or turned % 2:  # written so that NaN fails
            raise ConfigError(
                f"model.rope_fraction={self.rope_fraction} of heads {self.head_width} wide is {turned:g}, and rotary "
                "positions turn pairs. Use a fraction of at most 1 that makes it even."
            )
        used = self.SCALINGS[self.rope_scaling]
        others = {key for keys in self.SCALINGS.values() for key in keys} - set(used)
        _unused(self, sorted(others), f"model.rope_scaling={self.rope_scaling} reads none")
        at_least("model.rope_original_len", self.rope_original_len, 1)
        at_least("model.rope_factor", self.rope_factor, 1.0)
        for key in ("rope_low_freq_factor", "rope_high_freq_factor", "rope_beta_fast", "rope_beta_slow"):
            above_zero(f"model.{key}", getattr(self, key))
        above_zero("model.rope_attention_factor", self.rope_attention_factor)
        if "rope_original_len" in used and self.rope_original_len is None:
            raise ConfigError(
                f"model.rope_scaling={self.rope_scaling} stretches wavelengths by how they compare with the length of "
                "the sequences before it. State that as model.rope_original_len."
            )
        for low, high in (("rope_low_freq_factor", "rope_high_freq_factor"), ("rope_beta_slow", "rope_beta_fast")):
            if getattr(self, low) >= getattr(self, high):
                raise ConfigError(
                    f"model.{low}={getattr(self, low)} is not below model.{high}={getattr(self, high)}: "
                    "between them wavelengths are stretched in part."
                )


def _unused(model: Transformer, keys: Sequence[str], why: str) -> None:
    """Raise ConfigError for the first of these settings that is not the default."""
    for key in keys:
        value, default = getattr(model, key), getattr(Transformer, key)
        if value != default:
            raise ConfigError(f"model.{key}={value} is not used: {why}. Leave it out, or change that.")


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

    The function takes (num_layers, dtype, data, **options), and device if it names it.
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
