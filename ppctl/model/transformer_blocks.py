"""The blocks of a transformer, written with flax nnx.

Shape suffixes: B batch, T tokens, M = B*T, S tokens attended to, D d_model, N query heads, G kv
heads, H width of a head. Matrix products are two-dimensional, [M, in] @ [in, out]: on CPU that is
twice as fast as contracting with head dimensions in the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from ppctl.model.architecture import ACTIVATIONS, GATED, Architecture
from ppctl.model.attention.attention_kernels import Kernel
from ppctl.model.lora import Adapted, Lora
from ppctl.model.parallel import StageAxes, gather, scatter

Drop = Callable[[jax.Array, int], jax.Array]


@dataclass(frozen=True)
class BlockSettings:
    """The settings of a block: sizes, attention, rotary positions, and the axes of its stage."""

    sizes: Architecture
    mix: Kernel
    turn: Callable[[jax.Array], jax.Array]
    axes: StageAxes

    def lora_of(self, module: str) -> Lora | None:
        """Return the adapter of a linear map, or None."""
        lora = self.sizes.lora
        return lora if lora is not None and lora.adapts(module) else None


def linear(
    num_in: int,
    num_out: int,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
    *,
    use_bias: bool = False,
    lora: Lora | None = None,
) -> nnx.Linear:
    if lora is not None:
        return Adapted(num_in, num_out, lora, dtype, rngs, use_bias=use_bias)
    return nnx.Linear(num_in, num_out, use_bias=use_bias, param_dtype=dtype, rngs=rngs)


class NormPlusOne(nnx.Module):
    """RMSNorm that multiplies by 1 + scale, as Gemma's; the sum is in at least float32."""

    def __init__(self, width: int, epsilon: float, dtype: jnp.dtype):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.zeros(width, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        normed = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.epsilon)
        return (normed * (1 + self.scale[...].astype(wide.dtype))).astype(x.dtype)


def norm(
    width: int, sizes: Architecture, dtype: jnp.dtype, rngs: nnx.Rngs
) -> nnx.RMSNorm | NormPlusOne:
    if sizes.norm_plus_one:
        return NormPlusOne(width, sizes.norm_eps, dtype)
    return nnx.RMSNorm(width, epsilon=sizes.norm_eps, param_dtype=dtype, rngs=rngs)


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions (Su et al. 2021; Ainslie et al. 2023).

    Divided over tp, a device has its heads' columns of query, key and value and their rows of out.
    With fewer kv heads than devices, each holds key and value whole and computes the head that its
    queries read. Norms of queries and keys (Henry et al. 2020) are equal for all heads, and whole
    on every device.
    """

    def __init__(self, settings: BlockSettings, dtype: jnp.dtype, rngs: nnx.Rngs):
        sizes, self.axes = settings.sizes, settings.axes
        self.mix, self.turn, self.head_dim = settings.mix, settings.turn, sizes.head_width
        self.num_heads = sizes.num_heads // self.axes.tp
        self.num_kv_heads = max(1, sizes.kv_heads // self.axes.tp)
        self.kv_heads_held = sizes.kv_heads if sizes.kv_heads < self.axes.tp else self.num_kv_heads
        width, kv_width = self.num_heads * self.head_dim, self.kv_heads_held * self.head_dim
        into = partial(linear, sizes.d_model, dtype=dtype, rngs=rngs, use_bias=sizes.qkv_bias)
        self.query = into(width, lora=settings.lora_of("query"))
        self.key = into(kv_width, lora=settings.lora_of("key"))
        self.value = into(kv_width, lora=settings.lora_of("value"))
        self.out = linear(width, sizes.d_model, dtype, rngs, lora=settings.lora_of("out"))
        self.query_norm = norm(self.head_dim, sizes, dtype, rngs) if sizes.qk_norm else None
        self.key_norm = norm(self.head_dim, sizes, dtype, rngs) if sizes.qk_norm else None

    def __call__(
        self, x_MD: jax.Array, num_tokens: int, documents_BT: jax.Array | None = None
    ) -> jax.Array:
        x_MD = gather(x_MD, self.axes)
        kv_shape = (-1, num_tokens, self.num_kv_heads, self.head_dim)
        q_BTNH = self.query(x_MD).reshape(-1, num_tokens, self.num_heads, self.head_dim)
        q_BTNH = self.turn(q_BTNH if self.query_norm is None else self.query_norm(q_BTNH))
        k_BSGH = self._of_kv_heads(self.key, x_MD).reshape(kv_shape)
        k_BSGH = self.turn(k_BSGH if self.key_norm is None else self.key_norm(k_BSGH))
        v_BSGH = self._of_kv_heads(self.value, x_MD).reshape(kv_shape)
        of_documents = () if documents_BT is None else (documents_BT,)
        mixed = self.mix(q_BTNH, k_BSGH, v_BSGH, *of_documents).reshape(x_MD.shape[0], -1)
        return scatter(self.out(mixed), self.axes)

    def _of_kv_heads(self, linear: nnx.Linear, x_MD: jax.Array) -> jax.Array:
        """Return the keys or values of the heads that this device's queries read."""
        if self.kv_heads_held == self.num_kv_heads:
            return linear(x_MD)
        head = jax.lax.axis_index("tp") * self.kv_heads_held // self.axes.tp
        width, take = self.head_dim, jax.lax.dynamic_slice_in_dim
        own = partial(take, start_index=head * width, slice_size=width, axis=-1)
        found = x_MD @ own(linear.kernel[...])
        if isinstance(linear, Adapted):
            found = found + linear.beside(x_MD, own)
        return found if linear.bias is None else found + own(linear.bias[...])


class MLP(nnx.Module):
    """An activation between two matrices, or gated by a third (Shazeer 2020); divided over tp."""

    def __init__(self, settings: BlockSettings, dtype: jnp.dtype, rngs: nnx.Rngs):
        sizes, self.axes = settings.sizes, settings.axes
        d_model, hidden = sizes.d_model, sizes.mlp_width // self.axes.tp
        self.activation = GATED.get(sizes.activation, sizes.activation)
        into = partial(linear, d_model, hidden, dtype, rngs)
        self.up = into(lora=settings.lora_of("up"))
        self.gate = into(lora=settings.lora_of("gate")) if sizes.activation in GATED else None
        self.down = linear(hidden, d_model, dtype, rngs, lora=settings.lora_of("down"))

    def __call__(self, x_MD: jax.Array) -> jax.Array:
        x_MD, act = gather(x_MD, self.axes), ACTIVATIONS[self.activation]
        up = self.up(x_MD)
        hidden = act(up) if self.gate is None else act(self.gate(x_MD)) * up
        return scatter(self.down(hidden), self.axes)


class Block(nnx.Module):
    """Pre-norm residual block: attention, then MLP. [B, T, D] -> [B, T, D], of a device's rows.

    drop: dropout of a branch, rows [M, D], by its number.
    """

    def __init__(self, settings: BlockSettings, dtype: jnp.dtype, rngs: nnx.Rngs):
        sizes, self.axes = settings.sizes, settings.axes
        new_norm = partial(norm, sizes.d_model, sizes, dtype, rngs)
        self.attention_norm = new_norm()
        self.attention = Attention(settings, dtype, rngs)
        self.mlp_norm = new_norm()
        self.mlp = MLP(settings, dtype, rngs)
        self.attention_post_norm = new_norm() if sizes.post_norms else None
        self.mlp_post_norm = new_norm() if sizes.post_norms else None

    def __call__(
        self,
        x_BTD: jax.Array,
        documents_BT: jax.Array | None = None,
        drop: Drop = lambda branch, number: branch,
    ) -> jax.Array:
        B, T, D = x_BTD.shape
        x_MD = x_BTD.reshape(B * T, D)
        mixed = self.attention(self.attention_norm(x_MD), T * self.axes.row_parts, documents_BT)
        post_norm = self.attention_post_norm
        x_MD = x_MD + drop(mixed if post_norm is None else post_norm(mixed), 0)
        out = self.mlp(self.mlp_norm(x_MD))
        x_MD = x_MD + drop(out if self.mlp_post_norm is None else self.mlp_post_norm(out), 1)
        return x_MD.reshape(B, T, D)
