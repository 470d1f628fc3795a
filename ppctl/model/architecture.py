"""Sizes and variants of a decoder-only transformer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

import jax
import jax.numpy as jnp

from ppctl.errors import ConfigError, setting
from ppctl.model.attention.attention_scores import Scoring
from ppctl.model.attention.rotary_positions import Rope
from ppctl.model.experts.router import ExpertSizes
from ppctl.model.lora import Lora
from ppctl.model.parallel import StageAxes
from ppctl.schedule.mesh_axes import check_experts, check_widths

ACTIVATIONS = {  # activations of transformers and of the MLP model
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "gelu": jax.nn.gelu,  # approximated by tanh
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_exact": "gelu_exact"}  # Shazeer 2020

PLAIN_ROPE = Rope()
Draw = Callable[..., jax.Array]  # (initializer, *shape) -> array


def drawing(key: jax.Array, dtype: jnp.dtype) -> Draw:
    """Return a function that draws parameters, each with a new key folded from `key`."""
    keys = (jax.random.fold_in(key, number) for number in count())
    return lambda initializer, *shape: initializer(next(keys), shape, dtype)


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer; `ppctl.config.Transformer` explains the fields."""

    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int | None
    mlp_width: int
    activation: str
    vocab_size: int
    tied: bool
    rope: Rope = PLAIN_ROPE
    local_rope: Rope | None = None  # rotary positions of layers with a window; None: `rope`
    head_dim: int | None = None
    scale_embedding: bool = False
    norm_eps: float = 1e-6
    norm_plus_one: bool = False
    post_norms: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    whole_qk_norm: bool = False
    query_pre_attn_scalar: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    windows: tuple[int | None, ...] | None = None  # tokens in each layer's window; None: no windows
    dropout: float = 0.0
    linear_dtype: str | None = None  # "fp8": `fp8_products`; None: the dtype of compute
    moe: ExpertSizes | None = None
    lora: Lora | None = None

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d_model // self.num_heads

    @property
    def has_experts(self) -> tuple[bool, ...]:
        """Return, for each layer, whether it has experts in place of an MLP."""
        return (False,) * self.num_layers if self.moe is None else self.moe.has_experts

    @property
    def mlp_widths(self) -> dict[str, int]:
        """Return the hidden widths that tp must divide, by name: MLP and shared expert."""
        widths = {} if all(self.has_experts) else {"the width of the MLP": self.mlp_width}
        shared = None if self.moe is None else self.moe.shared_width
        return widths | ({} if shared is None else {setting("model.moe.shared_width"): shared})

    def scoring(self, window: int | None) -> Scoring:
        """Return the attention scoring of layers with this window; None: no window."""
        scale = None if self.query_pre_attn_scalar is None else self.query_pre_attn_scalar**-0.5
        return Scoring(scale, self.attention_softcap, window)

    def check_divides(self, axes: StageAxes) -> None:
        """Raise ConfigError if the sizes do not fit tp, cp and ep."""
        check_widths(axes.tp, self.num_heads, self.kv_heads, self.mlp_widths)
        experts = None if self.moe is None else self.moe.num_experts
        check_experts(experts, axes.ep, axes.tp, divides_rows=axes.divides_rows)
        if self.linear_dtype is not None and self.kv_heads < axes.tp:
            raise ConfigError(
                f"{setting('model.linear_dtype', self.linear_dtype)} and "
                f"{setting('mesh.tp', axes.tp)}: devices that share a key-value head would each "
                f"round a summand of its gradient. Use {setting('mesh.tp', self.kv_heads)} at "
                f"most ({setting('model.num_kv_heads')})."
            )
        window = max((each for each in self.windows or () if each is not None), default=None)
        if axes.cp > 1 and window is not None:
            raise ConfigError(
                f"{setting('model.window', window)} and {setting('mesh.cp', axes.cp)}: attention "
                f"to the tokens of other devices has no window. Use {setting('mesh.cp', 1)}, and "
                f"{setting('mesh.tp')} for long sequences."
            )
