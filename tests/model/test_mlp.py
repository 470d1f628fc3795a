"""The function of the multi-layer perceptron."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppctl.config.groups.model_settings import MLP_ACTIVATIONS
from ppctl.model.mlp import mlp
from ppctl.model.stack import init

B, I, D, O, L = 4, 5, 8, 3, 3
NUMPY = {"relu": lambda x: np.maximum(x, 0), "tanh": np.tanh}


def make(activation="relu", dtype=jnp.float64):
    return mlp(
        num_layers=L, d_model=D, activation=activation, input_dim=I, target_dim=O, dtype=dtype
    )


def random_params(stack):
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init(stack, 0))
    return jax.tree.map(lambda a: (0.5 * rng.standard_normal(a.shape)).astype(a.dtype), shapes)


def run(stack, params, inputs, targets):
    x = stack.embed(params["embed_head"], inputs)
    for l in range(L):
        x = stack.layer(jax.tree.map(lambda a, l=l: a[l], params["layers"]), x)
    return x, *stack.head(params["embed_head"], x, targets)


@pytest.mark.parametrize("activation", MLP_ACTIVATIONS)
def test_shapes_follow_the_settings(activation):
    stack = make(activation)
    shapes = jax.tree.map(
        lambda a: a.shape,
        jax.eval_shape(lambda: init(stack, 0)),
        is_leaf=lambda a: hasattr(a, "shape"),
    )
    assert shapes["layers"] == {"kernel": (L, D, D), "bias": (L, D)}
    assert shapes["embed_head"] == {
        "embed": {"kernel": (I, D), "bias": (D,)},
        "head": {"kernel": (D, O), "bias": (O,)},
    }


@pytest.mark.parametrize("activation", NUMPY)
def test_the_loss_is_the_squared_error_of_activations_of_linear_maps(activation):
    stack, rng = make(activation), np.random.default_rng(1)
    params, inputs, targets = (
        random_params(stack),
        rng.standard_normal((B, I)),
        rng.standard_normal((B, O)),
    )
    found, loss, number = run(stack, params, inputs, targets)
    act, embed_head, layers = NUMPY[activation], params["embed_head"], params["layers"]
    x = act(inputs @ embed_head["embed"]["kernel"] + embed_head["embed"]["bias"])
    for l in range(L):
        x = act(x @ layers["kernel"][l] + layers["bias"][l])
    assert np.asarray(found) == pytest.approx(x, rel=1e-12)
    errors = x @ embed_head["head"]["kernel"] + embed_head["head"]["bias"] - targets
    assert loss == pytest.approx((errors**2).sum(), rel=1e-12)
    assert number == B * O


def test_bfloat16_compute_keeps_the_loss_in_float32():
    stack, rng = make(dtype=jnp.float32), np.random.default_rng(1)
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), random_params(stack))
    inputs, targets = (rng.standard_normal((B, n)).astype(np.float32) for n in (I, O))
    x, loss, number = run(stack, params, inputs, targets)
    assert x.dtype == jnp.bfloat16
    assert loss.dtype == number.dtype == jnp.float32
