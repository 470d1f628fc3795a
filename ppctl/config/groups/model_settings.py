"""The models: sizes of their networks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from typing import Annotated, Any, ClassVar, NamedTuple, cast

from ppctl.config.field_checks import (
    DESCRIPTION,
    Count,
    Positive,
    Rate,
    Settings,
    above_zero,
    at_least,
    choice,
    domains,
    dotted,
    one_of,
    settings_from,
    up_to,
    within,
)
from ppctl.config.groups.moe_settings import Experts
from ppctl.errors import ConfigError


@dataclass
class UserFunction:
    """The user's function, and its arguments."""

    # package.module.function, searched in the current directory first
    target: Annotated[str, dotted] = "???"
    # other arguments: +PART.options.NAME=VALUE
    options: dict[str, Any] = field(default_factory=dict[str, Any])


class Family(NamedTuple):
    """The parts of a transformer that all members of a family of models share."""

    norm_plus_one: bool = False  # norms multiply by 1 + scale instead of scale
    post_norms: bool = False  # norms after attention and MLP too, before the residual sum
    scale_embedding: bool = False  # embeddings are multiplied by sqrt(d_model)
    qkv_bias: bool = False  # queries, keys and values have biases
    qk_norm: bool = False  # norms of each head's queries and keys, before the rotary positions
    whole_qk_norm: bool = False  # one norm over the queries of all heads, one over the keys


FAMILIES = {
    "llama": Family(),  # Llama, Mistral, SmolLM
    "qwen2": Family(qkv_bias=True),  # Qwen2, GLM 4.5 Air
    "qwen3": Family(qk_norm=True),
    "glm4p5": Family(qkv_bias=True, qk_norm=True),
    "olmoe": Family(whole_qk_norm=True),
    "gemma2": Family(norm_plus_one=True, post_norms=True, scale_embedding=True),
    "gemma3": Family(norm_plus_one=True, post_norms=True, scale_embedding=True, qk_norm=True),
}
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


Stretch = Annotated[float, partial(at_least, least=1)]


@dataclass(frozen=True)
class Linear:
    """Scaling that stretches all wavelengths by `factor` (Chen et al. 2023)."""

    factor: Stretch


@dataclass(frozen=True)
class Llama3:
    """Scaling that stretches only long wavelengths by `factor`.

    Wavelengths above original_max_position_embeddings/low_freq_factor are stretched. Those below
    original_max_position_embeddings/high_freq_factor are unchanged. Those between are mixed.
    """

    factor: Stretch
    original_max_position_embeddings: Count  # tokens of a sequence without the stretch
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0


@dataclass(frozen=True)
class Yarn:
    """Scaling that stretches only pairs with few turns in original_max_position_embeddings.

    Pairs with fewer than beta_slow turns are stretched by `factor`. Those with more than beta_fast
    turns are unchanged. Those between are mixed. Queries and keys are multiplied by
    attention_factor; None: 1 + log(factor)/10.
    """

    factor: Stretch
    original_max_position_embeddings: Count
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    attention_factor: Positive | None = None


Scaling = Linear | Llama3 | Yarn
SCALINGS: dict[str, type[Scaling]] = {"linear": Linear, "llama3": Llama3, "yarn": Yarn}
PLAIN, GATED = ("gelu", "gelu_exact", "silu"), ("swiglu", "geglu", "geglu_exact")
MLP_ACTIVATIONS = ("relu", "tanh", "gelu")
ATTENTIONS = ("auto", "xla", "chunked", "cudnn", "pallas")
BELOW = {"low_freq_factor": "high_freq_factor", "beta_slow": "beta_fast"}


Theta = Annotated[float, partial(at_least, least=1.0)]
VocabSize = Annotated[int, up_to(2**24, "a head of that many logits fits no device")]
SeqLen = Annotated[int, up_to(2**20, "a sequence is read whole")]


@dataclass
class Rope:
    """Rotary positions."""

    theta: Theta = 10000.0  # base of the wavelengths
    local_theta: Theta | None = None  # base of windowed layers, without scaling; None: theta
    scaling: Any = None  # {rope_type: linear | llama3 | yarn, factor: 8, ...}, as in config.json
    # share of a head's width, its first dims, that is rotated; the others have no position
    fraction: Annotated[float, above_zero, within] = 1.0

    @property
    def record(self) -> Scaling | None:
        """The scaling with its defaults. ConfigError if a parameter is missing or unknown."""
        scaling: Any = self.scaling
        if scaling is None:
            return None
        if not isinstance(scaling, Mapping):
            example = "{rope_type: linear, factor: 8}"
            raise ConfigError(f"model.rope.scaling={scaling} is not a mapping, such as {example}.")
        values = cast("Mapping[str, Any]", scaling)
        kind = values.get("rope_type")
        choice("model.rope.scaling.rope_type", "null" if kind is None else kind, tuple(SCALINGS))
        values = {key: value for key, value in values.items() if key != "rope_type"}
        return settings_from(SCALINGS[str(kind)], values, "model.rope.scaling")

    def check(self) -> None:
        if self.record is None:
            return
        domains("model.rope.scaling", self.record)
        values = vars(self.record)
        for low, high in BELOW.items():
            if low in values and values[low] >= values[high]:
                raise ConfigError(
                    f"model.rope.scaling.{low}={values[low]} is not below {high}={values[high]}: "
                    "between them wavelengths are stretched in part."
                )


NumLayers = Annotated[int, up_to(4096, "each is given to a stage by itself")]


@dataclass
class Layered(Settings):
    """A model that consists of layers."""

    name: str = "???"

    KEY = "model"


@dataclass
class Transformer(Layered):
    """Decoder-only transformer: pre-norm, RMSNorm, rotary positions, grouped-query attention."""

    name: str = "transformer"
    num_layers: NumLayers = 8  # layers, divided over the stages
    d_model: Count = 128  # width of the residual stream
    num_heads: Count = 4
    num_kv_heads: Count | None = None  # heads of keys and values; None: num_heads
    # width of a head; None: d_model/num_heads
    head_dim: Annotated[int, up_to(2**16, "each head is on one device")] | None = None
    # hidden width of the MLP; None: 4*d_model
    mlp_width: Annotated[int, up_to(2**30, "no device holds a column of it")] | None = None
    # gelu (by tanh) | gelu_exact | silu; gated, three matrices: swiglu | geglu | geglu_exact
    activation: Annotated[str, one_of(*PLAIN, *GATED)] = "gelu"
    vocab_size: VocabSize | None = None  # tokens of the vocabulary; None: the data set's
    seq_len: SeqLen = 128  # tokens per sequence
    tied: bool = False  # head shares the embedding's weights
    # norms, biases, scaled embedding: llama | qwen2 | qwen3 | glm4p5 | olmoe | gemma2 | gemma3
    family: Annotated[str, one_of(*FAMILIES)] = field(default="llama", metadata=DESCRIPTION)
    # added to the mean square in a norm
    norm_eps: Positive = field(default=1e-6, metadata=DESCRIPTION)
    # scores are divided by its square root; None: head_dim
    query_pre_attn_scalar: Positive | None = field(default=None, metadata=DESCRIPTION)
    # scores become cap*tanh(score/cap)
    attention_softcap: Positive | None = field(default=None, metadata=DESCRIPTION)
    # logits become cap*tanh(logit/cap)
    logit_softcap: Positive | None = field(default=None, metadata=DESCRIPTION)
    # last tokens that a token attends to, itself included; None: all before it
    window: Count | None = field(default=None, metadata=DESCRIPTION)
    # cycle of layers with the window (W) and without (F): WWWWWF
    window_pattern: str = field(default="W", metadata=DESCRIPTION)
    dropout: Rate = 0.0  # rate of dropped entries of both branches of a block, in training
    # products of the blocks' linear maps: fp8, scaled by token; None: run.dtype
    linear_dtype: Annotated[str, one_of("fp8")] | None = None
    rope: Rope = field(default_factory=Rope, metadata=DESCRIPTION)
    moe: Experts = field(default_factory=Experts)
    # kernel: auto (by device, dtype and seq_len) | xla | chunked | cudnn | pallas
    attention: Annotated[str, one_of(*ATTENTIONS)] = "auto"

    GATED: ClassVar[tuple[str, ...]] = GATED

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
    def has_experts(self) -> tuple[bool, ...]:
        """For each layer, whether it has experts in place of an MLP."""
        return self.moe.has_experts(self.num_layers)

    @property
    def mlp_widths(self) -> dict[str, int]:
        """The hidden widths that tp divides: the MLP's and the shared expert's, by their name."""
        widths = {} if all(self.has_experts) else {"the width of the MLP": self.hidden_width}
        shared = self.moe.shared_width
        return widths | ({} if shared is None else {"model.moe.shared_width": shared})

    @property
    def linear_maps(self) -> dict[str, tuple[int, int]]:
        """The (inputs, outputs) of each linear map of a layer, by its name in optim.lora_targets.

        The maps of experts are left out: they take no adapters.

        >>> Transformer(d_model=8, num_heads=2, num_kv_heads=1, mlp_width=16).linear_maps
        {'q': (8, 8), 'k': (8, 4), 'v': (8, 4), 'o': (8, 8), 'up': (8, 16), 'down': (16, 8)}
        """
        d, hidden = self.d_model, self.hidden_width
        queries, keys = self.num_heads * self.head_width, self.kv_heads * self.head_width
        maps = {"q": (d, queries), "k": (d, keys), "v": (d, keys), "o": (queries, d)}
        if all(self.has_experts):
            return maps
        gate = {"gate": (d, hidden)} if self.activation in self.GATED else {}
        return maps | gate | {"up": (d, hidden), "down": (hidden, d)}

    @property
    def num_weights(self) -> int:
        """The number of entries of a layer's matrices, including all experts."""
        dense = sum(a * b for a, b in self.linear_maps.values())
        moe, d = self.moe, self.d_model
        if moe.num_experts is None:
            return dense
        matrices = 3 if self.activation in self.GATED else 2
        width = moe.num_experts * (moe.width or self.hidden_width) + (moe.shared_width or 0)
        return dense + d * (moe.num_experts + matrices * width + moe.shared_gate)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The attention window of each layer, in tokens; None: all tokens before.

        >>> Transformer(num_layers=3, window=8, window_pattern="WF").windows
        (8, None, 8)
        """
        layers = islice(cycle(self.window_pattern), self.num_layers)
        return tuple(self.window if letter == "W" else None for letter in layers)

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
