"""Attention with all scores of a sequence in memory: matrix products and a softmax.

Shape suffixes: B batch, T tokens, S tokens attended to, N query heads, G kv heads, R = N/G queries
of a kv head, M = R*T, H width of a head.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ppctl.model.attention_scores import NEVER, PLAIN, Scoring


def plain(
    q_BTNH: jax.Array,
    k_BSGH: jax.Array,
    v_BSGH: jax.Array,
    documents_BT: jax.Array | None = None,
    *,
    scoring: Scoring = PLAIN,
) -> jax.Array:
    """Return attention as matrix products and a softmax."""
    B, T, N, H = q_BTNH.shape
    G = k_BSGH.shape[2]
    q_BTGRH = q_BTNH.reshape(B, T, G, N // G, H) * scoring.scale_of(H)
    q_BGMH = q_BTGRH.transpose(0, 2, 3, 1, 4).reshape(B, G, -1, H)
    scores_BGMS = jnp.einsum("BGMH,BSGH->BGMS", q_BGMH, k_BSGH)
    wide = jnp.promote_types(scores_BGMS.dtype, jnp.float32)
    scores_BGMS = scoring.capped(scores_BGMS.astype(wide))
    is_attended = _attended(T, T, N // G, scoring, documents_BT)
    weights_BGMS = softmax(jnp.where(is_attended, scores_BGMS, NEVER), v_BSGH.dtype)
    mix_BGMH = jnp.einsum("BGMS,BSGH->BGMH", weights_BGMS, v_BSGH)
    mix_BTNH = mix_BGMH.reshape(B, G, N // G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
    return checkpoint_name(mix_BTNH, "saved")


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def softmax(scores: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the softmax over the last axis in `dtype`; its derivative reads only the result."""
    return jax.nn.softmax(scores).astype(dtype)


@softmax.defjvp
def _softmax_jvp(dtype: jnp.dtype, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    (scores,), (change,) = primals, tangents
    weights = checkpoint_name(softmax(scores, dtype), "saved")
    wide = weights.astype(scores.dtype)
    return weights, (wide * (change - jnp.sum(wide * change, -1, keepdims=True))).astype(dtype)


def forward(
    q_BTNH: jax.Array, k_BSGH: jax.Array, v_BSGH: jax.Array, causal: bool, scoring: Scoring = PLAIN
) -> tuple[jax.Array, jax.Array]:
    scores_BGMS, _ = _scores(q_BTNH, k_BSGH, causal, scoring)
    log_sums_BGM = jax.nn.logsumexp(scores_BGMS, axis=-1)
    weights_BGMS = jnp.exp(scores_BGMS - log_sums_BGM[..., None]).astype(v_BSGH.dtype)
    mix_BGMH = jnp.einsum("BGMS,BSGH->BGMH", weights_BGMS, v_BSGH)
    B, T, N, _ = q_BTNH.shape
    return _from_groups(mix_BGMH, q_BTNH.shape), log_sums_BGM.reshape(B, N, T)


def backward(
    q_BTNH: jax.Array,
    k_BSGH: jax.Array,
    v_BSGH: jax.Array,
    out_BTNH: jax.Array,
    log_sums_BNT: jax.Array,
    g_BTNH: jax.Array,
    causal: bool,
    scoring: Scoring = PLAIN,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of q, k and v, from results of `forward` and the output's gradient."""
    scores_BGMS, capped_BGMS = _scores(q_BTNH, k_BSGH, causal, scoring)
    wide, scale, G = scores_BGMS.dtype, scoring.scale_of(q_BTNH.shape[3]), k_BSGH.shape[2]
    weights_BGMS = jnp.exp(scores_BGMS - log_sums_BNT.reshape(*scores_BGMS.shape[:3], 1))
    q_BGMH, g_BGMH, out_BGMH = (_to_groups(a, G) for a in (q_BTNH, g_BTNH, out_BTNH))
    # gradient times output of each query
    drift_BGM = jnp.sum(g_BGMH.astype(wide) * out_BGMH.astype(wide), -1)
    product = partial(jnp.einsum, preferred_element_type=wide)
    change = weights_BGMS * (product("BGMH,BSGH->BGMS", g_BGMH, v_BSGH) - drift_BGM[..., None])
    change = (scoring.pulled(change, capped_BGMS) * scale).astype(q_BTNH.dtype)
    dq = _from_groups(product("BGMS,BSGH->BGMH", change, k_BSGH), q_BTNH.shape)
    dk = product("BGMS,BGMH->BSGH", change, q_BGMH)
    return dq, dk, product("BGMS,BGMH->BSGH", weights_BGMS.astype(g_BTNH.dtype), g_BGMH)


def _scores(
    q_BTNH: jax.Array, k_BSGH: jax.Array, causal: bool, scoring: Scoring
) -> tuple[jax.Array, jax.Array]:
    """Return scores [B, G, M, S] in at least float32, and the same unmasked."""
    _, T, N, H = q_BTNH.shape
    S, G = k_BSGH.shape[1:3]
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    q_BGMH = _to_groups(q_BTNH, G)
    scores_BGMS = jnp.einsum("BGMH,BSGH->BGMS", q_BGMH, k_BSGH, preferred_element_type=wide)
    capped_BGMS = scoring.capped(scores_BGMS * scoring.scale_of(H))
    if not causal:
        return capped_BGMS, capped_BGMS
    return jnp.where(_attended(T, S, N // G, scoring), capped_BGMS, NEVER), capped_BGMS


def _attended(
    T: int, S: int, R: int, scoring: Scoring, documents_BT: jax.Array | None = None
) -> jax.Array:
    """Return whether a query attends to a key, [M, S]; with documents [B, 1, M, S]."""
    attended_TS = jnp.tril(jnp.ones((T, S), bool))
    if scoring.window is not None:
        attended_TS = jnp.triu(attended_TS, 1 - scoring.window)
    if documents_BT is not None:
        is_same_BTS = documents_BT[:, :, None] == documents_BT[:, None]
        attended_TS = (attended_TS & is_same_BTS)[:, None]  # [B, 1, T, S]
    return jnp.tile(attended_TS, (R, 1))


def _to_groups(a_BTNH: jax.Array, G: int) -> jax.Array:
    """Return [B, G, M, H]."""
    B, T, N, H = a_BTNH.shape
    return a_BTNH.reshape(B, T, G, N // G, H).transpose(0, 2, 3, 1, 4).reshape(B, G, -1, H)


def _from_groups(a_BGMH: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    B, T, N, H = shape
    return a_BGMH.reshape(B, N, T, H).transpose(0, 2, 1, 3)
