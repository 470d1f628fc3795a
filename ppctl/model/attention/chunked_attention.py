"""Attention with an online softmax over blocks of keys: memory is linear in the tokens.

Source: Milakov and Gimelshein 2018; the backward: Dao et al. 2022. Shape suffixes: B batch, T
tokens, S tokens attended to, N query heads, G kv heads, R = N/G queries of a kv head, H width of a
head; K number of blocks, C tokens of a block. Values may have another width.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppctl.model.attention.attention_scores import NEVER, PLAIN, Scoring

BLOCK = 256  # tokens a block


def forward(
    q_BTNH: jax.Array,
    k_BSGH: jax.Array,
    v_BSGH: jax.Array,
    causal: bool = True,
    scoring: Scoring = PLAIN,
    documents_BT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return (output [B, T, N, H], logarithms of the softmax's sums [B, N, T]).

    causal: T = S, and no query attends to a later key. documents_BT: each token's document.
    """
    blocks = _Blocks(q_BTNH, k_BSGH, v_BSGH, causal, scoring, documents_BT)
    q, v, wide, product = blocks.q, blocks.v, blocks.wide, blocks.product

    # 1. a pair of blocks of queries and keys
    def one_pair(carry: tuple, pair: tuple) -> tuple[tuple, None]:
        mix, total, largest = carry
        i, j = pair
        scores, _ = blocks.scores(i, j)
        before, own = largest[i], scores.max(-1)
        now = jnp.maximum(before, own)
        weights, shrink = jnp.exp(scores - now[..., None]), jnp.exp(before - now)
        added = product("BGRCS,BSGH->BGRCH", weights.astype(v.dtype), v[j])
        mix = mix.at[i].set(mix[i] * shrink[..., None] + added)
        total = total.at[i].set(total[i] * shrink + weights.sum(-1))
        return (mix, total, largest.at[i].set(now)), None

    # 2. all pairs in turn
    sums = q.shape[:-1]
    mixed = jnp.zeros((*sums, v.shape[-1]), wide)
    start = mixed, jnp.zeros(sums, wide), jnp.full(sums, NEVER, wide)
    (mix, total, largest), _ = jax.lax.scan(one_pair, start, blocks.pairs)
    log_sums = (largest + jnp.log(total))[..., None]
    log_sums_BTN1 = _from_query_blocks(log_sums, q_BTNH)
    out_BTNH = _from_query_blocks((mix / total[..., None]).astype(q.dtype), q_BTNH)
    return out_BTNH, log_sums_BTN1[..., 0].swapaxes(1, 2)


def backward(
    q_BTNH: jax.Array,
    k_BSGH: jax.Array,
    v_BSGH: jax.Array,
    out_BTNH: jax.Array,
    log_sums_BNT: jax.Array,
    g_BTNH: jax.Array,
    causal: bool = True,
    scoring: Scoring = PLAIN,
    documents_BT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of q, k and v.

    out, log_sums: results of `forward`. g: gradient of the output.
    """
    # 1. blocks
    blocks = _Blocks(q_BTNH, k_BSGH, v_BSGH, causal, scoring, documents_BT)
    q, k, v, wide, product = blocks.q, blocks.k, blocks.v, blocks.wide, blocks.product
    log_sums = _query_blocks(log_sums_BNT.swapaxes(1, 2)[..., None], k_BSGH)[..., 0]
    g, out = _query_blocks(g_BTNH, k_BSGH), _query_blocks(out_BTNH, k_BSGH)
    drift = jnp.sum(g.astype(wide) * out.astype(wide), -1)  # sums over H of gradient times output

    # 2. a pair of blocks of queries and keys
    def one_pair(carry: tuple, pair: tuple) -> tuple[tuple, None]:
        dq, dk, dv = carry
        i, j = pair
        scores, capped = blocks.scores(i, j)
        weights = jnp.exp(scores - log_sums[i][..., None])
        dv = dv.at[j].add(product("BGRCS,BGRCH->BSGH", weights.astype(g.dtype), g[i]))
        change = weights * (product("BGRCH,BSGH->BGRCS", g[i], v[j]) - drift[i][..., None])
        change = (scoring.pulled(change, capped) * scoring.scale_of(q.shape[-1])).astype(q.dtype)
        dk = dk.at[j].add(product("BGRCS,BGRCH->BSGH", change, q[i]))
        return (dq.at[i].add(product("BGRCS,BSGH->BGRCH", change, k[j])), dk, dv), None

    # 3. all pairs in turn
    start = tuple(jnp.zeros(a.shape, wide) for a in (q, k, v))
    (dq, dk, dv), _ = jax.lax.scan(one_pair, start, blocks.pairs)
    dk_BSGH = _from_key_blocks(dk.astype(k.dtype), k_BSGH.shape)
    dv_BSGH = _from_key_blocks(dv.astype(k.dtype), v_BSGH.shape)
    return _from_query_blocks(dq.astype(q.dtype), q_BTNH), dk_BSGH, dv_BSGH


class _Blocks:
    """Queries, keys and values in blocks, and the scores of pairs of blocks."""

    def __init__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        causal: bool,
        scoring: Scoring,
        documents: Any,
    ):
        is_plain = documents is None and scoring.window is None
        assert causal or is_plain, "only causal attention has documents or a window"
        self.q, self.k, self.v = _query_blocks(q, k), _key_blocks(k), _key_blocks(v)
        self.documents = None if documents is None else _padded(documents).swapaxes(0, 1)
        self.causal, self.scoring, self.num_keys = causal, scoring, k.shape[1]
        self.wide = jnp.promote_types(q.dtype, jnp.float32)
        self.product = partial(jnp.einsum, preferred_element_type=self.wide)

    @property
    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs (i, j) of a query block and a key block to compute, ordered by i.

        For causal attention j <= i. Pairs wholly outside the window are left out.
        """
        i, j = np.indices((len(self.q), len(self.k))).reshape(2, -1)
        if self.causal:
            i, j = np.tril_indices(len(self.q))
        if self.scoring.window is not None:
            # distance from the last key of block j < i to the first query of block i
            is_near = (i - j - 1) * self.k.shape[2] + 1 < self.scoring.window
            i, j = i[is_near], j[is_near]
        return i.astype(np.int32), j.astype(np.int32)

    def scores(self, i: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (masked scores, unmasked scores) of a pair of blocks, both [B, G, R, C, C]."""
        scores = self.product("BGRCH,BSGH->BGRCS", self.q[i], self.k[j])
        capped = self.scoring.capped(scores * self.scoring.scale_of(self.q.shape[-1]))
        if not self.causal:
            block = self.k.shape[2]
            is_padding = j * block + jnp.arange(block) >= self.num_keys
            return jnp.where(is_padding, NEVER, capped) if self.num_keys % block else capped, capped
        here = np.arange(self.q.shape[-2])
        comes_later = here[:, None] < here  # mask [query, key] of a diagonal block
        is_never = (i == j) & comes_later
        if self.scoring.window is not None:
            is_never |= (i - j) * len(here) + here[:, None] - here >= self.scoring.window
        if self.documents is not None:
            is_other_BCS = self.documents[i][:, :, None] != self.documents[j][:, None]
            is_never |= is_other_BCS[:, None, None]
        return jnp.where(is_never, NEVER, capped), capped


def _padded(a: jax.Array) -> jax.Array:
    """Return [B, T, ...] in blocks, [B, K, C, ...], padded with zeros, which masks exclude."""
    B, T = a.shape[:2]
    block = min(BLOCK, T)
    number = -(-T // block)
    a = jnp.pad(a, [(0, 0), (0, number * block - T), *[(0, 0)] * (a.ndim - 2)])
    return a.reshape(B, number, block, *a.shape[2:])


def _query_blocks(q_BTNH: jax.Array, k_BSGH: jax.Array) -> jax.Array:
    """Return the queries in blocks, [K, B, G, R, C, H]."""
    q_BKCNH, G = _padded(q_BTNH), k_BSGH.shape[2]
    B, K, C, N, H = q_BKCNH.shape
    return q_BKCNH.reshape(B, K, C, G, N // G, H).transpose(1, 0, 3, 4, 2, 5)


def _from_query_blocks(blocks: jax.Array, q_BTNH: jax.Array) -> jax.Array:
    B, T, N, _ = q_BTNH.shape
    return blocks.transpose(1, 0, 4, 2, 3, 5).reshape(B, -1, N, blocks.shape[-1])[:, :T]


def _key_blocks(k_BSGH: jax.Array) -> jax.Array:
    """Return the keys (or values) in blocks, [K, B, C, G, H]."""
    return _padded(k_BSGH).swapaxes(0, 1)


def _from_key_blocks(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return blocks.swapaxes(0, 1).reshape(shape[0], -1, *shape[2:])[:, : shape[1]]
