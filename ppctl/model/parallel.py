"""A model divided inside a stage: over tp its weights, over cp the tokens of a sequence.

Functions of one device, for whoever writes a model's collectives (`Stack.divided`): `ppctl.parallel`. Where tp is 1
they communicate nothing, so that one text serves a model whole and divided. All follow one rule, which is also JAX's
own for transposes: *what the model returns is the sum over devices of what each returns*. So a loss is a device's part
of it, the gradient of a parameter that all devices hold whole is the sum over them, and that of a shard is the device's
own.

Activations between layers are [batch, tokens, ...] on every device. With sequence parallelism (Korthikanti et al. 2022)
each of tp holds its part of their rows, batch and tokens taken together; otherwise each holds all of them. Tokens lie
over cp in zig-zag order: of 2*cp pieces of a sequence, device c holds pieces c and 2*cp-1-c, so that causal attention
is as much work on each.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


@dataclass(frozen=True)
class StageAxes:
    """How a stage is divided: over so many devices along tp and cp.

    context: how attention gets the keys and values of other devices along cp: gather | ring.
    vocab_ranks: over so many ranks of the pipeline embedding and head are divided by their vocabulary, beside tp: see
    `VocabularyParts`.
    """

    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = True
    context: str = "gather"
    vocab_ranks: int = 1

    @property
    def num_devices(self) -> int:
        return self.tp * self.cp

    @property
    def vocabulary_parts(self) -> int:
        """Return the number of parts of the vocabulary."""
        return self.vocab_ranks * self.tp

    @property
    def divides_rows(self) -> bool:
        """Whether devices along tp hold parts of the rows of activations."""
        return self.sequence_parallel and self.tp > 1

    @property
    def row_parts(self) -> int:
        """Return over how many devices the rows of activations are divided."""
        return self.tp if self.divides_rows else 1

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the axes, as traces need them."""
        ranks = (("pp", self.vocab_ranks),) if self.vocab_ranks > 1 else ()
        return *ranks, ("tp", self.tp), ("cp", self.cp)

    def padded(self, num_tokens: int) -> int:
        """Return the tokens of a sequence with padding, so that every device has as many.

        >>> StageAxes(tp=2, cp=2).padded(131), StageAxes(tp=4).padded(131), StageAxes(cp=2).padded(131)
        (132, 132, 132)
        """
        rows = self.row_parts
        unit = self.cp * lcm(2, rows) if self.cp > 1 else rows  # with cp a device has two pieces of a sequence
        return -(-num_tokens // unit) * unit


WHOLE = StageAxes()


def gather(rows: jax.Array, axes: StageAxes, dim: int = 0) -> jax.Array:
    """Return all rows [M, ...] of what devices along tp hold parts of, [M/tp, ...]; without such parts, as it is.

    dim: that is divided instead of rows.
    """
    return jax.lax.all_gather(rows, "tp", axis=dim, tiled=True) if axes.divides_rows else rows


def scatter(rows: jax.Array, axes: StageAxes, dim: int = 0) -> jax.Array:
    """Return the sum of `rows` [M, ...] over tp: each device's part [M/tp, ...], or all where all hold all.

    dim: that is divided instead of rows.
    """
    if axes.divides_rows:
        return jax.lax.psum_scatter(rows, "tp", scatter_dimension=dim, tiled=True)
    return jax.lax.psum(rows, "tp") if axes.tp > 1 else rows


def column(rows: jax.Array, w: jax.Array, axes: StageAxes) -> jax.Array:
    """Return [M, out/tp]: all rows times this device's columns w [in, out/tp] of a matrix.

    rows: [M/tp, in] with sequence parallelism, else [M, in].
    """
    return gather(rows, axes) @ w


def row(rows: jax.Array, w: jax.Array, axes: StageAxes, dim: int = 0) -> jax.Array:
    """Return the sum over tp of rows [M, in/tp] times this device's rows w [in/tp, out] of a matrix, as `scatter`.

    That is [M/tp, out] with sequence parallelism ([M, out/tp] with dim=1), else [M, out].
    """
    return scatter(rows @ w, axes, dim)


def own_part(a: jax.Array, axes: StageAxes, dim: int = -1) -> jax.Array:
    """Return [..., n/tp, ...]: this device's part along `dim` of what all devices along tp hold, [..., n, ...]."""
    if axes.tp == 1:
        return a
    size = a.shape[dim] // axes.tp
    return jax.lax.dynamic_slice_in_dim(a, shard_of(size, "tp", axes.tp), size, dim % a.ndim)


def shard_of(size: int, name: str, divided_by: int) -> jax.Array:
    """Return the first of this device's `size` entries of a dim divided over axis `name`, or 0 where it is not."""
    return jax.lax.axis_index(name) * size if divided_by > 1 else jnp.int32(0)


def own_tokens(a: jax.Array, axes: StageAxes, dim: int = 1, fill: Any = 0) -> jax.Array:
    """Return this device's tokens along `dim` of an array that has those of a whole sequence, padded with `fill`."""
    padding = axes.padded(a.shape[dim]) - a.shape[dim]
    if padding:
        a = jnp.pad(a, [(0, padding if d == dim else 0) for d in range(a.ndim)], constant_values=fill)
    return a if axes.cp == 1 else own_pieces(a, axes.cp, dim)


def own_pieces(a: jax.Array, cp: int, dim: int) -> jax.Array:
    """Return pieces c and 2*cp-1-c of the 2*cp along `dim`, of device c."""
    size, c = a.shape[dim] // (2 * cp), jax.lax.axis_index("cp")
    pieces = [jax.lax.dynamic_slice_in_dim(a, piece * size, size, dim) for piece in (c, 2 * cp - 1 - c)]
    return jnp.concatenate(pieces, dim)


def on_first(value: jax.Array, axes: StageAxes) -> jax.Array:
    """Return a value on the first device along tp, zero on the others: it counts once."""
    return jnp.where(jax.lax.axis_index("tp") == 0, value, 0) if axes.tp > 1 else value
