"""Matrix products of values rounded to 8-bit floats, the dtype of `model.linear_dtype`.

Each value is divided by a scale, a power of 2, and rounded; the product is multiplied by the
scales. The products of the 8-bit values are summed in the dtype of compute.

recipe            | scale of x and of its gradient    | products in 8 bits         | format
fp8               | of each row: a token's            | x w, and the gradient of x | e4m3
fp8_by_microbatch | of all rows: a microbatch's, on a | all three                  | e4m3, gradients
                  | device                            |                            | of x w in e5m2

A matrix w has one scale. Scales of rows are the same in every microbatch and on every mesh, so fp8
trains the same function on every layout. Scales along tp are those of the whole rows and matrices.
Sources: Micikevicius et al. 2022 (formats); torchao's recipe rowwise_with_gw_hp (the gradient of w
in the dtype of compute).

Shape suffixes: M rows, K inputs, N outputs.
"""

from collections.abc import Callable
from functools import cache, partial
from math import log2

import jax
import jax.numpy as jnp
from jax import lax

BY_MICROBATCH = "fp8_by_microbatch"
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
LEAST = 2.0**-100  # smaller absolute maxima count as this one: their scale would be no float32
_EXPONENT = 0x7F800000  # bits of a float32's exponent

Axes = tuple[str, ...]  # mesh axes that divide the values of a scale


def scale_of(a: jax.Array, dims: tuple[int, ...], axes: Axes = (), dtype: jnp.dtype = E4M3) -> jax.Array:
    """Return the scales of `a` for `dtype`, float32 powers of 2, with `dims` of size 1.

    The largest absolute value along `dims` and `axes`, divided by its scale, lies in the largest
    binade of `dtype`. Values rounded with these scales have the same scales, or scales that keep
    them exactly.

    >>> scale_of(jnp.array([[3.0, 448.0], [0.5, -0.875]]), (1,)).ravel()
    Array([1.       , 0.0019531], dtype=float32)
    """
    most = jnp.max(jnp.abs(a), axis=dims, keepdims=True).astype(jnp.float32)
    most = jnp.maximum(lax.pmax(most, axes) if axes else most, LEAST)
    bits = lax.bitcast_convert_type(most, jnp.int32)
    binade = lax.bitcast_convert_type(bits & _EXPONENT, jnp.float32)
    largest = float(jnp.finfo(dtype).max)
    top = 2.0 ** int(log2(largest))
    return jnp.where(most <= binade * (largest / top), binade, 2 * binade) / top


def rounded(a: jax.Array, scale: jax.Array, dtype: jnp.dtype = E4M3) -> jax.Array:
    """Return a / scale in an 8-bit dtype."""
    return (a.astype(_wide(a.dtype)) * (1 / scale)).astype(dtype)


def gather_rounded(w: jax.Array, axes: Axes, dim: int, matrix_axes: Axes) -> jax.Array:
    """Return matrices [..., K, N] gathered along `dim` over `axes` as 8-bit values.

    The result, in the dtype of w, has the values that `product` multiplies. matrix_axes: all axes
    that divide a matrix.
    """
    scale = scale_of(w, (-2, -1), matrix_axes)
    whole = lax.all_gather(rounded(w, scale), axes, axis=dim, tiled=True)
    return (whole.astype(_wide(w.dtype)) * scale).astype(w.dtype)


@cache
def product(
    recipe: str, *, of_x: Axes = (), of_w: Axes = (), of_y: Axes = ()
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return the differentiable product (x [M, K], w [K, N]) -> y [M, N] of a recipe.

    of_x, of_w, of_y: mesh axes that divide the columns of x, the matrix, the columns of y.
    """
    is_whole = recipe == BY_MICROBATCH
    dims, of_gradient = ((0, 1), E5M2) if is_whole else ((1,), E4M3)
    with_scale_of = {
        "x": partial(_with_scale, dims=dims, axes=of_x),
        "w": partial(_with_scale, dims=(0, 1), axes=of_w),
        "g": partial(_with_scale, dims=dims, axes=of_y, dtype=of_gradient),
    }

    def forward(x_MK: jax.Array, w_KN: jax.Array) -> jax.Array:
        return _product(with_scale_of["x"](x_MK), with_scale_of["w"](w_KN), (1, 0), x_MK.dtype)

    def pull(saved: tuple[jax.Array, jax.Array], g_MN: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, w = saved
        g = with_scale_of["g"](g_MN)
        dx = _product(g, with_scale_of["w"](w), (1, 1), x.dtype)
        if is_whole:
            return dx, _product(with_scale_of["x"](x), g, (0, 0), w.dtype)
        return dx, lax.dot_general(x, g_MN, (((0,), (0,)), ((), ())))

    multiply = jax.custom_vjp(forward)
    # not `multiply(x, w)`: remat=none keeps results of products, and would not see those inside
    multiply.defvjp(lambda x, w: (forward(x, w), (x, w)), pull)
    return multiply


def _with_scale(
    a: jax.Array, dims: tuple[int, ...], axes: Axes, dtype: jnp.dtype = E4M3
) -> tuple[jax.Array, jax.Array]:
    """Return (8-bit values, their scales)."""
    scale = scale_of(a, dims, axes, dtype)
    return rounded(a, scale, dtype), scale


def _product(
    a: tuple[jax.Array, jax.Array],
    b: tuple[jax.Array, jax.Array],
    contracted: tuple[int, int],
    dtype: jnp.dtype,
) -> jax.Array:
    """Return the product of two 8-bit matrices with their scales; contracted: a dim of each.

    Scales are powers of 2, so rounding the sums to `dtype` before they are applied is exact.
    """
    dims = ((contracted[:1], contracted[1:]), ((), ()))
    found = lax.dot_general(a[0], b[0], dims, preferred_element_type=dtype)
    return (found.astype(_wide(dtype)) * a[1] * b[1]).astype(dtype)


def _wide(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)
