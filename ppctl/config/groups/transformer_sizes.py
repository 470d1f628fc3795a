"""The sizes and variants of a transformer: its settings, and the values that follow from them."""

from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Annotated, NamedTuple

from ppctl.config.field_checks import DESCRIPTION, Count, Positive, Rate, one_of, up_to
from ppctl.config.groups.moe_settings import Experts
from ppctl.config.groups.rope_settings import Rope
from ppctl.errors import ConfigError, setting
from ppctl.schedule.mesh_axes import check_experts, check_widths

PLAIN = ("gelu", "gelu_exact", "silu")  # activations of an MLP of two matrices
# activations of an MLP of three matrices: the activation of its gate (Shazeer 2020)
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_exact": "gelu_exact"}
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")  # linear maps in optim.lora_targets

NumLayers = Annotated[int, up_to(4096, "each is given to a stage by itself")]
VocabSize = Annotated[int, up_to(2**24, "a head of that many logits fits no device")]


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


class LinearMap(NamedTuple):
    """A linear map of a layer: a matrix [num_in, num_out], and a bias if any.

    Its initial values, division over tp, 8-bit scales, adapter and names in files follow from it.
    """

    path: str  # place of the parameters in a layer
    tensor: str  # module of `transformers`, after model.layers.L.
    num_in: int
    num_out: int
    divided: str | None = None  # dim that tp divides: inputs | outputs; None: neither
    num_parts: int | None = None  # largest tp that divides it; a larger one does not. None: any
    target: str | None = None  # name in TARGETS; None: no adapter
    has_bias: bool = False

    @property
    def num_weights(self) -> int:
        return self.num_in * self.num_out


class Norm(NamedTuple):
    """A norm inside attention, divided as `LinearMap` is."""

    path: str
    tensor: str
    width: int
    divided: str | None = None
    num_parts: int | None = None


class AttentionForm(NamedTuple):
    """A form of attention in a layer of some sizes. `ppctl.model.attention` has its function."""

    maps: tuple[LinearMap, ...]
    norms: tuple[Norm, ...]
    num_heads: int
    widths: tuple[int, int]  # width of a head's queries and keys, width of its values
    cached: tuple[tuple[int, ...], ...]  # shapes of a token's arrays that decoding keeps

    @property
    def pair_flops(self) -> int:
        """FLOPs of a forward for each pair of a query and a key: its scores, and its values."""
        return 2 * self.num_heads * sum(self.widths)


@dataclass(unsafe_hash=True)
class Architecture:
    """A decoder-only transformer, by all that decides its parameters and its function.

    Nobody changes one, so that it is hashed by its values. It is not frozen, because Hydra's
    structured configs must not be.
    """

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

    @property
    def traits(self) -> Family:
        """The parts that the model shares with its family."""
        return FAMILIES[self.family]

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
    def expert_width(self) -> int:
        """Hidden width of an expert."""
        return self.moe.width or self.hidden_width

    @property
    def is_gated(self) -> bool:
        """Whether MLPs and experts have a third matrix, whose product gates the others."""
        return self.activation in GATED

    @property
    def has_experts(self) -> tuple[bool, ...]:
        """For each layer, whether it has experts in place of an MLP."""
        return self.moe.has_experts(self.num_layers)

    @property
    def mlp_widths(self) -> dict[str, int]:
        """The hidden widths that tp divides: the MLP's and the shared expert's, by their name."""
        widths = {} if all(self.has_experts) else {"the width of the MLP": self.hidden_width}
        shared = self.moe.shared_width
        return widths | ({} if shared is None else {setting("model.moe.shared_width"): shared})

    @property
    def attention_form(self) -> AttentionForm:
        """Grouped-query attention."""
        D, H, traits = self.d_model, self.head_width, self.traits
        queries, keys, bias = self.num_heads * H, self.kv_heads * H, traits.qkv_bias
        columns, of_keys = ("outputs", None), ("outputs", self.kv_heads)
        maps = (
            LinearMap("attention/query", "self_attn.q_proj", D, queries, *columns, "q", bias),
            LinearMap("attention/key", "self_attn.k_proj", D, keys, *of_keys, "k", bias),
            LinearMap("attention/value", "self_attn.v_proj", D, keys, *of_keys, "v", bias),
            LinearMap("attention/out", "self_attn.o_proj", queries, D, "inputs", target="o"),
        )
        names = [(f"attention/{n}_norm", f"self_attn.{n[0]}_norm") for n in ("query", "key")]
        norms: tuple[Norm, ...] = ()
        if traits.qk_norm:
            norms = tuple(Norm(*each, H) for each in names)
        elif traits.whole_qk_norm:
            norms = Norm(*names[0], queries, *columns), Norm(*names[1], keys, *of_keys)
        return AttentionForm(maps, norms, self.num_heads, (H, H), ((self.kv_heads, H),) * 2)

    @property
    def mlp_maps(self) -> tuple[LinearMap, ...]:
        """The linear maps of the MLP; () if all layers have experts in its place."""
        return () if all(self.has_experts) else self._mlp("mlp", "mlp", self.hidden_width)

    @property
    def shared_maps(self) -> tuple[LinearMap, ...]:
        """The linear maps of the shared expert and of its gate, without adapters; or ()."""
        if self.moe.shared_width is None:
            return ()
        of_mlp = self._mlp("shared", "mlp.shared_expert", self.moe.shared_width)
        gate = LinearMap("shared_gate", "mlp.shared_expert_gate", self.d_model, 1)
        maps = tuple(each._replace(target=None) for each in of_mlp)
        return (*maps, gate) if self.moe.shared_gate else maps

    def _mlp(self, part: str, module: str, width: int) -> tuple[LinearMap, ...]:
        columns, rows = (self.d_model, width, "outputs"), (width, self.d_model, "inputs")
        sizes = {"up": columns, "gate": columns, "down": rows}
        names = sizes if self.is_gated else ("up", "down")
        maps = ((f"{part}/{n}", f"{module}.{n}_proj", *sizes[n]) for n in names)
        return tuple(LinearMap(*each, target=n) for each, n in zip(maps, names, strict=True))

    @property
    def linear_maps(self) -> tuple[LinearMap, ...]:
        """The linear maps of a layer, without those of experts.

        >>> sizes = Architecture(d_model=8, num_heads=2, num_kv_heads=1, mlp_width=16)
        >>> {each.target: (each.num_in, each.num_out) for each in sizes.linear_maps}
        {'q': (8, 8), 'k': (8, 4), 'v': (8, 4), 'o': (8, 8), 'up': (8, 16), 'down': (16, 8)}
        """
        return (*self.attention_form.maps, *self.mlp_maps, *self.shared_maps)

    @property
    def num_weights(self) -> int:
        """The number of entries of a layer's matrices, including all experts."""
        of_maps = sum(each.num_weights for each in self.linear_maps)
        of_expert = 1 + (2 + self.is_gated) * self.expert_width  # with its column of the router
        return of_maps + self.d_model * (self.moe.num_experts or 0) * of_expert

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The attention window of each layer, in tokens; None: all tokens before.

        >>> Architecture(num_layers=3, window=8, window_pattern="WF").windows
        (8, None, 8)
        """
        layers = islice(cycle(self.window_pattern), self.num_layers)
        return tuple(self.window if letter == "W" else None for letter in layers)

    def check_divides(self, tp: int, cp: int, ep: int, *, divides_rows: bool) -> None:
        """Raise ConfigError if the sizes do not fit these axes.

        divides_rows: whether tp divides the rows of activations.
        """
        check_widths(tp, self.num_heads, self.kv_heads, self.mlp_widths)
        check_experts(self.moe.num_experts, ep, tp, divides_rows=divides_rows)
        if self.linear_dtype is not None and self.kv_heads < tp:
            raise ConfigError(
                f"{setting('model.linear_dtype', self.linear_dtype)} and "
                f"{setting('mesh.tp', tp)}: devices that share a key-value head would each round a "
                f"summand of its gradient. Use {setting('mesh.tp', self.kv_heads)} at most "
                f"({setting('model.num_kv_heads')})."
            )
        if cp > 1 and any(self.windows):
            raise ConfigError(
                f"{setting('model.window', self.window)} and {setting('mesh.cp', cp)}: attention "
                f"to the tokens of other devices has no window. Use {setting('mesh.cp', 1)}, and "
                f"{setting('mesh.tp')} for long sequences."
            )
