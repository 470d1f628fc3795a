"""Attention scores of queries and keys, and attention with all scores of a sequence in memory.

Shape suffixes: B batch, T tokens, S tokens attended to, N query heads, G kv heads, R = N/G queries
of a kv head, M = R*T, H width of a head; values may have another width.
"""

from dataclasses import dataclass
from functools import partial
from typing import Self

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ppctl.config.groups.transformer_sizes import Architecture

NEVER = -1e30  # score of a token that is not attended to


@dataclass(frozen=True)
class Scoring:
    """Scores of causal attention: score = scale * q.k, then softcap * tanh(score / softcap).

    scale: None means 1/sqrt(H). softcap: None means no cap. window: number of tokens that a token
    attends to, counted back from itself; None means no limit.
    """

    scale: float | None = None
    softcap: float | None = None
    window: int | None = None

    @classmethod
    def of(cls, sizes: Architecture, window: int | None) -> Self:
        """Return the scoring of a transformer's layers with this window; None: no window."""
        divisor = sizes.query_pre_attn_scalar
        return cls(None if divisor is None else divisor**-0.5, sizes.attention_softcap, window)

    def scale_of(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale

    def capped(self, scores: jax.Array) -> jax.Array:
        """Return the capped scores from the scaled scores."""
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)

    def pulled(self, change: jax.Array, capped: jax.Array) -> jax.Array:
        """Return the gradient with respect to the scaled scores.

        change: the gradient with respect to the capped scores. capped: their values.
        """
        return change if self.softcap is None else change * (1 - jnp.square(capped / self.softcap))

    def num_pairs(self, num_tokens: int) -> int:
        """Return the number of pairs (query, key) of a sequence whose score is not masked.

        >>> Scoring().num_pairs(4), Scoring(window=2).num_pairs(4), Scoring(window=9).num_pairs(4)
        (10, 7, 10)
        """
        window = num_tokens if self.window is None else min(self.window, num_tokens)
        return window * (window + 1) // 2 + (num_tokens - window) * window


PLAIN = Scoring()


def plain(
    q_BTNH: jax.Array,
    k_BSGH: jax.Array,
    v_BSGH: jax.Array,
    documents_BT: jax.Array | None = None,
    *,
    scoring: Scoring = PLAIN,
) -> jax.Array:
    """Return attention as matrix products and a softmax."""
    is_attended = _attended(q_BTNH.shape[1], scoring, documents_BT)
    return attend(q_BTNH, k_BSGH, v_BSGH, is_attended, scoring)


def attend(
    q_BTNH: jax.Array,
    k_BSGH: jax.Array,
    v_BSGH: jax.Array,
    is_attended: jax.Array,
    scoring: Scoring,
) -> jax.Array:
    """Return attention [B, T, N, H] with the mask `is_attended`, [T, S] or [B, 1, T, S]."""
    B, T, N, H = q_BTNH.shape
    G = k_BSGH.shape[2]
    q_BTGRH = q_BTNH.reshape(B, T, G, N // G, H) * scoring.scale_of(H)
    q_BGMH = q_BTGRH.transpose(0, 2, 3, 1, 4).reshape(B, G, -1, H)
    scores_BGMS = jnp.einsum("BGMH,BSGH->BGMS", q_BGMH, k_BSGH)
    wide = jnp.promote_types(scores_BGMS.dtype, jnp.float32)
    scores_BGMS = scoring.capped(scores_BGMS.astype(wide))
    is_attended = jnp.tile(is_attended, (N // G, 1))
    weights_BGMS = softmax(jnp.where(is_attended, scores_BGMS, NEVER), v_BSGH.dtype)
    mix_BGMH = jnp.einsum("BGMS,BSGH->BGMH", weights_BGMS, v_BSGH)
    mix_BTGRH = mix_BGMH.reshape(B, G, N // G, T, -1).transpose(0, 3, 1, 2, 4)
    mix_BTNH = mix_BTGRH.reshape(B, T, N, -1)
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


def _attended(T: int, scoring: Scoring, documents_BT: jax.Array | None) -> jax.Array:
    """Return the mask of the keys that a query attends to, [T, S]; with documents [B, 1, T, S]."""
    attended_TS = jnp.tril(jnp.ones((T, T), bool))
    if scoring.window is not None:
        attended_TS = jnp.triu(attended_TS, 1 - scoring.window)
    if documents_BT is not None:
        is_same_BTS = documents_BT[:, :, None] == documents_BT[:, None]
        return (attended_TS & is_same_BTS)[:, None]
    return attended_TS
