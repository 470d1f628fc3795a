"""Grouped products: rows, sorted by expert, times the matrix of their expert. Several kernels.

kernel     | method                                       | where
scan       | expert by expert, a block of rows at a time  | any backend
triton     | Triton kernels, written in Pallas            | NVIDIA GPUs, compute capability 8.0 or
           |                                              | above, dtypes of up to 32 bits
ragged_dot | JAX's; CPUs and NVIDIA GPUs compute all rows | any backend, native on TPUs
           | with all experts                             |

Shape suffixes: R rows, E experts of this device, D and F widths.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ppctl.errors import ConfigError, setting
from ppctl.model.attention.attention_kernels import compute_capability
from ppctl.model.experts import triton_products

LEAST_CAPABILITY = (8, 0)  # first compute capability with bfloat16 and asynchronous copies

# (x [R, D], w [E, D, F], sizes int32 [E]) -> [R, F]; rows after all groups give zeros
Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
_DIMS = lax.RaggedDotDimensionNumbers
_TRANSPOSED = _DIMS((((1,), (2,)), ((), ())), [0], [0])  # x w^T
_CONTRACTED = _DIMS((((0,), (0,)), ((), ())), [0], [])  # x^T y of each group
_ONE_PLACE: Any = {"mode": "promise_in_bounds", "unique_indices": True, "indices_are_sorted": True}


class Kernel(NamedTuple):
    """The two products of a kernel; sizes: number of rows of each expert.

    rows(x [R, D], w [E, D, F], sizes, transpose) -> [R, F]; with transpose x [R, F] -> [R, D].
    weights(x [R, D], y [R, F], sizes) -> x^T y of each group [E, D, F], in at least float32.
    """

    rows: Callable[..., jax.Array]
    weights: Callable[..., jax.Array]


def choose(wanted: str, device: Any, dtype: jnp.dtype) -> str:
    """Return the name of a supported kernel: `wanted`, or the preferred one for wanted="auto".

    Args:
        device: An attached or described device: `platform`, and on GPUs `compute_capability`.
        dtype: The dtype of compute.

    Raises:
        ConfigError: The device or dtype rules out the requested kernel.
    """
    fault = None if wanted in ("scan", "ragged_dot") else _triton_fault(device, jnp.dtype(dtype))
    if wanted == "auto":
        by_platform = "ragged_dot" if device.platform == "tpu" else "scan"
        return "triton" if fault is None else by_platform
    if fault is not None:
        raise ConfigError(
            f"{setting('model.moe.kernel', wanted)}: {fault}. Use "
            f"{setting('model.moe.kernel', 'auto')}, which chooses a supported kernel."
        )
    return wanted


def _triton_fault(device: Any, dtype: jnp.dtype) -> str | None:
    """Return why the device or dtype rules out the Triton kernels; None if it does not."""
    capability, platform = compute_capability(device), device.platform
    if not any(capability):
        return f"Triton's kernels run on NVIDIA GPUs, and the platform is {platform}"
    if capability < LEAST_CAPABILITY:
        version = f"{getattr(device, 'device_kind', platform)} has {'.'.join(map(str, capability))}"
        return f"Triton's kernels need compute capability 8.0, and {version}"
    if dtype.itemsize > 4:
        by_dtype = setting("run.dtype", dtype)
        return f"Triton's kernels compute in at most 32 bits, and {by_dtype}"
    return None


@cache
def product(kernel: Kernel) -> Product:
    """Return the differentiable product of a kernel; its gradients are two more products."""

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


def _scan_rows(x: jax.Array, w: jax.Array, sizes: jax.Array, transpose: bool) -> jax.Array:
    num_rows, width = len(x), w.shape[1 if transpose else 2]
    block, wide = _block(x, sizes), jnp.promote_types(x.dtype, jnp.float32)
    dims = ((1,), (1 if transpose else 0,)), ((), ())

    def of_expert(out_RF: jax.Array, expert: tuple) -> tuple[jax.Array, None]:
        matrix, size, end = expert

        def of_block(i: jax.Array, out_RF: jax.Array) -> jax.Array:
            first = end - size + i * block
            start = jnp.minimum(first, num_rows - block)
            rows = lax.dynamic_slice_in_dim(x, start, block)
            found = lax.dot_general(rows, matrix, dims, preferred_element_type=wide)
            # a block of fixed size may overlap rows of earlier blocks, which are kept, and rows of
            # later experts, which are zeroed, as later blocks write them
            row = (start + jnp.arange(block))[:, None]
            found = jnp.where(row < end, found.astype(x.dtype), 0)
            found = jnp.where(row < first, lax.dynamic_slice_in_dim(out_RF, start, block), found)
            return lax.dynamic_update_slice_in_dim(out_RF, found, start, 0)

        return lax.fori_loop(0, -(-size // block), of_block, out_RF), None

    zeros = jnp.zeros((num_rows, width), x.dtype)
    return lax.scan(of_expert, zeros, (w, sizes, jnp.cumsum(sizes, dtype=sizes.dtype)))[0]


def _scan_weights(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    num_rows, num_experts = len(x), len(sizes)
    block, wide = _block(x, sizes), jnp.promote_types(x.dtype, jnp.float32)

    def of_expert(out_EDF: jax.Array, expert: tuple) -> tuple[jax.Array, None]:
        number, size, end = expert

        def of_block(i: jax.Array | int) -> jax.Array:
            first = end - size + i * block
            start = jnp.minimum(first, num_rows - block)
            row = (start + jnp.arange(block))[:, None]
            rows, others = (lax.dynamic_slice_in_dim(a, start, block) for a in (x, y))
            rows = jnp.where((row >= first) & (row < end), rows, 0)
            dims = ((0,), (0,)), ((), ())
            return lax.dot_general(rows, others, dims, preferred_element_type=wide)

        add = lambda i, total: total + of_block(i)  # noqa: E731
        found = lax.fori_loop(1, -(-size // block), add, of_block(0))
        # added to zeros: `jaxpr_tools.add_outputs` replaces the zeros with the sum of gradients
        return out_EDF.at[number].add(found, **_ONE_PLACE), None

    zeros = jnp.zeros((num_experts, x.shape[1], y.shape[1]), wide)
    numbers = jnp.arange(num_experts, dtype=sizes.dtype)
    return lax.scan(of_expert, zeros, (numbers, sizes, jnp.cumsum(sizes, dtype=sizes.dtype)))[0]


def _block(x: jax.Array, sizes: jax.Array) -> int:
    """Return the rows of a block: 1.25 times an expert's mean, rounded up to 32, at most 128."""
    return min(len(x), 128, -(-len(x) * 5 // (4 * 32 * len(sizes))) * 32)


@cache
def _triton(limits: triton_products.Limits) -> Kernel:
    products = triton_products.rows, triton_products.weights
    return Kernel(*(partial(product, limits=limits) for product in products))


def kernel_for(wanted: str, device: Any, dtype: jnp.dtype) -> Kernel:
    """Return the kernel that `choose` names, with the block sizes for the device."""
    name = choose(wanted, device, dtype)
    if name != "triton":
        return KERNELS[name]
    client = getattr(device, "client", None)
    described = device.device_kind if client is None or not client.local_devices() else None
    return _triton(triton_products.limits_of(compute_capability(device), described))


KERNELS = {
    "scan": Kernel(_scan_rows, _scan_weights),
    "triton": Kernel(triton_products.rows, triton_products.weights),
    "ragged_dot": Kernel(_ragged_rows, _ragged_weights),
}
