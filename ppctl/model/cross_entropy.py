"""Cross-entropy of a language model's head without the logits of all tokens at once.

Where they are many, tokens are taken chunk by chunk, and each chunk's gradient is made beside its loss: logits in
float32 exist for one chunk at a time, their gradient never, and nothing is computed twice. Shape suffixes: M tokens, K
chunks, C tokens of a chunk, D d_model, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ppctl.model.parallel import shard_of

FEW_LOGITS = 2**25  # up to here all at once, as JAX differentiates it: 128 MiB in float32
MOST_LOGITS = 2**27  # of a chunk: 512 MiB. Each chunk reads the whole matrix and adds to its whole gradient
LEAST_TOKENS = 1024  # of a chunk all the same
NO_TOKEN = -1  # a target that is none
NEVER = -1e30  # logit of an id that is padding


class Vocabulary(NamedTuple):
    """A vocabulary that is divided: into as many parts as there are ranks, and each of them over tp."""

    size: int
    tp: int
    num_ranks: int = 1

    @property
    def num_parts(self) -> int:
        """Return over how many devices it is divided."""
        return self.tp * self.num_ranks


def first_id(num_ids: int, tp: int, part: jax.Array | int) -> jax.Array:
    """Return the first of this device's ids, of which it has so many, in a rank's part that is divided over tp."""
    return part * (tp * num_ids) + shard_of(num_ids, "tp", tp)


def cross_entropy(
    x_MD: jax.Array,
    w: jax.Array,
    targets_M: jax.Array,
    *,
    is_tied: bool,
    vocabulary: Vocabulary | None = None,
    cap: float | None = None,
) -> jax.Array:
    """Return the sum over tokens of -log softmax(logits)[target] in nats, in at least float32.

    w: the head's matrix [D, V], or the embedding's [V, D] where it is tied. logits are x @ w in at least float32,
    or cap*tanh(x @ w/cap). Targets may be NO_TOKEN, which adds nothing.
    vocabulary: where devices along tp have parts of it, w is this device's, and the result its part of the sum, which
    is the sum over devices. None: no device has but a part.
    """
    num_tokens, vocab_size = x_MD.shape[0], w.shape[0 if is_tied else 1]
    if num_tokens * vocab_size <= FEW_LOGITS:
        losses_M = _losses(x_MD, w, targets_M, is_tied, vocabulary, cap)
        return jnp.where(targets_M == NO_TOKEN, 0, losses_M).sum()
    x_KCD, targets_KC = in_chunks(x_MD, targets_M, vocab_size)
    return _chunked(x_KCD, w, targets_KC, is_tied, vocabulary, cap)


def in_chunks(x_MD: jax.Array, targets_M: jax.Array, num_ids: int) -> tuple[jax.Array, jax.Array]:
    """Return tokens and targets by chunks, each with logits of so many ids a token; padded with NO_TOKEN."""
    num_tokens = x_MD.shape[0]
    size = max(LEAST_TOKENS, MOST_LOGITS // num_ids)
    num_chunks = -(-num_tokens // size)
    size = -(-num_tokens // num_chunks)
    padding = num_chunks * size - num_tokens
    x_KCD = jnp.pad(x_MD, ((0, padding), (0, 0))).reshape(num_chunks, size, -1)
    targets_KC = jnp.pad(targets_M, (0, padding), constant_values=NO_TOKEN).reshape(num_chunks, size)
    return x_KCD, targets_KC


def _losses(
    x_MD: jax.Array,
    w: jax.Array,
    targets_M: jax.Array,
    is_tied: bool,
    vocabulary: Vocabulary | None,
    cap: float | None,
) -> jax.Array:
    logits_MV, first = own_logits(x_MD, w, is_tied, vocabulary, cap)
    if vocabulary is None:
        picked_M = jnp.take_along_axis(logits_MV, targets_M[:, None], axis=-1)[:, 0]
        return jax.nn.logsumexp(logits_MV, axis=-1) - picked_M
    picked_M = jnp.where(_are_targets(logits_MV, targets_M - first), logits_MV, 0).sum(-1)
    return log_sums(logits_MV, vocabulary) / vocabulary.num_parts - picked_M


def own_logits(
    x_MD: jax.Array,
    w: jax.Array,
    is_tied: bool,
    vocabulary: Vocabulary | None,
    cap: float | None,
    part: jax.Array | int = 0,
) -> tuple[jax.Array, jax.Array | int]:
    """Return (logits of this device's ids, the first of them), in a rank's part. Padding is never likely."""
    logits_MV = logits(x_MD, w, is_tied=is_tied, cap=cap)
    if vocabulary is None:
        return logits_MV, 0
    held = logits_MV.shape[1]
    first = first_id(held, vocabulary.tp, part)
    if held * vocabulary.num_parts == vocabulary.size:
        return logits_MV, first
    is_padding_V = first + jnp.arange(held) >= vocabulary.size
    return jnp.where(is_padding_V, NEVER, logits_MV), first


def log_sums(logits_MV: jax.Array, vocabulary: Vocabulary | None) -> jax.Array:
    """Return logarithms of the sums of exponentials over all ids, or over those of a rank's part."""
    if vocabulary is None or vocabulary.tp == 1:
        return jax.nn.logsumexp(logits_MV, axis=-1)
    largest_M = jax.lax.pmax(jax.lax.stop_gradient(logits_MV.max(-1)), "tp")
    return jnp.log(jax.lax.psum(jnp.exp(logits_MV - largest_M[:, None]).sum(-1), "tp")) + largest_M


def _are_targets(logits_MV: jax.Array, targets_M: jax.Array) -> jax.Array:
    """Return [M, V] where a column is a token's target; targets count from this device's first id."""
    return targets_M[:, None] == jax.lax.broadcasted_iota(targets_M.dtype, logits_MV.shape, 1)


def logits(x_MD: jax.Array, w: jax.Array, *, is_tied: bool, cap: float | None = None) -> jax.Array:
    """Return the logits of `cross_entropy`."""
    dtype = jnp.promote_types(x_MD.dtype, jnp.float32)
    products = jax.lax.dot_general(x_MD, w, (((1,), (1 if is_tied else 0,)), ((), ())), preferred_element_type=dtype)
    return products if cap is None else cap * jnp.tanh(products / cap)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _chunked(
    x_KCD: jax.Array,
    w: jax.Array,
    targets_KC: jax.Array,
    is_tied: bool,
    vocabulary: Vocabulary | None,
    cap: float | None,
) -> jax.Array:
    def add(loss: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x_CD, targets_C = chunk
        losses_C = _losses(x_CD, w, targets_C, is_tied, vocabulary, cap)
        return loss + jnp.where(targets_C == NO_TOKEN, 0, losses_C).sum(), None

    zero = jnp.zeros((), jnp.promote_types(x_KCD.dtype, jnp.float32))
    return jax.lax.scan(add, zero, (x_KCD, targets_KC))[0]


def _there(
    x: Any,
    matrix: Any,
    targets: Any,
    is_tied: bool,
    vocabulary: Vocabulary | None,
    cap: float | None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
    """Return the loss, and its gradients in x and w: they need nothing that is not known by now.

    Arguments are values and whether anyone asks for their gradients; that of a frozen w is None.
    """
    x_KCD, w, targets_KC, has_grad = x.value, matrix.value, targets.value, matrix.perturbed
    dtype = jnp.promote_types(x_KCD.dtype, jnp.float32)

    def add(
        sums: tuple[jax.Array, jax.Array | None], chunk: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array | None], jax.Array]:
        x_CD, targets_C = chunk
        logits_CV, first = own_logits(x_CD, w, is_tied, vocabulary, cap)
        of_all_C = log_sums(logits_CV, vocabulary)
        own, g_CV = loss_and_slopes(logits_CV, targets_C, of_all_C, first, vocabulary, cap)
        gx_CD, own_gw = products(g_CV.astype(x_CD.dtype), x_CD, w, is_tied, has_grad)
        return jax.tree.map(jnp.add, sums, (own, own_gw)), gx_CD

    zeros = jnp.zeros((), dtype), jnp.zeros(w.shape, dtype) if has_grad else None
    (loss, gw), gx_KCD = jax.lax.scan(add, zeros, (x_KCD, targets_KC))
    return loss, (gx_KCD, None if gw is None else gw.astype(w.dtype))


def loss_and_slopes(
    logits_CV: jax.Array,
    targets_C: jax.Array,
    log_sums_C: jax.Array,
    first: jax.Array | int,
    vocabulary: Vocabulary | None,
    cap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Return (this device's part of the loss, the slopes [C, V] of the whole loss in its products x @ w).

    log_sums: over all ids; first: of this device's ids.
    """
    is_token_C = targets_C != NO_TOKEN
    are_targets_CV = _are_targets(logits_CV, targets_C - first)
    parts = 1 if vocabulary is None else vocabulary.num_parts
    losses_C = log_sums_C / parts - jnp.where(are_targets_CV, logits_CV, 0).sum(-1)
    g_CV = jnp.where(is_token_C[:, None], jnp.exp(logits_CV - log_sums_C[:, None]) - are_targets_CV, 0)
    if cap is not None:
        g_CV = g_CV * (1 - jnp.square(jnp.clip(logits_CV / cap, -1, 1)))  # padding has no slope
    return jnp.where(is_token_C, losses_C, 0).sum(), g_CV


def products(
    g_CV: jax.Array, x_CD: jax.Array, w: jax.Array, is_tied: bool, has_grad: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Return the gradients of x, and of w in at least float32 (None where nobody asks), from slopes in x @ w."""
    gx_CD = jax.lax.dot_general(g_CV, w, (((1,), (0 if is_tied else 1,)), ((), ())))
    if not has_grad:
        return gx_CD, None
    left, right = (g_CV, x_CD) if is_tied else (x_CD, g_CV)
    dtype = jnp.promote_types(x_CD.dtype, jnp.float32)
    return gx_CD, jax.lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=dtype)


def _back(
    is_tied: bool,
    vocabulary: Vocabulary | None,
    cap: float | None,
    grads: tuple[jax.Array, jax.Array | None],
    g: jax.Array,
) -> tuple[jax.Array, jax.Array | None, None]:
    gx_KCD, gw = grads  # of the sum over devices, each of which is handed the same g
    return (g * gx_KCD).astype(gx_KCD.dtype), None if gw is None else (g * gw).astype(gw.dtype), None


_chunked.defvjp(_there, _back, symbolic_zeros=True)
