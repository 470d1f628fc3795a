"""Sequences that hold several documents: marks in the inputs, and rows that carry them to layers.

Inputs mark the first token of a document by its complement, ~id, and the first token of padding by
PADDING; padding ends at the next document. Layers see only activations, so the embedding appends
ceil(T / D) rows of marks to them: 1 for the first token of a document, 2 for that of padding, 0 for
each other of the T tokens. These rows are exact in any dtype, and are sent, kept and recomputed
with the activations. Positions need not restart in each document, since rotary attention depends
only on their differences.

Shape suffixes: B batch, T tokens, D d_model, R a device's rows of tokens, E rows of marks.
"""

from dataclasses import dataclass
from itertools import count

import jax
import jax.numpy as jnp

PADDING = -(2**31)  # the input that begins padding, as in ppctl.data.token_examples
FIRST, PAD = 1, 2  # marks


def split_starts(inputs_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (token ids, marks of first tokens); ids of padding are 0 at its marks.

    >>> ids, marks = split_starts(jnp.array([[5, ~7, 8, PADDING, 3]]))
    >>> ids.tolist(), marks.tolist()
    ([[5, 7, 8, 0, 3]], [[0, 1, 0, 2, 0]])
    """
    is_padding_BT = inputs_BT == PADDING
    ids_BT = jnp.where(inputs_BT < 0, ~inputs_BT, inputs_BT)
    marks_BT = jnp.where(is_padding_BT, PAD, jnp.where(inputs_BT < 0, FIRST, 0))
    return jnp.where(is_padding_BT, 0, ids_BT), marks_BT


def with_starts(x_BRD: jax.Array, marks_BT: jax.Array) -> jax.Array:
    """Return activations with rows of marks appended."""
    (B, T), D = marks_BT.shape, x_BRD.shape[-1]
    marks_BED = jnp.pad(marks_BT, ((0, 0), (0, -T % D))).reshape(B, -1, D)
    return jnp.concatenate([x_BRD, marks_BED.astype(x_BRD.dtype)], axis=1)


def num_rows(shape: tuple[int, ...], divided_by: int = 1) -> int:
    """Return R, the number of token rows of a device, given the shape with rows of marks.

    divided_by: number of devices that divide a sequence's rows: T = divided_by * R.

    >>> num_rows((2, 9, 4))  # 7 tokens and 2 rows
    7
    >>> num_rows((2, 5, 4), divided_by=2)  # 6 tokens on two devices, and 2 rows
    3
    """
    _, total, D = shape
    return next(total - e for e in count(1) if -(-(total - e) * divided_by // D) == e)


@dataclass(frozen=True)
class Documents:
    """The documents of packed sequences, from the marks of their first tokens."""

    marks_BT: jax.Array

    @classmethod
    def of(cls, marks_BED: jax.Array, num_tokens: int) -> "Documents":
        """Return the documents of sequences, given an activation's rows of marks."""
        marks_BT = marks_BED.reshape(marks_BED.shape[0], -1)[:, :num_tokens]
        return cls(jnp.round(jax.lax.stop_gradient(marks_BT)).astype(jnp.int32))

    @property
    def index_BT(self) -> jax.Array:
        """The index of each token's document in its sequence, 0..T; padding is one more."""
        return jnp.cumsum(self.marks_BT > 0, axis=1, dtype=jnp.int32)

    @property
    def is_real_BT(self) -> jax.Array:
        """Whether each token belongs to a document, not to padding.

        >>> Documents(jnp.array([[0, 0, 2, 0, 1, 0]])).is_real_BT.astype(int).tolist()
        [[1, 1, 0, 0, 1, 1]]
        """
        marks_BT = self.marks_BT
        # the place and kind of each mark in one number, so that a maximum finds the last one
        numbers_BT = 2 * jnp.arange(marks_BT.shape[1]) + (marks_BT == PAD)
        return jax.lax.cummax(jnp.where(marks_BT > 0, numbers_BT, 0), axis=1) % 2 == 0
