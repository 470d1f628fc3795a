"""Decoder-only transformer on the stack protocol, layers written with flax nnx.

Shape suffixes: B batch, T tokens, M = B*T, S tokens attended to, D d_model, N query heads, G kv heads, R = N/G queries
of a kv head, H width of a head, V vocabulary. Matrix products are two-dimensional, [M, in] @ [in, out]: on CPU that is
twice as fast as contracting with head dimensions in the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from ppctl.errors import ConfigError
from ppctl.model.attention import Kernel, attention
from ppctl.model.cross_entropy import NO_TOKEN, cross_entropy, logits
from ppctl.model.packing import documents_of, num_rows, split_starts, with_starts
from ppctl.model.parallel import WHOLE, StageAxes, gather, on_first, own_tokens, scatter, shard_of
from ppctl.model.stack import Stack, Tree, init

EMBED_STD = 0.02
Rotate = Callable[..., jax.Array]  # (x [B, T, N, H], theta, axes of the stage) -> the same turned by position


def _linear(num_in: int, num_out: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(num_in, num_out, use_bias=False, param_dtype=dtype, rngs=rngs)


def _norm(width: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(width, param_dtype=dtype, rngs=rngs)


class Attention(nnx.Module):
    """Causal grouped-query self-attention with rotary positions (Su et al. 2021; Ainslie et al. 2023).

    Divided over tp, a device has its heads' columns of query, key and value and their rows of out. Where there are
    fewer kv heads than devices, each holds key and value whole and computes the head that its queries read.
    """

    def __init__(self, settings: dict, dtype, rngs: nnx.Rngs):
        d_model, num_heads, num_kv_heads = (settings[key] for key in ("d_model", "num_heads", "num_kv_heads"))
        self.axes: StageAxes = settings["axes"]
        self.mix, self.rotate = (
            settings["mix"],
            partial(settings["rotate"], theta=settings["rope_theta"], axes=self.axes),
        )
        self.head_dim = d_model // num_heads
        self.num_heads, self.num_kv_heads = num_heads // self.axes.tp, max(1, num_kv_heads // self.axes.tp)
        self.kv_heads_held = num_kv_heads if num_kv_heads < self.axes.tp else self.num_kv_heads
        width, kv_width = self.num_heads * self.head_dim, self.kv_heads_held * self.head_dim
        self.query = _linear(d_model, width, dtype, rngs)
        self.key = _linear(d_model, kv_width, dtype, rngs)
        self.value = _linear(d_model, kv_width, dtype, rngs)
        self.out = _linear(width, d_model, dtype, rngs)

    def __call__(self, x_MD: jax.Array, num_tokens: int, documents_BT: jax.Array | None = None) -> jax.Array:
        x_MD = gather(x_MD, self.axes)
        kv_shape = (-1, num_tokens, self.num_kv_heads, self.head_dim)
        q_BTNH = self.rotate(self.query(x_MD).reshape(-1, num_tokens, self.num_heads, self.head_dim))
        k_BSGH = self.rotate(self._of_kv_heads(self.key, x_MD).reshape(kv_shape))
        v_BSGH = self._of_kv_heads(self.value, x_MD).reshape(kv_shape)
        of_documents = () if documents_BT is None else (documents_BT,)
        mixed = self.mix(q_BTNH, k_BSGH, v_BSGH, *of_documents).reshape(x_MD.shape[0], -1)
        return scatter(self.out(mixed), self.axes)

    def _of_kv_heads(self, linear: nnx.Linear, x_MD: jax.Array) -> jax.Array:
        """Return the keys or the values of the heads that this device's queries read."""
        if self.kv_heads_held == self.num_kv_heads:
            return linear(x_MD)
        head = jax.lax.axis_index("tp") * self.kv_heads_held // self.axes.tp
        return x_MD @ jax.lax.dynamic_slice_in_dim(linear.kernel[...], head * self.head_dim, self.head_dim, axis=1)


def rotate(x_BTNH: jax.Array, theta: float, axes: StageAxes = WHOLE) -> jax.Array:
    """Rotary position embedding: pair (i, i + H/2) at position t is turned by t * theta**(-2i/H)."""
    angle = _angles(x_BTNH, theta, axes)[:, None]
    cos, sin = (_own(table, x_BTNH, axes) for table in (np.cos(angle), np.sin(angle)))
    a, b = jnp.split(x_BTNH, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def rotate_reversed(x_BTNH: jax.Array, theta: float, axes: StageAxes = WHOLE) -> jax.Array:
    """`rotate` to the bit, by halves in reverse order: no slices and concatenations, in the gradient neither.

    Those are arrays of their own on accelerators; on CPU they are faster (1.06 to 1.28 times, with the product before).
    """
    angle = _angles(x_BTNH, theta, axes)[:, None, None]
    tables = np.cos(angle), np.concatenate([-np.sin(angle), np.sin(angle)], axis=-2)
    cos, sin = (_own(table, x_BTNH, axes) for table in tables)
    halves = x_BTNH.reshape(*x_BTNH.shape[:-1], 2, -1)
    return (halves * cos + jax.lax.rev(halves, (halves.ndim - 2,)) * sin).reshape(x_BTNH.shape)


def _own(table: np.ndarray, x_BTNH: jax.Array, axes: StageAxes) -> jax.Array:
    """Return the rows of this device's tokens of a table of all positions."""
    return own_tokens(jnp.asarray(table, x_BTNH.dtype), axes, dim=0)


def _angles(x_BTNH: jax.Array, theta: float, axes: StageAxes) -> np.ndarray:
    """Return [T, H/2] angles of all devices' tokens: numpy, as jax operations would be computed again in every tick."""
    T, half = x_BTNH.shape[1] * axes.cp, x_BTNH.shape[-1] // 2
    return np.arange(T)[:, None] * theta ** (-np.arange(half) / half)


def rotation(device: Any = None) -> Rotate:
    """Return `rotate` as a device has it fastest; None: the first that is here."""

    def turn(x_BTNH: jax.Array, theta: float, axes: StageAxes = WHOLE) -> jax.Array:
        platform = (jax.devices()[0] if device is None else device).platform
        return (rotate if platform == "cpu" else rotate_reversed)(x_BTNH, theta, axes)

    return turn


class MLP(nnx.Module):
    """GELU MLP (two matrices) or SwiGLU (three; Shazeer 2020). Over tp a device has hidden/tp columns and rows."""

    def __init__(self, d_model: int, hidden: int, activation: str, axes: StageAxes, dtype, rngs: nnx.Rngs):
        self.axes, hidden = axes, hidden // axes.tp
        self.up = _linear(d_model, hidden, dtype, rngs)
        self.gate = _linear(d_model, hidden, dtype, rngs) if activation == "swiglu" else None
        self.down = _linear(hidden, d_model, dtype, rngs)

    def __call__(self, x_MD: jax.Array) -> jax.Array:
        x_MD = gather(x_MD, self.axes)
        up = self.up(x_MD)
        return scatter(
            self.down(jax.nn.gelu(up) if self.gate is None else jax.nn.silu(self.gate(x_MD)) * up), self.axes
        )


class Block(nnx.Module):
    """Pre-norm residual block: attention, then MLP. [B, T, D] -> [B, T, D], of the rows that a device holds."""

    def __init__(self, settings: dict, dtype, rngs: nnx.Rngs):
        D = settings["d_model"]
        self.attention_norm = _norm(D, dtype, rngs)
        self.attention = Attention(settings, dtype, rngs)
        self.mlp_norm = _norm(D, dtype, rngs)
        self.axes: StageAxes = settings["axes"]
        self.mlp = MLP(D, round(settings["mlp_ratio"] * D), settings["activation"], self.axes, dtype, rngs)

    def __call__(self, x_BTD: jax.Array, documents_BT: jax.Array | None = None) -> jax.Array:
        B, T, D = x_BTD.shape
        x_MD = x_BTD.reshape(B * T, D)
        num_tokens = T * self.axes.row_parts
        x_MD = x_MD + self.attention(self.attention_norm(x_MD), num_tokens, documents_BT)
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
    mix: Callable[[StageAxes], Kernel] | None = None,
    rotate: Rotate | None = None,
    packed: bool = False,
    axes: StageAxes = WHOLE,
) -> Stack:
    """Return the stack of a decoder-only language model: num_layers pre-norm blocks between embedding and head.

    inputs and targets: int32 [B, T], tokens below vocab_size; x: [B, T, d_model]. T is any number of tokens. A target
    that is NO_TOKEN counts neither in the sum of losses nor in their number.
    d_model must be a multiple of num_heads, with an even quotient (rotary positions), and num_heads of num_kv_heads
    (None: as many as num_heads). mlp_ratio: width of the MLP over d_model. activation: gelu | swiglu. tied: the head's
    matrix is the embedding's. rope_theta: base of the rotary wavelengths. dtype: of the parameters.
    packed: inputs may hold several documents, see `ppctl.model.packing`; x has rows that say where they start.
    mix: attention on a stage's axes, rotate: rotary positions; None: as the device that is here has them.
    axes: how a stage is divided; the functions of a divided one are those of one device (`Stack.divided`).
    The loss is cross-entropy in nats, one a token, in at least float32. Sizes that do not fit fail in tracing, with the
    error of the operation; those that tp does not divide raise ConfigError.
    """
    given = {name: value for name, value in locals().items() if name != "axes"}
    if packed and axes.cp > 1:
        raise ConfigError(
            f"mesh.cp={axes.cp} divides a sequence over devices, but with data.packing=true attention stays within "
            "documents, which no kernel does across devices. Use mesh.cp=1, or data.packing=false."
        )
    _check_divides(axes, num_heads, num_kv_heads or num_heads, round(mlp_ratio * d_model))
    block_settings = {
        "d_model": d_model,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads or num_heads,
        "rope_theta": rope_theta,
        "mix": attention("auto", axes=axes) if mix is None else mix(axes),
        "rotate": rotation() if rotate is None else rotate,
        "mlp_ratio": mlp_ratio,
        "activation": activation,
        "axes": axes,
    }
    block_graph = nnx.graphdef(nnx.eval_shape(lambda: Block(block_settings, dtype, nnx.Rngs(0))))
    ends_graph = nnx.graphdef(nnx.eval_shape(lambda: Ends(d_model, vocab_size, tied, dtype, nnx.Rngs(0))))

    def init_layer(key: jax.Array, _: jax.Array) -> Tree:
        return nnx.to_pure_dict(nnx.state(Block(block_settings, dtype, nnx.Rngs(key)), nnx.Param))

    def init_ends(key: jax.Array) -> Tree:
        return nnx.to_pure_dict(nnx.state(Ends(d_model, vocab_size, tied, dtype, nnx.Rngs(key)), nnx.Param))

    def embed(ends: Tree, inputs_BT: jax.Array) -> jax.Array:
        if not packed:
            return embed_ids(ends, own_tokens(inputs_BT, axes))
        ids_BT, is_first_BT = split_starts(inputs_BT)
        return with_starts(embed_ids(ends, own_tokens(ids_BT, axes)), own_tokens(is_first_BT, axes))

    def embed_ids(ends: Tree, ids_BT: jax.Array) -> jax.Array:
        if axes.tp == 1:
            return ends["embedding"][ids_BT]
        table = ends["embedding"]
        ids_BT = ids_BT - shard_of(table.shape[0], "tp", axes.tp)
        is_here = (ids_BT >= 0) & (ids_BT < table.shape[0])
        x_BTD = jnp.where(is_here[..., None], table[jnp.clip(ids_BT, 0, table.shape[0] - 1)], 0)
        return scatter(x_BTD.reshape(-1, d_model), axes).reshape(ids_BT.shape[0], -1, d_model)

    def layer(params: Tree, x_BTD: jax.Array) -> jax.Array:
        block = nnx.merge(block_graph, params)
        if not packed:
            return block(x_BTD)
        rows = num_rows(x_BTD.shape, axes.row_parts)
        x_BTD, marks = x_BTD[:, :rows], x_BTD[:, rows:]
        return jnp.concatenate([block(x_BTD, documents_of(marks, rows * axes.row_parts)), marks], axis=1)

    def normed(ends: Tree, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(ends_graph, ends)
        x_BTD = x_BTD[:, : num_rows(x_BTD.shape, axes.row_parts)] if packed else x_BTD
        return model.norm(x_BTD.reshape(-1, d_model)), (model.embedding if tied else model.head)[...]

    def outputs(ends: Tree, x_BTD: jax.Array) -> jax.Array:
        return logits(*normed(ends, x_BTD), is_tied=tied).reshape(x_BTD.shape[0], -1, vocab_size)

    def head(ends: Tree, x_BTD: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_MD, w = normed(ends, x_BTD)
        if axes.num_devices == 1:
            loss = cross_entropy(x_MD, w, targets_BT.reshape(-1), is_tied=tied)
            return loss, (targets_BT != NO_TOKEN).sum().astype(loss.dtype)
        targets_M = own_tokens(targets_BT, axes, fill=NO_TOKEN).reshape(-1)
        loss = cross_entropy(gather(x_MD, axes), w, targets_M, is_tied=tied, vocabulary=(vocab_size, axes.tp))
        return loss, on_first((targets_M != NO_TOKEN).sum().astype(loss.dtype), axes)

    def divided(axes: StageAxes) -> Stack:
        return transformer(**given, axes=axes)

    stack = Stack(num_layers, init_ends, init_layer, embed, layer, head, mixes_examples=False, outputs=outputs)
    sharding = (
        None if axes.tp == 1 else _sharding(jax.eval_shape(lambda: init(stack, 0)), axes, num_kv_heads or num_heads)
    )
    return replace(stack, divided=divided, sharding=sharding)


def _check_divides(axes: StageAxes, num_heads: int, num_kv_heads: int, hidden: int) -> None:
    """Raise ConfigError for widths that tp does not divide."""
    tp = axes.tp
    for name, size in (("model.num_heads", num_heads), ("the width of the MLP", hidden)):
        if size % tp:
            fitting = ", ".join(str(n) for n in range(2, tp) if num_heads % n == 0 and hidden % n == 0)
            raise ConfigError(
                f"{name}={size} is not a multiple of mesh.tp={tp}: each device has whole heads and as many columns. "
                f"Use mesh.tp={fitting or 1}, or other sizes of the model."
            )
    if num_kv_heads % tp and tp % num_kv_heads:
        raise ConfigError(
            f"model.num_kv_heads={num_kv_heads} and mesh.tp={tp}: neither is a multiple of the other, so that devices "
            "would share heads unevenly. Use a mesh.tp that divides it, or is a multiple of it."
        )


def _sharding(params: Tree, axes: StageAxes, num_kv_heads: int) -> Tree:
    """Return the PartitionSpecs over tp: columns, then rows; embedding and head by the vocabulary."""
    columns, rows = P(None, "tp"), P("tp")
    kv = columns if num_kv_heads >= axes.tp else P()
    of_module = {"query": columns, "key": kv, "value": kv, "out": rows, "up": columns, "gate": columns, "down": rows}

    def spec(path: tuple, _: Any) -> P:
        names = [key.key for key in path]
        if names[0] == "ends":
            return {"embedding": rows, "head": columns}.get(names[1], P())
        return of_module.get(names[-2], P())

    return jax.tree_util.tree_map_with_path(spec, params)
