"""Grouped products of experts as one equation each, for predictions: they are counted, never run.

The equations of a real kernel do not show its FLOPs. Its number of blocks (or grid points) depends
on the tokens of each expert, and its shapes have the maximum number of rows.
"""

from functools import cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ppctl.model.experts.grouped_products import Kernel

CALL = "grouped_product"


@cache
def counting(num_rows: int) -> Kernel:
    """Return a kernel whose products count as `num_rows` rows, the expected number on a device."""

    def call(shape: tuple[int, ...], dtype: Any, *operands: jax.Array) -> jax.Array:
        result = jax.ShapeDtypeStruct(shape, dtype)
        return jax.ffi.ffi_call(CALL, result)(*operands, num_rows=np.int64(num_rows))

    def rows(x: jax.Array, w: jax.Array, sizes: jax.Array, transpose: bool) -> jax.Array:
        return call((len(x), w.shape[1 if transpose else 2]), x.dtype, x, w, sizes)

    def weights(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
        shape = len(sizes), x.shape[1], y.shape[1]
        return call(shape, jnp.promote_types(x.dtype, jnp.float32), x, y, sizes)

    return Kernel(rows, weights)


def is_counted(eqn: core.JaxprEqn) -> bool:
    return eqn.params.get("target_name") == CALL


def num_rows_of(eqn: core.JaxprEqn) -> int:
    """Return the number of rows that a product computes, over all experts of a device."""
    return int(dict(eqn.params["attributes"])["num_rows"])


def shape_of(eqn: core.JaxprEqn) -> tuple[float, float, float, float]:
    """Return (rows, columns, depth, number) of equal products, one for each expert of a device."""
    arrays: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    x, other, _, out = arrays
    num_experts = (out if out.ndim == 3 else other).shape[0]
    each = num_rows_of(eqn) / num_experts
    if out.ndim == 3:
        return x.shape[1], other.shape[1], each, num_experts
    return each, out.shape[1], x.shape[1], num_experts


def flops_of(eqn: core.JaxprEqn) -> int:
    """Return the FLOPs of a product, 2 for each multiply-add."""
    arrays: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    matrices = next(a for a in arrays if a.ndim == 3)
    return 2 * num_rows_of(eqn) * prod(matrices.shape[1:])
