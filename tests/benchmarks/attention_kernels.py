"""The fused attention of an accelerator: its errors against the plain form in float32, and its
seconds. A line a case.

With --tiny: the chunked form, on the attached device.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp

from ppctl.model.attention.attention_kernels import kernel_named

TURNS, RUNS, DOCUMENTS = 20, 5, 4
MOST_ERROR = 0.01  # relative to the norm, in bfloat16


def there_and_back(kernel, documents, q, k, v, g):
    out, pull = jax.vjp(lambda q, k, v: kernel(q, k, v, *documents), q, k, v)
    return out, *pull(g)


def case(kernel, size, kv_heads, documents):
    """Return errors relative to the norm, and the seconds of a forward and a backward."""
    B, T, N, H = size
    keys, heads = jax.random.split(jax.random.key(0), 4), (N, kv_heads, kv_heads, N)
    arrays = [
        jax.random.normal(key, (B, T, n, H), jnp.bfloat16)
        for key, n in zip(keys, heads, strict=True)
    ]
    with jax.default_matmul_precision("highest"):
        plain = jax.jit(lambda *a: there_and_back(kernel_named("xla"), documents, *a))
        wanted = plain(*(a.astype(jnp.float32) for a in arrays))
    run = jax.jit(lambda *a: there_and_back(kernel, documents, *a))
    found, times = run(*arrays), []
    names = ("out", "dq", "dk", "dv")
    distance = lambda a, b: float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))
    errors = {name: distance(a, b) for name, a, b in zip(names, found, wanted, strict=True)}
    for _ in range(RUNS):
        began = time.perf_counter()
        for _ in range(TURNS):
            found = run(*arrays)
        jax.block_until_ready(found)
        times.append((time.perf_counter() - began) / TURNS)
    return {"errors": errors, "error": max(errors.values()), "seconds": min(times)}


def main():
    is_tiny = "--tiny" in sys.argv
    name, size = ("chunked", (2, 32, 4, 16)) if is_tiny else ("cudnn", (2, 2048, 16, 128))
    B, T, N, H = size
    four = (jnp.arange(T) // (T // DOCUMENTS + 1) + 1)[None].repeat(B, 0)  # the last one is shorter
    for kv_heads, documents in ((N, ()), (N // 4, ()), (N, (four,)), (N // 4, (four,))):
        name = "chunked" if documents else name  # cuDNN has no documents
        kernel = kernel_named(name)
        what = (
            f"{name} {B}x{T}x{N}x{H}, {kv_heads} kv "
            f"heads{f', {DOCUMENTS} documents' * bool(documents)}"
        )
        found = case(kernel, size, kv_heads, documents)
        print(json.dumps({"what": what, "most_error": MOST_ERROR, **found}), flush=True)


if __name__ == "__main__":
    main()
