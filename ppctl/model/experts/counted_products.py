"""Products of rows by expert as one equation each, for predictions. They are counted, never run.

Kernels compute blocks, or points of a grid, whose number depends on the tokens of each expert, and
the number of rows in their shapes is the most that there can be.
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
    """Return the products of `num_rows` rows, those that a device is expected to compute."""

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
    """Return the rows that a product computes, of all experts of a device."""
    return int(dict(eqn.params["attributes"])["num_rows"])


def shape_of(eqn: core.JaxprEqn) -> tuple[float, float, float, float]:
    """Return (rows, columns, depth, number) of an expert's product, of equally loaded experts."""
    arrays: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    x, other, _, out = arrays
    num_experts = (out if out.ndim == 3 else other).shape[0]
    each = num_rows_of(eqn) / num_experts
    if out.ndim == 3:
        return x.shape[1], other.shape[1], each, num_experts
    return each, out.shape[1], x.shape[1], num_experts


def flops_of(eqn: core.JaxprEqn) -> int:
    """Return the FLOPs of a product, 2 a multiply-add."""
    arrays: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    matrices = next(a for a in arrays if a.ndim == 3)
    return 2 * num_rows_of(eqn) * prod(matrices.shape[1:])
