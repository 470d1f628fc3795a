"""Grouped products of experts next to dense products of the same size, as measured: errors
against the scan in float32, TFLOP/s. A line a case.

Rows are divided over experts by chance, as a router without a bias divides them. The dense product
is of all rows with one matrix. Weights are added to their sums, as in a step: an accelerator that
needs no other time needs that of its memory, `memory_s`.
"""

import json
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ppctl.executors.stage.jaxpr_tools import add_outputs
from ppctl.model.experts.grouped_products import KERNELS, kernel_for

RUNS, RUN_S = 5, 0.05  # number of runs, seconds each
MOST_ERROR = 0.01  # relative to the norm, in bfloat16
SIZES = {  # rows [R, D], experts' matrices [E, D, F] of a microbatch of 4,096 tokens
    "8 experts, top-2": (8192, 2048, 4096, 8),
    "Mixtral 8x7B": (8192, 4096, 14336, 8),
    "Qwen3-30B-A3B": (32768, 2048, 768, 128),
}
TINY = {"4 experts": (64, 16, 32, 4)}


def seconds(function: Callable, *arrays: jax.Array) -> float:
    """Return the seconds of a call, the least of RUNS means."""

    def timed(turns: int) -> float:
        began = time.perf_counter()
        for _ in range(turns):
            out = function(*arrays)
        jax.block_until_ready(out)
        return (time.perf_counter() - began) / turns

    timed(1)
    turns = max(1, int(RUN_S / timed(2)))
    return min(timed(turns) for _ in range(RUNS))


def summing(kernel) -> Callable:
    """Return x, y, sizes, sums -> the sums with the weights of each expert added."""

    def add(*args: jax.Array) -> jax.Array:
        arrays, sums = args[:-1], args[-1]
        return add_outputs(jax.make_jaxpr(kernel.weights)(*arrays), arrays, [sums])[0]

    return add


def added_in_turn(add: Callable, sums: jax.Array) -> Callable:
    """Return a call that adds to its last result."""
    last = [sums]

    def call(*arrays: jax.Array) -> jax.Array:
        last[0] = add(*arrays, last[0])
        return last[0]

    return call


def relative(found: jax.Array, wanted: jax.Array) -> float:
    return float(jnp.linalg.norm(found.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted))


def cases(R: int, D: int, F: int, E: int):
    """Yield (name, error, seconds of the grouped and of the dense product, bytes) of each."""
    keys = jax.random.split(jax.random.key(0), 4)
    draw = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)
    x, y, w = draw(keys[0], R, D), draw(keys[1], R, F), draw(keys[2], E, D, F)
    sizes = jnp.bincount(jax.random.randint(keys[3], (R,), 0, E), length=E).astype(jnp.int32)
    kernel, oracle = kernel_for("auto", jax.devices()[0], x.dtype), KERNELS["scan"]
    wide = lambda *arrays: (a.astype(jnp.float32) for a in arrays)
    exact = jax.default_matmul_precision("highest")
    moved = x.nbytes + y.nbytes + w.nbytes
    # 1. rows
    dense = lambda x, w: x @ w[0]
    for name, rows, transpose in (("rows", x, False), ("rows, transposed", y, True)):
        run = jax.jit(lambda x, w, sizes, flip=transpose: kernel.rows(x, w, sizes, flip))
        slow = jax.jit(lambda x, w, sizes, flip=transpose: oracle.rows(x, w, sizes, flip))
        with exact:
            wanted = slow(*wide(rows, w), sizes)
        error = relative(run(rows, w, sizes), wanted)
        once = jax.jit(lambda x, w: x @ w[0].T) if transpose else jax.jit(dense)
        yield name, error, seconds(run, rows, w, sizes), seconds(once, rows, w), moved
    # 2. weights
    add = jax.jit(summing(kernel), donate_argnums=3)
    sums = jnp.zeros((E, D, F), jnp.float32)
    with exact:
        wanted = jax.jit(oracle.weights)(*wide(x, y), sizes)
    error = relative(add(x, y, sizes, sums), wanted)
    del wanted
    call = added_in_turn(add, jnp.zeros((E, D, F), jnp.float32))
    dims = ((0,), (0,)), ((), ())
    once = jax.jit(lambda x, y: jax.lax.dot_general(x, y, dims, preferred_element_type=jnp.float32))
    moved = x.nbytes + y.nbytes + 2 * 4 * E * D * F
    yield "weights", error, seconds(call, x, y, sizes), seconds(once, x, y), moved


def main() -> None:
    memory = 3.0e9 if "--tiny" in sys.argv else 4.3e12  # bytes/s, copied, of one H200
    for name, size in (TINY if "--tiny" in sys.argv else SIZES).items():
        R, D, F, _ = size
        for what, error, grouped_s, dense_s, moved in cases(*size):
            line = {"what": f"{name}: {what}", "error": error, "seconds": grouped_s}
            line |= {"tflops": 2 * R * D * F / grouped_s / 1e12, "memory_s": moved / memory}
            line |= {"of_dense": dense_s / grouped_s, "most_error": MOST_ERROR}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
