"""Matrix products of values rounded to 8-bit floats, the dtype of `model.linear_dtype`.

Values are divided by scales, powers of 2, and rounded. The results of the products are multiplied
by the scales.

x w and the gradient of x are products of numbers in the format e4m3. The gradient of w is a product
in the dtype of compute. x and y's gradient have a scale for each row, a token's. A matrix has a
scale for each output, or, if tp divides its inputs, for each input. So a device has the scales of
its shard without communication. The same 8-bit values serve both products: scales
along the contracted dim multiply the other operand before it is rounded. These scales are the same
in every microbatch and on every mesh, so fp8 trains the same function on every layout. But XLA's
rounding in float32 and bfloat16 differs from program to program, so that some values near the
middle of two 8-bit numbers are rounded to the other one.

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
from jax.ad_checkpoint import checkpoint_name

E4M3 = jnp.float8_e4m3fn
LEAST = 2.0**-100  # smaller absolute maxima count as this one: their scale would be no float32
_EXPONENT = 0x7F800000  # bits of a float32's exponent

Axes = tuple[str, ...]  # mesh axes that divide the values of a scale


def scale_of(a: jax.Array, dim: int, axes: Axes = ()) -> jax.Array:
    """Return the scales of `a`, float32 powers of 2, with `dim` of size 1.

    A scale is as small as possible without overflow: the largest absolute value along `dim` and
    `axes`, rounded to the mantissa of e4m3 and divided by the scale, is a number of e4m3. So values
    rounded with these scales have the same scales.

    >>> scale_of(jnp.array([[3.0, 448.0], [0.5, -0.875]]), 1).ravel().tolist()
    [1.0, 0.001953125]
    """
    facts = jnp.finfo(E4M3)
    most = jnp.max(jnp.abs(a), axis=dim, keepdims=True).astype(jnp.float32)
    most = jnp.maximum(lax.pmax(most, axes) if axes else most, LEAST)
    most = lax.reduce_precision(most, exponent_bits=8, mantissa_bits=facts.nmant)
    bits = lax.bitcast_convert_type(most, jnp.int32)
    binade = lax.bitcast_convert_type(bits & _EXPONENT, jnp.float32)
    largest = float(facts.max)
    top = 2.0 ** int(log2(largest))
    return jnp.where(most <= binade * (largest / top), binade, 2 * binade) / top


def rounded(a: jax.Array, scale: jax.Array) -> jax.Array:
    """Return a / scale in e4m3.

    Values are rounded to float32 first. Products of 8-bit values are exact, so some sums lie in the
    middle of two 8-bit numbers, and attention to equal tokens averages them with an error of a few
    2^-53. In float64 that error would choose the number; in float32 it is gone.

    XLA may leave out a rounding of `a` to bfloat16 here that it kept for the scale. Values just
    above the largest number would then become NaN, so they are clipped.
    """
    largest = float(jnp.finfo(E4M3).max)
    scaled = (a.astype(_wide(a.dtype)) * (1 / scale)).astype(jnp.float32)
    return jnp.clip(scaled, -largest, largest).astype(E4M3)


def gather_rounded(
    w: jax.Array, axes: Axes, dim: int, summed_dim: int, summed_axes: Axes
) -> jax.Array:
    """Return matrices [..., K, N] gathered along `dim` over `axes` as 8-bit values.

    The result, in the dtype of w, has the values that `product` multiplies. summed_dim: -2 for
    scales of outputs, -1 for those of inputs. summed_axes: mesh axes that divide this dim.
    """
    scale = scale_of(w, summed_dim, summed_axes)
    gather = partial(lax.all_gather, axis_name=axes, axis=dim, tiled=True)
    whole, dim = gather(rounded(w, scale)), dim % w.ndim
    scale = gather(scale) if dim != summed_dim % w.ndim else scale
    return (whole.astype(_wide(w.dtype)) * scale).astype(w.dtype)


@cache
def product(tp_divides: str, tp: Axes = ()) -> Callable[..., jax.Array]:
    """Return the differentiable product (x [M, K], w [K, N]) -> y [M, N].

    tp_divides: "outputs" | "inputs": the dim of w that tp divides, if it does. tp: ("tp",) if it
    does, else ().
    """
    by_output = tp_divides == "outputs"
    scaled_x = partial(_scaled, dim=1, axes=() if by_output else tp)
    scaled_g = partial(_scaled, dim=1, axes=tp if by_output else ())

    def scaled_w(w_KN: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (8-bit values, scales as a row: [1, N] of outputs or [1, K] of inputs)."""
        values, scale = _scaled(w_KN, 0 if by_output else 1, ())
        return values, scale if by_output else scale.T

    def forward(x_MK: jax.Array, w_KN: jax.Array) -> jax.Array:
        w, of_w = scaled_w(w_KN)
        x, of_x = scaled_x(x_MK) if by_output else scaled_x(x_MK, times=of_w)
        # kept by remat=none with the product, so that no backward gathers x for its scales again
        of_x = checkpoint_name(of_x, "saved")
        y = _dot(x, w, (1, 0), x_MK.dtype, of_x)
        return _times(y, of_w) if by_output else y

    def pull(saved: tuple[jax.Array, jax.Array], g_MN: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_MK, w_KN = saved
        w, of_w = scaled_w(w_KN)
        g, of_g = scaled_g(g_MN, times=of_w) if by_output else scaled_g(g_MN)
        dx = _dot(g, w, (1, 1), x_MK.dtype, of_g)
        dx = dx if by_output else _times(dx, of_w)
        return dx, lax.dot_general(x_MK, g_MN, (((0,), (0,)), ((), ())))

    multiply = jax.custom_vjp(forward)
    # not `multiply(x, w)`: remat=none keeps results of products, and would not see those inside
    multiply.defvjp(lambda x, w: (forward(x, w), (x, w)), pull)
    return multiply


def _scaled(
    a: jax.Array, dim: int, axes: Axes, times: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return (8-bit values of a, or of a * times, and their scales)."""
    a = a if times is None else a.astype(_wide(a.dtype)) * times
    scale = scale_of(a, dim, axes)
    return rounded(a, scale), scale


def _dot(
    a: jax.Array, b: jax.Array, contracted: tuple[int, int], dtype: jnp.dtype, scale: jax.Array
) -> jax.Array:
    """Return scale times the product of two 8-bit matrices; contracted: a dim of each.

    Scales are powers of 2, so rounding the sums to `dtype` before they are applied is exact.
    """
    dims = ((contracted[:1], contracted[1:]), ((), ()))
    return _times(lax.dot_general(a, b, dims, preferred_element_type=dtype), scale)


def _times(a: jax.Array, scale: jax.Array) -> jax.Array:
    return (a.astype(_wide(a.dtype)) * scale).astype(a.dtype)


def _wide(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)
