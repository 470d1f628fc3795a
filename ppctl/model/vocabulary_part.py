"""A rank's part of a vocabulary that is divided over the ranks of a pipeline: logits first, gradients later.

Of each token a rank knows the sum over its own ids; loss and gradient need that over all. Logits are
kept until then where they are few, and else computed again, chunk by chunk. Shape suffixes: M tokens, K chunks, C
tokens of a chunk, D d_model, V this device's ids.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.model.cross_entropy import (
    MOST_LOGITS,
    Vocabulary,
    first_id,
    in_chunks,
    log_sums,
    loss_and_slopes,
    own_logits,
    products,
)


def part_log_sums(
    x_MD: jax.Array, w: jax.Array, part: jax.Array, *, is_tied: bool, vocabulary: Vocabulary, cap: float | None
) -> tuple[jax.Array, jax.Array | None]:
    """Return (log sums [M] of the exponentials of a part's logits, the logits or None where they are not kept)."""
    logits_of = partial(own_logits, w=w, is_tied=is_tied, vocabulary=vocabulary, cap=cap, part=part)
    num_tokens, num_ids = x_MD.shape[0], w.shape[0 if is_tied else 1]
    if num_tokens * num_ids <= MOST_LOGITS:
        logits_MV, _ = logits_of(x_MD)
        return log_sums(logits_MV, vocabulary), logits_MV
    x_KCD, _ = in_chunks(x_MD, jnp.zeros(num_tokens, jnp.int32), num_ids)
    sums_KC = jax.lax.map(lambda x_CD: log_sums(logits_of(x_CD)[0], vocabulary), x_KCD)
    return sums_KC.reshape(-1)[:num_tokens], None


def part_cross_entropy(
    x_MD: jax.Array,
    w: jax.Array,
    targets_M: jax.Array,
    log_sums_M: jax.Array,
    logits_MV: jax.Array | None,
    part: jax.Array,
    *,
    is_tied: bool,
    vocabulary: Vocabulary,
    cap: float | None,
) -> jax.Array:
    """Return this device's part of `cross_entropy`; log_sums: [M], over all ids.

    logits: as `part_log_sums` has kept them. The gradient is that of the whole loss, in x this device's summand.
    """
    return _part(x_MD, w, targets_M, log_sums_M, logits_MV, part, is_tied, vocabulary, cap)


@partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _part(*args: Any) -> jax.Array:
    return _computed(*args)[0]  # pyright: ignore


def _computed(
    x_MD: jax.Array,
    w: jax.Array,
    targets_M: jax.Array,
    log_sums_M: jax.Array,
    logits_MV: jax.Array | None,
    part: jax.Array,
    is_tied: bool,
    vocabulary: Vocabulary,
    cap: float | None,
    gradients: str = "",
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Return (loss, gradient of x, gradient of w), None for those that `gradients` does not name: x | xw."""
    num_tokens, num_ids = x_MD.shape[0], w.shape[0 if is_tied else 1]

    def of_chunk(x_CD: jax.Array, targets_C: jax.Array, sums_C: jax.Array, logits_CV: jax.Array | None) -> tuple:
        if logits_CV is None:
            logits_CV, _ = own_logits(x_CD, w, is_tied, vocabulary, cap, part)
        first = first_id(num_ids, vocabulary.tp, part)
        loss, g_CV = loss_and_slopes(logits_CV, targets_C, sums_C, first, vocabulary, cap)
        if not gradients:
            return loss, None, None
        return loss, *products(g_CV.astype(x_CD.dtype), x_CD, w, is_tied, "w" in gradients)

    if logits_MV is not None:
        return of_chunk(x_MD, targets_M, log_sums_M, logits_MV)
    x_KCD, targets_KC = in_chunks(x_MD, targets_M, num_ids)
    sums_KC = jnp.pad(log_sums_M, (0, targets_KC.size - num_tokens)).reshape(targets_KC.shape)

    def add(sums: tuple, chunk: tuple) -> tuple[tuple, jax.Array | None]:
        x_CD, targets_C, sums_C = chunk
        loss, gx_CD, gw = of_chunk(x_CD, targets_C, sums_C, None)
        return jax.tree.map(jnp.add, sums, (loss, gw)), gx_CD

    dtype = log_sums_M.dtype
    zeros = jnp.zeros((), dtype), jnp.zeros(w.shape, dtype) if "w" in gradients else None
    (loss, gw), gx_KCD = jax.lax.scan(add, zeros, (x_KCD, targets_KC, sums_KC))
    return loss, None if gx_KCD is None else gx_KCD.reshape(-1, x_MD.shape[1])[:num_tokens], gw


def _there(*args: Any) -> tuple[jax.Array, tuple[jax.Array | None, jax.Array | None]]:
    """Return the loss and its gradients in x and w, None of a frozen w. Arguments say whether one is asked for."""
    values = [jax.tree.map(lambda a: a.value, each, is_leaf=lambda a: hasattr(a, "perturbed")) for each in args[:6]]
    loss, gx, gw = _computed(*values, *args[6:], gradients="xw" if args[1].perturbed else "x")  # pyright: ignore
    return loss, (gx, None if gw is None else gw.astype(values[1].dtype))


def _back(
    is_tied: bool,
    vocabulary: Vocabulary,
    cap: float | None,
    grads: tuple[jax.Array, jax.Array | None],
    g: jax.Array,
) -> tuple[jax.Array | None, ...]:
    gx_MD, gw = grads
    return (g * gx_MD).astype(gx_MD.dtype), None if gw is None else (g * gw).astype(gw.dtype), None, None, None, None


_part.defvjp(_there, _back, symbolic_zeros=True)
