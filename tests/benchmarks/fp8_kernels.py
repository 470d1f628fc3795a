"""Products of 8-bit values next to dense products of the same size: errors against the product of
the same rounded values in float32, TFLOP/s, calls of cuBLASLt's 8-bit products. A line a case.

Times of `product` include scales and rounding; "only the product" has rounded operands. The
fraction `of_dense` is the time of the dense product in bfloat16 over that of the case.
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
from expert_kernels import relative, seconds  # a script in this folder

from ppctl.model.fp8_products import product, rounded, scale_of

CALL = "__cublas$lt$matmul$f8"
SIZES = {  # rows M, inputs K, outputs N
    "d_model 2048, in": (4096, 2048, 8192),
    "d_model 2048, out": (4096, 8192, 2048),
    "Llama 3 8B, in": (8192, 4096, 14336),
    "Llama 3 70B, in": (8192, 8192, 28672),
    "Llama 3 405B, tp 8, in": (8192, 16384, 6656),
}
BF16_ERROR = 0.01  # relative to the norm
GRADIENT_ERROR = 0.05  # relative error of two roundings to 8 bits
TINY = {"tiny": (32, 16, 64)}


def cases(M: int, K: int, N: int) -> Iterator[tuple[str, float, float, Callable, Callable, list]]:
    """Yield (name, error, bar of it, function, dense function, arguments of both)."""
    keys = jax.random.split(jax.random.key(0), 3)
    draw = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)
    x, w, g = draw(keys[0], M, K), draw(keys[1], K, N) * K**-0.5, draw(keys[2], M, N)
    # 1. the oracle, of the rounded values of x and w
    of_x, of_w = scale_of(x, 1), scale_of(w, 0)
    small = rounded(x, of_x), rounded(w, of_w)
    with jax.default_matmul_precision("highest"):
        wide = (small[0].astype(jnp.float32) * of_x) @ (small[1].astype(jnp.float32) * of_w)
    # 2. a product of rounded operands, one with scales and rounding, and its gradients
    dims = (((1,), (0,)), ((), ()))
    dot = partial(jax.lax.dot_general, dimension_numbers=dims, preferred_element_type=x.dtype)
    only = jax.jit(lambda a, b, s, t: (dot(a, b) * s * t).astype(x.dtype))
    plain = jax.jit(jnp.matmul)
    scales = of_x.astype(x.dtype), of_w.astype(x.dtype)
    arguments = [*small, *scales]
    yield (
        "only the product",
        relative(only(*arguments), wide),
        BF16_ERROR,
        only,
        plain,
        [arguments, [x, w]],
    )
    whole = product("outputs")
    forward = jax.jit(whole)
    yield "fp8", relative(forward(x, w), wide), BF16_ERROR, forward, plain, [[x, w], [x, w]]
    dense = jax.jit(lambda x, w, g: jax.vjp(jnp.matmul, x, w)[1](g))
    wanted = dense(x, w, g)[0].astype(jnp.float32)
    both = jax.jit(lambda x, w, g: jax.vjp(whole, x, w)[1](g))
    error = relative(both(x, w, g)[0], wanted)
    yield "fp8, gradients", error, GRADIENT_ERROR, both, dense, [[x, w, g], [x, w, g]]


def main() -> None:
    for size_name, (M, K, N) in (TINY if "--tiny" in sys.argv else SIZES).items():
        for name, error, most, run, dense, (arguments, others) in cases(M, K, N):
            run_s, dense_s = seconds(run, *arguments), seconds(dense, *others)
            products = 2 if "gradients" in name else 1  # for x, for w
            line = {"what": f"{size_name}: {name}", "error": error, "seconds": run_s}
            line |= {"tflops": 2 * products * M * K * N / run_s / 1e12}
            text = run.lower(*arguments).compile().as_text() or ""
            line |= {
                "calls": text.count(f'"{CALL}"'),
                "wanted_calls": 1,
            }  # the gradient of w: bfloat16
            line |= {"of_dense": dense_s / run_s, "most_error": most}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
