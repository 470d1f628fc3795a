"""Products of rows, sorted by expert, with their expert's matrix, by several kernels.

kernel     | method                                         | where
scan       | blocks of rows of one expert, one by one       | any backend
ragged_dot | JAX's; dense on CPUs and on NVIDIA GPUs        | any backend, native on TPUs

Shape suffixes: R rows, E experts of this device, D and F widths.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ppctl.errors import ConfigError, setting

BLOCK = 128  # rows of a block of `scan`
# x [R, D], w [E, D, F], sizes int32 [E] -> [R, F]; rows after all groups give zeros
Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
_DIMS = lax.RaggedDotDimensionNumbers
_TRANSPOSED = _DIMS((((1,), (2,)), ((), ())), [0], [0])  # x w^T
_CONTRACTED = _DIMS((((0,), (0,)), ((), ())), [0], [])  # x^T y of each group


class Kernel(NamedTuple):
    """The two products of a kernel.

    rows(x [R, D], w [E, D, F], sizes, transpose) -> [R, F]; transpose: x [R, F] -> [R, D].
    weights(x [R, D], y [R, F], sizes) -> x^T y of each group [E, D, F], in at least float32.
    """

    rows: Callable[..., jax.Array]
    weights: Callable[..., jax.Array]


def choose(wanted: str, device: Any) -> str:
    """Return the kernel for `wanted` (auto, or a kernel) on an attached or described device."""
    if wanted == "auto":
        return "ragged_dot" if device.platform == "tpu" else "scan"
    if wanted not in KERNELS:
        raise ConfigError(
            f"{setting('model.moe.kernel', wanted)} is unsupported here. Use "
            f"{setting('model.moe.kernel', 'auto')}."
        )
    return wanted


@cache
def product(name: str) -> Product:
    """Return the product by the kernel of this name; its gradients are two more products."""
    kernel = KERNELS[name]

    @jax.custom_vjp
    def grouped(x_RD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
        return kernel.rows(x_RD, w_EDF, sizes_E, False)

    def save(x: jax.Array, w: jax.Array, sizes: jax.Array) -> tuple[jax.Array, tuple]:
        return kernel.rows(x, w, sizes, False), (x, w, sizes)

    def pull(saved: tuple, g_RF: jax.Array) -> tuple[jax.Array, jax.Array, None]:
        x, w, sizes = saved
        dw = kernel.weights(x, g_RF, sizes).astype(w.dtype)
        return kernel.rows(g_RF, w, sizes, True), dw, None

    grouped.defvjp(save, pull)
    return grouped


def _ragged_rows(x: jax.Array, w: jax.Array, sizes: jax.Array, transpose: bool) -> jax.Array:
    if transpose:
        return lax.ragged_dot_general(x, w, sizes, _TRANSPOSED)
    return lax.ragged_dot(x, w, sizes)


def _ragged_weights(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return lax.ragged_dot_general(x, y, sizes, _CONTRACTED, preferred_element_type=wide)


def tiles(sizes_E: jax.Array, num_rows: int, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (expert, first row, end of the expert's rows) of each block of rows of one expert.

    There are as many as any sizes need; the end of an unused one is 0.
    """
    number_E = -(-sizes_E // block)
    last_E, ends_E = jnp.cumsum(number_E), jnp.cumsum(sizes_E)
    t = jnp.arange(-(-num_rows // block) + len(sizes_E) - 1, dtype=jnp.int32)
    expert = jnp.searchsorted(last_E, t, side="right", method="compare_all")
    expert = jnp.minimum(expert, len(sizes_E) - 1)
    first = (ends_E - sizes_E)[expert] + (t - (last_E - number_E)[expert]) * block
    end = jnp.where(t < last_E[-1], ends_E[expert], 0)
    return expert, first.astype(jnp.int32), end.astype(jnp.int32)


def _scan_rows(x: jax.Array, w: jax.Array, sizes: jax.Array, transpose: bool) -> jax.Array:
    padded, rows_of = jnp.pad(x, ((0, BLOCK), (0, 0))), partial(jnp.arange, BLOCK)

    def body(out: jax.Array, tile: tuple) -> tuple[jax.Array, None]:
        expert, first, end = tile
        rows = lax.dynamic_slice_in_dim(padded, first, BLOCK)
        matrix = lax.dynamic_index_in_dim(w, expert, keepdims=False)
        found = rows @ (matrix.T if transpose else matrix)
        is_row = (first + rows_of() < end)[:, None]
        found = jnp.where(is_row, found, lax.dynamic_slice_in_dim(out, first, BLOCK))
        return lax.dynamic_update_slice_in_dim(out, found, first, 0), None

    zeros = jnp.zeros((len(padded), w.shape[1 if transpose else 2]), x.dtype)
    return lax.scan(body, zeros, tiles(sizes, len(x), BLOCK))[0][: len(x)]


def _scan_weights(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    num_rows, wide = len(x), jnp.promote_types(x.dtype, jnp.float32)
    x, y = (jnp.pad(a, ((0, BLOCK), (0, 0))) for a in (x, y))

    def body(out: jax.Array, tile: tuple) -> tuple[jax.Array, None]:
        expert, first, end = tile
        is_row = (first + jnp.arange(BLOCK) < end)[:, None]
        rows = jnp.where(is_row, lax.dynamic_slice_in_dim(x, first, BLOCK), 0)
        others = lax.dynamic_slice_in_dim(y, first, BLOCK)
        dims = ((0,), (0,)), ((), ())
        found = lax.dot_general(rows, others, dims, preferred_element_type=wide)
        found = found + lax.dynamic_index_in_dim(out, expert, keepdims=False)
        return lax.dynamic_update_index_in_dim(out, found, expert, 0), None

    zeros = jnp.zeros((len(sizes), x.shape[1], y.shape[1]), wide)
    return lax.scan(body, zeros, tiles(sizes, num_rows, BLOCK))[0]


KERNELS = {
    "scan": Kernel(_scan_rows, _scan_weights),
    "ragged_dot": Kernel(_ragged_rows, _ragged_weights),
}
