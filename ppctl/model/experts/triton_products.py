"""Grouped products on NVIDIA GPUs, as Triton kernels of Pallas, which lower without a GPU.

A program of `rows` has a tile of rows of one expert and a block of columns; one of `weights` has a
block of an expert's matrix and sums over the expert's rows. Sums are float32.

Shape suffixes: R rows, E experts of this device, D and F widths.
"""

from math import ceil
from typing import Any

import jax
import jax.numpy as jnp

TILE = 128  # rows and columns of a tile, at most
STAGES = 3  # tiles of operands that are loaded ahead
SHARED_BYTES = 98304  # of these tiles; the GPUs with the least, 8.6 and 8.9, have 101,376
ADDS = "grouped_weights"  # name of the kernel whose result is its last operand and a sum
TOGETHER = 8  # tiles of rows that follow each other, to read the same columns from the cache


def tiles(sizes_E: jax.Array, num_rows: int, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (group, first row, end of the group's rows) of tiles that cover all rows.

    Groups are experts, then the rows after all of them. There are as many tiles as any sizes need;
    the end of an unused one is 0.
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


def rows(
    x: jax.Array, w: jax.Array, sizes: jax.Array, transpose: bool, *, interpret: bool = False
) -> jax.Array:
    """Return the product of each row with its expert's matrix, or its transpose: `Kernel.rows`."""
    # imported here: Pallas takes 0.3 s
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    # 1. sizes: x [R, D], w [E, D, F] or [E, F, D]
    (R, D), F, E = x.shape, w.shape[1 if transpose else 2], len(sizes)
    tall, wide, deep = _tile(ceil(R / E)), _tile(F), _depth(D, x.dtype)
    group, first, end = tiles(sizes, R, tall)
    num_tiles, num_columns = len(group), ceil(F / wide)
    around = TOGETHER * num_columns

    # 2. the program of a tile of rows and a block of columns
    def kernel(x_ref, w_ref, group_ref, first_ref, end_ref, out_ref) -> None:
        program = pl.program_id(0)
        start = program // around * TOGETHER
        number = jnp.minimum(num_tiles - start, TOGETHER)
        tile, column = start + program % around % number, program % around // number
        e, row, stop = group_ref[tile], first_ref[tile], end_ref[tile]
        is_row = (row + _to(tall) < stop)[:, None]
        is_column = column * wide + _to(wide) < F
        columns = pl.ds(column * wide, wide)

        def product(k: jax.Array, total: jax.Array) -> jax.Array:
            inner, is_inner = pl.ds(k * deep, deep), k * deep + _to(deep) < D
            at = x_ref.at[pl.ds(row, tall), inner]
            a = triton.load(at, mask=is_row & is_inner[None], other=0.0)
            if transpose:
                at, mask = w_ref.at[e, columns, inner], is_column[:, None] & is_inner[None]
            else:
                at, mask = w_ref.at[e, inner, columns], is_inner[:, None] & is_column[None]
            b = triton.load(at, mask=mask, other=0.0)
            return total + triton.dot(a, b, trans_b=transpose)

        def store(total: jax.Array) -> None:
            out = total.astype(out_ref.dtype)
            triton.store(out_ref.at[pl.ds(row, tall), columns], out, mask=is_row & is_column[None])

        @pl.when((row < stop) & (e < E))
        def _() -> None:
            zeros = jnp.zeros((tall, wide), jnp.float32)
            store(jax.lax.fori_loop(0, jnp.int32(ceil(D / deep)), product, zeros))

        @pl.when((row < stop) & (e == E))
        def _() -> None:
            store(jnp.zeros((tall, wide), jnp.float32))

    # 3. the call
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((R, F), x.dtype),
        grid=(num_tiles * num_columns,),
        compiler_params=_params(tall * wide),
        interpret=interpret,
        name="grouped_rows",
    )(x, w, group, first, end)


def weights(x: jax.Array, y: jax.Array, sizes: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Return x^T y [E, D, F] of each expert's rows, in float32: `Kernel.weights`.

    The kernel adds to an array that its result replaces, here zeros: `jaxpr_tools.add_outputs`
    begins with the sum of gradients instead.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    # 1. sizes: x [R, D], y [R, F]
    (_, D), F, E = x.shape, y.shape[1], len(sizes)
    tall, wide, deep = _tile(D), _tile(F), _depth(len(x), x.dtype)
    blocks = ceil(D / tall), ceil(F / wide)
    ends = jnp.cumsum(sizes).astype(jnp.int32)

    # 2. the program of a block of an expert's matrix
    def kernel(x_ref, y_ref, first_ref, end_ref, start_ref, out_ref) -> None:
        program = pl.program_id(0)
        e, block = program // (blocks[0] * blocks[1]), program % (blocks[0] * blocks[1])
        down, right = block % blocks[0] * tall, block // blocks[0] * wide
        first, stop = first_ref[e], end_ref[e]
        is_down, is_right = (down + _to(tall) < D)[None], (right + _to(wide) < F)[None]

        def product(k: jax.Array, total: jax.Array) -> jax.Array:
            row = first + k * deep
            is_row = (row + _to(deep) < stop)[:, None]
            at = x_ref.at[pl.ds(row, deep), pl.ds(down, tall)]
            a = triton.load(at, mask=is_row & is_down, other=0.0)
            at = y_ref.at[pl.ds(row, deep), pl.ds(right, wide)]
            b = triton.load(at, mask=is_row & is_right, other=0.0)
            return total + triton.dot(a, b, trans_a=True)

        zeros, at = jnp.zeros((tall, wide), jnp.float32), (e, pl.ds(down, tall), pl.ds(right, wide))
        total = jax.lax.fori_loop(0, (stop - first + deep - 1) // deep, product, zeros)
        mask = is_down.T & is_right
        total += triton.load(start_ref.at[*at], mask=mask, other=0.0)
        triton.store(out_ref.at[*at], total, mask=mask)

    # 3. the call
    start = jnp.zeros((E, D, F), jnp.float32)
    return pl.pallas_call(
        kernel,
        out_shape=start,
        grid=(E * blocks[0] * blocks[1],),
        input_output_aliases={4: 0},
        compiler_params=_params(tall * wide),
        interpret=interpret,
        name=ADDS,
    )(x, y, ends - sizes.astype(jnp.int32), ends, start)


def _to(number: int) -> jax.Array:
    return jnp.arange(number, dtype=jnp.int32)


def _tile(size: int) -> int:
    """Return the power of 2 from `size`, at least 16 and at most TILE.

    >>> _tile(5), _tile(40), _tile(1000)
    (16, 64, 128)
    """
    return min(TILE, max(16, 1 << (size - 1).bit_length()))


def _depth(size: int, dtype: jnp.dtype) -> int:
    """Return the summands of a step, so that the operands of STAGES steps fit SHARED_BYTES."""
    return min(_tile(size), SHARED_BYTES // (STAGES * 2 * TILE * jnp.dtype(dtype).itemsize))


def _params(area: int) -> Any:
    from jax.experimental.pallas import triton

    num_warps = 8 if area == TILE * TILE else 4
    return triton.CompilerParams(num_warps=num_warps, num_stages=STAGES)
