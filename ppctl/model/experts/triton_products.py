"""Grouped products on NVIDIA GPUs, as Triton kernels of Pallas, which lower without a GPU.

A program of `rows` computes a tile of one expert's rows and a block of columns. A program of
`weights` computes a block of an expert's matrix, summed over the expert's rows. Sums are float32.

Shape suffixes: R rows, E experts of this device, D and F widths.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from ppctl.model.stack import ADDS_TO_LAST

TALL, WIDE = 128, 256  # maximum rows and columns of a tile; in `weights` both are at most TALL
TOGETHER = 8  # row tiles that run in succession, so that w's columns stay in the cache
# XLA compiles kernels with equal code once, and their code names the source lines that call them.
# So layers share the trace of a product of the same sizes.
ONCE = partial(jax.jit, inline=True)


class Limits(NamedTuple):
    """Memory and warps for a kind of GPU. Measured: docs/benchmarks.md, "Experts on one H200".

    described: kind of the target GPU if it is not attached; None: an attached GPU.
    """

    # bytes of shared memory for operands loaded ahead; GPUs of compute capability 8.6, 8.9 and 12.0
    # have 101,376 bytes
    shared_bytes: int = 98304
    num_warps: int = 8  # warps of a program of `weights`
    described: str | None = None

    def target(self) -> AbstractContextManager[Any]:
        """Return a context that makes Pallas compile for GPU `described`, else an attached one."""
        if self.described is None:
            return nullcontext()
        gpu = jax.sharding.AbstractDevice(self.described, None, "gpu")
        return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu))


def limits_of(capability: tuple[int, int], described: str | None = None) -> Limits:
    """Return the limits for GPUs of a compute capability; described: see `Limits`.

    GPUs of compute capability 9.x and 10.x have 227 KiB of shared memory.
    """
    sizes = (196608, 4) if capability[0] in (9, 10) else Limits()[:2]
    return Limits(*sizes, described)


def tiles(sizes_E: jax.Array, num_rows: int, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (group, first row, end of the group's rows) of tiles that cover all rows.

    block: rows of a tile. Groups are the experts, then the rows after all experts. The number of
    tiles suffices for any sizes; an unused tile has end 0.
    """
    ends = jnp.append(jnp.cumsum(sizes_E), num_rows).astype(jnp.int32)
    sizes = jnp.diff(ends, prepend=0)
    number = -(-sizes // block)
    last = jnp.cumsum(number)
    t = jnp.arange(ceil(num_rows / block) + len(sizes_E), dtype=jnp.int32)
    group = jnp.searchsorted(last, t, side="right", method="compare_all")
    group = jnp.minimum(group, len(sizes_E))
    first = (ends - sizes)[group] + (t - (last - number)[group]) * block
    end = jnp.where(t < last[-1], ends[group], 0)
    return group.astype(jnp.int32), first.astype(jnp.int32), end


@partial(ONCE, static_argnames=("transpose", "limits", "interpret"))
def rows(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    transpose: bool,
    *,
    limits: Limits = Limits(),  # noqa: B008
    interpret: bool = False,
) -> jax.Array:
    """Return each row times its expert's matrix, or the matrix's transpose: `Kernel.rows`."""
    # imported in the function, because importing Pallas takes 0.3 s
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    # 1. sizes: x [R, D], w [E, D, F] or [E, F, D]
    (R, D), F, E = x.shape, w.shape[1 if transpose else 2], len(sizes)
    tall, wide, stages = _tile(ceil(R / E)), _tile(F, WIDE), 4
    deep = _depth(D, limits.shared_bytes // stages, (TALL + WIDE) * x.dtype.itemsize)
    group, first, end = tiles(sizes, R, tall)
    num_tiles, num_columns = len(group), ceil(F / wide)
    order = slice(None, None, -1 if transpose else 1)  # order of the dims of w

    # 2. the program of a tile of rows and a block of columns
    def kernel(x_ref, w_ref, group_ref, first_ref, end_ref, out_ref) -> None:
        tile, column = _place(pl.program_id(0), num_tiles, num_columns)
        e, row, stop = group_ref[tile], first_ref[tile], end_ref[tile]
        is_row, is_column = row + _to(tall) < stop, _inside(column, wide, F)
        columns = pl.ds(column * wide, wide)

        def product(k: jax.Array, total: jax.Array) -> jax.Array:
            inner, is_inner = pl.ds(k * deep, deep), _inside(k, deep, D)
            a = _load(x_ref.at[pl.ds(row, tall), inner], is_row, is_inner)
            b = _load(w_ref.at[e, *(inner, columns)[order]], *(is_inner, is_column)[order])
            return total + triton.dot(a, b, trans_b=transpose)

        def store(total: jax.Array) -> None:
            at = out_ref.at[pl.ds(row, tall), columns]
            triton.store(at, total.astype(out_ref.dtype), mask=_mask(is_row, is_column))

        zeros = jnp.zeros((tall, wide), jnp.float32)

        @pl.when((row < stop) & (e < E))
        def _() -> None:
            store(jax.lax.fori_loop(0, jnp.int32(ceil(D / deep)), product, zeros))

        @pl.when((row < stop) & (e == E))
        def _() -> None:
            store(zeros)

    # 3. the call
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((R, F), x.dtype),
        grid=(num_tiles * num_columns,),
        compiler_params=_params(8 if tall * wide >= TALL * TALL else 4, stages),
        interpret=interpret,
        name="grouped_rows",
    )
    with limits.target():
        return call(x, w, group, first, end)


def _place(program: jax.Array, num_tiles: int, num_columns: int) -> tuple[jax.Array, jax.Array]:
    """Return (tile of rows, block of columns) of a program."""
    around = TOGETHER * num_columns
    start = program // around * TOGETHER
    number = jnp.minimum(num_tiles - start, TOGETHER)
    return start + program % around % number, program % around // number


@partial(ONCE, static_argnames=("limits", "interpret"))
def weights(
    x: jax.Array,
    y: jax.Array,
    sizes: jax.Array,
    *,
    limits: Limits = Limits(),  # noqa: B008
    interpret: bool = False,
) -> jax.Array:
    """Return x^T y [E, D, F] of each expert's rows, in float32: `Kernel.weights`.

    The kernel adds to its last operand in place. That operand is zeros, which
    `jaxpr_tools.add_outputs` replaces with the sum of gradients.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    # 1. sizes: x [R, D], y [R, F]
    (_, D), F, E = x.shape, y.shape[1], len(sizes)
    tall, wide, stages = _tile(D), _tile(F), 3
    deep = _depth(len(x), Limits().shared_bytes // stages, 2 * TALL * x.dtype.itemsize)
    blocks = ceil(D / tall), ceil(F / wide)
    ends = jnp.cumsum(sizes).astype(jnp.int32)

    # 2. the program of a block of an expert's matrix
    def kernel(x_ref, y_ref, first_ref, end_ref, start_ref, out_ref) -> None:
        program = pl.program_id(0)
        e, block = program // (blocks[0] * blocks[1]), program % (blocks[0] * blocks[1])
        down, right = block % blocks[0], block // blocks[0]
        first, stop = first_ref[e], end_ref[e]
        downs, rights = pl.ds(down * tall, tall), pl.ds(right * wide, wide)
        is_down, is_right = _inside(down, tall, D), _inside(right, wide, F)

        def product(k: jax.Array, total: jax.Array) -> jax.Array:
            row = first + k * deep
            is_row = row + _to(deep) < stop
            a = _load(x_ref.at[pl.ds(row, deep), downs], is_row, is_down)
            b = _load(y_ref.at[pl.ds(row, deep), rights], is_row, is_right)
            return total + triton.dot(a, b, trans_a=True)

        zeros = jnp.zeros((tall, wide), jnp.float32)
        total = jax.lax.fori_loop(0, (stop - first + deep - 1) // deep, product, zeros)
        total += _load(start_ref.at[e, downs, rights], is_down, is_right)
        triton.store(out_ref.at[e, downs, rights], total, mask=_mask(is_down, is_right))

    # 3. the call
    start = jnp.zeros((E, D, F), jnp.float32)
    call = pl.pallas_call(
        kernel,
        out_shape=start,
        grid=(E * blocks[0] * blocks[1],),
        input_output_aliases={4: 0},
        compiler_params=_params(limits.num_warps if tall * wide == TALL * TALL else 4, stages),
        interpret=interpret,
        name=f"grouped_weights{ADDS_TO_LAST}",
    )
    with limits.target():
        return call(x, y, ends - sizes.astype(jnp.int32), ends, start)


def _to(number: int) -> jax.Array:
    return jnp.arange(number, dtype=jnp.int32)


def _inside(block: jax.Array, width: int, size: int) -> jax.Array | None:
    """Return the mask of a block's indices below `size`; None if all blocks lie below it."""
    return None if size % width == 0 else block * width + _to(width) < size


def _mask(is_down: jax.Array | None, is_right: jax.Array | None) -> jax.Array | None:
    """Return the mask of a block's entries, in a broadcastable shape; None: all are inside."""
    down = None if is_down is None else is_down[:, None]
    right = None if is_right is None else is_right[None]
    return right if down is None else down if right is None else down & right


def _load(at: Any, is_down: jax.Array | None, is_right: jax.Array | None) -> jax.Array:
    from jax.experimental.pallas import triton

    mask = _mask(is_down, is_right)
    return triton.load(at) if mask is None else triton.load(at, mask=mask, other=0.0)


def _tile(size: int, most: int = TALL) -> int:
    """Return the smallest power of 2 not below `size`, at least 16 and at most `most`.

    >>> _tile(5), _tile(40), _tile(1000)
    (16, 64, 128)
    """
    return min(most, max(16, 1 << (size - 1).bit_length()))


def _depth(size: int, num_bytes: int, row_bytes: int) -> int:
    """Return the depth of one step of a product of depth `size`: a power of 2, at most 64.

    num_bytes: bytes for the step's operands. row_bytes: bytes of the operands per unit of depth.

    >>> _depth(5000, 24576, 2 * (128 + 256)), _depth(20, 24576, 2 * (128 + 256))
    (32, 32)
    """
    return min(_tile(size), 64, 1 << (num_bytes // row_bytes).bit_length() - 1)


def _params(num_warps: int, num_stages: int) -> Any:
    from jax.experimental.pallas import triton

    return triton.CompilerParams(num_warps=num_warps, num_stages=num_stages)
