"""Sizes and variants of a decoder-only transformer, as its functions read them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax

from ppctl.errors import ConfigError
from ppctl.model.lora import Lora
from ppctl.model.parallel import StageAxes
from ppctl.model.rotary import Rope
from ppctl.model.scoring import Scoring
from ppctl.schedule.partition.division import check_widths

ACTIVATIONS = {
    "gelu": jax.nn.gelu,  # by tanh
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_exact": "gelu_exact"}  # Shazeer 2020


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer: the arguments of `transformer.transformer`, which explains them."""

    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int | None
    mlp_ratio: float
    activation: str
    vocab_size: int
    tied: bool
    rope_theta: float
    head_dim: int | None = None
    mlp_width: int | None = None
    scale_embedding: bool = False
    norm_eps: float = 1e-6
    norm_plus_one: bool = False
    post_norms: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    query_pre_attn_scalar: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    window: int | None = None
    window_pattern: str = "W"
    rope_local_theta: float | None = None
    rope_fraction: float = 1.0
    rope_scaling: str = "none"
    rope_factor: float = 1.0
    rope_original_len: int | None = None
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_attention_factor: float | None = None
    lora: Lora | None = None

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d_model // self.num_heads

    @property
    def hidden_width(self) -> int:
        return round(self.mlp_ratio * self.d_model) if self.mlp_width is None else self.mlp_width

    @property
    def have_windows(self) -> tuple[bool, ...]:
        """Whether each layer has the window."""
        pattern = self.window_pattern
        return tuple(self.window is not None and pattern[l % len(pattern)] == "W" for l in range(self.num_layers))

    def scoring(self, has_window: bool) -> Scoring:
        """Return how layers with the window, or without, score queries and keys."""
        scale = None if self.query_pre_attn_scalar is None else self.query_pre_attn_scalar**-0.5
        return Scoring(scale, self.attention_softcap, self.window if has_window else None)

    def rope(self, has_window: bool) -> Rope:
        """Return the rotary positions of layers with the window, or without."""
        if has_window and self.rope_local_theta is not None:
            return Rope(self.rope_local_theta, self.rope_fraction)
        names = "theta", "fraction", "scaling", "factor", "original_len", "low_freq_factor", "high_freq_factor"
        names += "beta_fast", "beta_slow", "attention_factor"
        return Rope(**{name: getattr(self, f"rope_{name}") for name in names})

    def check_divides(self, axes: StageAxes) -> None:
        """Raise ConfigError for what tp and cp do not divide."""
        check_widths(axes.tp, self.num_heads, self.kv_heads, self.hidden_width)
        if axes.cp > 1 and any(self.have_windows):
            raise ConfigError(
                f"model.window={self.window} and mesh.cp={axes.cp}: parts of a sequence on other devices are attended "
                "to whole. Use mesh.cp=1, and mesh.tp for long sequences."
            )
