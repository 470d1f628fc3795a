"""The embedding's gradient, added to its sum: equal for any embedding, and no array of a table's
size for tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppctl.executors.compiler_options import temp_bytes
from ppctl.executors.outer_layers import add_embedding_grad

V, T, D = 4096, 16, 8
EMBEDDINGS = {
    "table": lambda w, i: w["table"][i],
    "take, scaled, with positions": lambda w, i: (
        jnp.take(w["table"], i, axis=0) * 3 + w["positions"][:T]
    ),
    "two look-ups of one table": lambda w, i: w["table"][i] + w["table"][(i + 1) % V],
    "positions looked up, in a jit": jax.jit(
        lambda w, i: w["table"][i] + w["positions"][jnp.arange(T)]
    ),
    "rematerialized": jax.checkpoint(lambda w, i: jnp.tanh(w["table"][i])),
    "a product": lambda w, i: jax.nn.one_hot(i, V, dtype=w["table"].dtype) @ w["table"],
    "a table that was changed": lambda w, i: (w["table"] * w["table"])[i],
}


def arrays(dtype):
    rng = np.random.default_rng(0)
    some = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    weights = {"table": some(V, D), "positions": some(2 * T, D), "of the head": some(D, V)}
    tokens = (
        jnp.asarray(rng.integers(0, V, (4, T)), jnp.int32).at[:, ::2].set(7)
    )  # one token again and again
    return weights, tokens, some(4, T, D)


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_a_sum_with_the_gradient_equals_autodiff(name):
    with jax.enable_x64(True):
        weights, tokens, gx = arrays("float64")
        total = jax.tree.map(jnp.cos, weights)
        pulled = lambda w: jax.vjp(lambda w: EMBEDDINGS[name](w, tokens), w)[1](gx)[0]
        wanted = jax.tree.map(jnp.add, total, jax.jit(pulled)(weights))
        found = jax.jit(lambda *args: add_embedding_grad(EMBEDDINGS[name], *args))(
            weights, tokens, gx, total
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-13), found, wanted
        )


def test_the_gradients_of_a_token_are_added_in_the_precision_of_the_sum():
    weights, tokens, _ = arrays("bfloat16")
    tokens, gx = jnp.full_like(tokens, 7), jnp.full((4, T, D), 1 + 2**-7, jnp.bfloat16)
    total = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), weights)
    found = add_embedding_grad(EMBEDDINGS["table"], weights, tokens, gx, total)
    np.testing.assert_array_equal(
        found["table"][7], np.full(D, tokens.size * (1 + 2**-7), np.float32)
    )


@pytest.mark.parametrize(
    "name", ["table", "take, scaled, with positions", "positions looked up, in a jit"]
)
def test_the_gradient_of_a_table_is_never_an_array_by_itself(name):
    weights, tokens, gx = arrays("bfloat16")
    total = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), weights)
    step = jax.jit(lambda *args: add_embedding_grad(EMBEDDINGS[name], *args), donate_argnums=3)
    compiled = step.lower(weights, tokens, gx, total).compile()
    assert temp_bytes(compiled) < weights["table"].nbytes
