"""Cross-entropy of a language model's head without the logits of all tokens at once.

Where they are many, tokens are taken chunk by chunk, and each chunk's gradient is made beside its loss: logits in
float32 exist for one chunk at a time, their gradient never, and nothing is computed twice. Shape suffixes: M tokens, K
chunks, C tokens of a chunk, D d_model, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

FEW_LOGITS = 2**25  # up to here all at once, as JAX differentiates it: 128 MiB in float32
MOST_LOGITS = 2**27  # of a chunk: 512 MiB. Each chunk reads the whole matrix and adds to its whole gradient
LEAST_TOKENS = 1024  # of a chunk all the same


def cross_entropy(x_MD: jax.Array, w: jax.Array, targets_M: jax.Array, *, is_tied: bool) -> jax.Array:
    """Return the sum over tokens of -log softmax(logits)[target] in nats, in at least float32.

    w: the head's matrix [D, V], or the embedding's [V, D] where it is tied. logits are x @ w in at least float32.
    """
    num_tokens, vocab_size = x_MD.shape[0], w.shape[0 if is_tied else 1]
    if num_tokens * vocab_size <= FEW_LOGITS:
        return _losses(x_MD, w, targets_M, is_tied).sum()
    size = max(LEAST_TOKENS, MOST_LOGITS // vocab_size)
    num_chunks = -(-num_tokens // size)
    size = -(-num_tokens // num_chunks)
    padding = num_chunks * size - num_tokens
    x_KCD = jnp.pad(x_MD, ((0, padding), (0, 0))).reshape(num_chunks, size, -1)
    targets_KC = jnp.pad(targets_M, (0, padding), constant_values=-1).reshape(num_chunks, size)  # -1: no token
    return _chunked(x_KCD, w, targets_KC, is_tied)


def _losses(x_MD: jax.Array, w: jax.Array, targets_M: jax.Array, is_tied: bool) -> jax.Array:
    logits_MV = logits(x_MD, w, is_tied=is_tied)
    picked_M = jnp.take_along_axis(logits_MV, targets_M[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits_MV, axis=-1) - picked_M


def logits(x_MD: jax.Array, w: jax.Array, *, is_tied: bool) -> jax.Array:
    """Return x @ w in at least float32; w as in `cross_entropy`."""
    dtype = jnp.promote_types(x_MD.dtype, jnp.float32)
    return jax.lax.dot_general(x_MD, w, (((1,), (1 if is_tied else 0,)), ((), ())), preferred_element_type=dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _chunked(x_KCD: jax.Array, w: jax.Array, targets_KC: jax.Array, is_tied: bool) -> jax.Array:
    def add(loss: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x_CD, targets_C = chunk
        losses_C = _losses(x_CD, w, targets_C, is_tied)
        return loss + jnp.where(targets_C >= 0, losses_C, 0).sum(), None

    zero = jnp.zeros((), jnp.promote_types(x_KCD.dtype, jnp.float32))
    return jax.lax.scan(add, zero, (x_KCD, targets_KC))[0]


def _there(
    x_KCD: jax.Array, w: jax.Array, targets_KC: jax.Array, is_tied: bool
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Return the loss, and its gradients in x and w: they need nothing that is not known by now."""
    dtype = jnp.promote_types(x_KCD.dtype, jnp.float32)

    def add(
        sums: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        (loss, gw), (x_CD, targets_C) = sums, chunk
        logits_CV = logits(x_CD, w, is_tied=is_tied)
        is_token_C = targets_C >= 0
        lse_C = jax.nn.logsumexp(logits_CV, axis=-1)
        is_target_CV = targets_C[:, None] == jax.lax.broadcasted_iota(targets_C.dtype, logits_CV.shape, 1)
        losses_C = lse_C - jnp.where(is_target_CV, logits_CV, 0).sum(-1)
        g_CV = jnp.where(is_token_C[:, None], jnp.exp(logits_CV - lse_C[:, None]) - is_target_CV, 0).astype(x_CD.dtype)
        gx_CD = jax.lax.dot_general(g_CV, w, (((1,), (0 if is_tied else 1,)), ((), ())))
        left, right = (g_CV, x_CD) if is_tied else (x_CD, g_CV)
        gw = gw + jax.lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=dtype)
        return (loss + jnp.where(is_token_C, losses_C, 0).sum(), gw), gx_CD

    zeros = jnp.zeros((), dtype), jnp.zeros(w.shape, dtype)
    (loss, gw), gx_KCD = jax.lax.scan(add, zeros, (x_KCD, targets_KC))
    return loss, (gx_KCD, gw.astype(w.dtype))


def _back(is_tied: bool, grads: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    gx_KCD, gw = grads
    return (g * gx_KCD).astype(gx_KCD.dtype), (g * gw).astype(gw.dtype), None


_chunked.defvjp(_there, _back)
