"""Documents packed into a sequence: activations carry their starts, so that no layer mixes them.

Inputs write the first token of a document as its complement, ~id. Layers see only activations, so
the embedding appends the starts as ceil(T / D) more rows of zeros and ones, D numbers a row, one
for each of T tokens: exact in any dtype, and carried wherever activations are sent, kept or
recomputed. Only the rows before them are the tokens'. Positions need not start anew at a document:
rotary ones count by differences.

Shape suffixes: B batch, T tokens, D width, R a device's rows of a sequence, E rows after them.
"""

from itertools import count

import jax
import jax.numpy as jnp


def split_starts(inputs_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (token ids, whether each is the first of a document).

    >>> ids, is_first = split_starts(jnp.array([[5, ~7, 8]]))
    >>> ids.tolist(), is_first.tolist()
    ([[5, 7, 8]], [[False, True, False]])
    """
    is_first_BT = inputs_BT < 0
    return jnp.where(is_first_BT, ~inputs_BT, inputs_BT), is_first_BT


def with_starts(x_BRD: jax.Array, is_first_BT: jax.Array) -> jax.Array:
    """Return activations with the rows of document starts appended."""
    (B, T), D = is_first_BT.shape, x_BRD.shape[-1]
    marks_BED = jnp.pad(is_first_BT, ((0, 0), (0, -T % D))).reshape(B, -1, D)
    return jnp.concatenate([x_BRD, marks_BED.astype(x_BRD.dtype)], axis=1)


def num_rows(shape: tuple[int, ...], divided_by: int = 1) -> int:
    """Return R of the shape of activations with such rows, for divided_by * R tokens.

    >>> num_rows((2, 9, 4))  # 7 tokens and 2 rows
    7
    >>> num_rows((2, 5, 4), divided_by=2)  # 6 tokens on two devices, and 2 rows
    3
    """
    _, total, D = shape
    return next(total - e for e in count(1) if -(-(total - e) * divided_by // D) == e)


def documents_of(marks_BED: jax.Array, num_tokens: int) -> jax.Array:
    """Return the number of each token's document in its sequence, int32 [B, T]."""
    is_first_BT = marks_BED.reshape(marks_BED.shape[0], -1)[:, :num_tokens]
    return jnp.cumsum(jax.lax.stop_gradient(is_first_BT) > 0.5, axis=1, dtype=jnp.int32)
