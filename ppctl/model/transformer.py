"""Decoder-only transformer on the stack protocol, layers written with flax nnx.

Shape suffixes: B batch, T tokens, M = B*T, S tokens attended to, D d_model, N query heads, G kv heads, R = N/G queries
of a kv head, H width of a head, V vocabulary. Matrix products are two-dimensional, [M, in] @ [in, out]: on CPU that is
twice as fast as contracting with head dimensions in the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ppctl.model.attention import Kernel, attention
from ppctl.model.cross_entropy import cross_entropy, logits
from ppctl.model.stack import Stack, Tree

EMBED_STD = 0.02
Rotate = Callable[[jax.Array, float], jax.Array]  # (x [B, T, N, H], theta) -> the same turned by position


def _linear(num_in: int, num_out: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(num_in, num_out, use_bias=False, param_dtype=dtype, rngs=rngs)


def _norm(width: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(width, param_dtype=dtype, rngs=rngs)


class Attention(nnx.Module):
    """Causal grouped-query self-attention with rotary positions (Su et al. 2021; Ainslie et al. 2023)."""

    def __init__(self, settings: dict, dtype, rngs: nnx.Rngs):
        d_model, self.num_heads, self.num_kv_heads = (settings[key] for key in ("d_model", "num_heads", "num_kv_heads"))
        self.mix, self.rotate = settings["mix"], partial(settings["rotate"], theta=settings["rope_theta"])
        self.head_dim = d_model // self.num_heads
        kv_width = self.num_kv_heads * self.head_dim
        self.query = _linear(d_model, d_model, dtype, rngs)
        self.key = _linear(d_model, kv_width, dtype, rngs)
        self.value = _linear(d_model, kv_width, dtype, rngs)
        self.out = _linear(d_model, d_model, dtype, rngs)

    def __call__(self, x_MD: jax.Array, num_tokens: int) -> jax.Array:
        kv_shape = (-1, num_tokens, self.num_kv_heads, self.head_dim)
        q_BTNH = self.rotate(self.query(x_MD).reshape(-1, num_tokens, self.num_heads, self.head_dim))
        k_BSGH = self.rotate(self.key(x_MD).reshape(kv_shape))
        v_BSGH = self.value(x_MD).reshape(kv_shape)
        return self.out(self.mix(q_BTNH, k_BSGH, v_BSGH).reshape(x_MD.shape))


def rotate(x_BTNH: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding: pair (i, i + H/2) at position t is turned by t * theta**(-2i/H)."""
    angle = _angles(x_BTNH, theta)[:, None]
    cos, sin = (jnp.asarray(table, x_BTNH.dtype) for table in (np.cos(angle), np.sin(angle)))
    a, b = jnp.split(x_BTNH, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def rotate_reversed(x_BTNH: jax.Array, theta: float) -> jax.Array:
    """`rotate` to the bit, by halves in reverse order: no slices and concatenations, in the gradient neither.

    Those are arrays of their own on accelerators; on CPU they are faster (1.06 to 1.28 times, with the product before).
    """
    angle = _angles(x_BTNH, theta)[:, None, None]
    tables = np.cos(angle), np.concatenate([-np.sin(angle), np.sin(angle)], axis=-2)
    cos, sin = (jnp.asarray(table, x_BTNH.dtype) for table in tables)
    halves = x_BTNH.reshape(*x_BTNH.shape[:-1], 2, -1)
    return (halves * cos + jax.lax.rev(halves, (halves.ndim - 2,)) * sin).reshape(x_BTNH.shape)


def _angles(x_BTNH: jax.Array, theta: float) -> np.ndarray:
    """Return [T, H/2] angles: numpy, as jax operations would be computed again in every tick."""
    T, half = x_BTNH.shape[1], x_BTNH.shape[-1] // 2
    return np.arange(T)[:, None] * theta ** (-np.arange(half) / half)


def rotation(device: Any = None) -> Rotate:
    """Return `rotate` as a device has it fastest; None: the first that is here."""

    def turn(x_BTNH: jax.Array, theta: float) -> jax.Array:
        platform = (jax.devices()[0] if device is None else device).platform
        return (rotate if platform == "cpu" else rotate_reversed)(x_BTNH, theta)

    return turn


class MLP(nnx.Module):
    """GELU MLP (two matrices) or SwiGLU (three; Shazeer 2020)."""

    def __init__(self, d_model: int, hidden: int, activation: str, dtype, rngs: nnx.Rngs):
        self.up = _linear(d_model, hidden, dtype, rngs)
        self.gate = _linear(d_model, hidden, dtype, rngs) if activation == "swiglu" else None
        self.down = _linear(hidden, d_model, dtype, rngs)

    def __call__(self, x_MD: jax.Array) -> jax.Array:
        up = self.up(x_MD)
        return self.down(jax.nn.gelu(up) if self.gate is None else jax.nn.silu(self.gate(x_MD)) * up)


class Block(nnx.Module):
    """Pre-norm residual block: attention, then MLP. [B, T, D] -> [B, T, D]."""

    def __init__(self, settings: dict, dtype, rngs: nnx.Rngs):
        D = settings["d_model"]
        self.attention_norm = _norm(D, dtype, rngs)
        self.attention = Attention(settings, dtype, rngs)
        self.mlp_norm = _norm(D, dtype, rngs)
        self.mlp = MLP(D, round(settings["mlp_ratio"] * D), settings["activation"], dtype, rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        B, T, D = x_BTD.shape
        x_MD = x_BTD.reshape(B * T, D)
        x_MD = x_MD + self.attention(self.attention_norm(x_MD), T)
        x_MD = x_MD + self.mlp(self.mlp_norm(x_MD))
        return x_MD.reshape(B, T, D)


class Ends(nnx.Module):
    """Token embedding, final norm, and the head's matrix unless it is tied to the embedding."""

    def __init__(self, d_model: int, vocab_size: int, tied: bool, dtype, rngs: nnx.Rngs):
        init = nnx.initializers.normal(EMBED_STD)
        self.embedding = nnx.Param(init(rngs.params(), (vocab_size, d_model), dtype))
        self.norm = _norm(d_model, dtype, rngs)
        self.head = None if tied else nnx.Param(init(rngs.params(), (d_model, vocab_size), dtype))


def transformer(
    *,
    num_layers: int,
    d_model: int,
    num_heads: int,
    num_kv_heads: int | None,
    mlp_ratio: float,
    activation: str,
    vocab_size: int,
    tied: bool,
    rope_theta: float,
    dtype: jnp.dtype,
    mix: Kernel | None = None,
    rotate: Rotate | None = None,
) -> Stack:
    """Return the stack of a decoder-only language model: num_layers pre-norm blocks between embedding and head.

    inputs and targets: int32 [B, T], tokens below vocab_size; x: [B, T, d_model]. T is any number of tokens.
    d_model must be a multiple of num_heads, with an even quotient (rotary positions), and num_heads of num_kv_heads
    (None: as many as num_heads). mlp_ratio: width of the MLP over d_model. activation: gelu | swiglu. tied: the head's
    matrix is the embedding's. rope_theta: base of the rotary wavelengths. dtype: of the parameters.
    mix: attention, rotate: rotary positions; None: as the device that is here has them.
    The loss is cross-entropy in nats, one a token, in at least float32. Sizes that do not fit fail in tracing, with the
    error of the operation.
    """
    block_settings = {
        "d_model": d_model,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads or num_heads,
        "rope_theta": rope_theta,
        "mix": attention("auto") if mix is None else mix,
        "rotate": rotation() if rotate is None else rotate,
        "mlp_ratio": mlp_ratio,
        "activation": activation,
    }
    block_graph = nnx.graphdef(nnx.eval_shape(lambda: Block(block_settings, dtype, nnx.Rngs(0))))
    ends_graph = nnx.graphdef(nnx.eval_shape(lambda: Ends(d_model, vocab_size, tied, dtype, nnx.Rngs(0))))

    def init_layer(key: jax.Array, _: jax.Array) -> Tree:
        return nnx.to_pure_dict(nnx.state(Block(block_settings, dtype, nnx.Rngs(key)), nnx.Param))

    def init_ends(key: jax.Array) -> Tree:
        return nnx.to_pure_dict(nnx.state(Ends(d_model, vocab_size, tied, dtype, nnx.Rngs(key)), nnx.Param))

    def embed(ends: Tree, inputs_BT: jax.Array) -> jax.Array:
        return ends["embedding"][inputs_BT]

    def layer(params: Tree, x_BTD: jax.Array) -> jax.Array:
        return nnx.merge(block_graph, params)(x_BTD)

    def normed(ends: Tree, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(ends_graph, ends)
        return model.norm(x_BTD.reshape(-1, d_model)), (model.embedding if tied else model.head)[...]

    def outputs(ends: Tree, x_BTD: jax.Array) -> jax.Array:
        return logits(*normed(ends, x_BTD), is_tied=tied).reshape(*x_BTD.shape[:2], vocab_size)

    def head(ends: Tree, x_BTD: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_MD, w = normed(ends, x_BTD)
        loss = cross_entropy(x_MD, w, targets_BT.reshape(-1), is_tied=tied)
        return loss, jnp.asarray(targets_BT.size, loss.dtype)

    return Stack(num_layers, init_ends, init_layer, embed, layer, head, mixes_examples=False, outputs=outputs)
