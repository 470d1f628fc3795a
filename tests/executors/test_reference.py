"""The reference executor against autodiff of the plain loss, and against finite differences."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import COMPILE_FAST, MODELS, difference, make_batch, make_params, make_stack
from support.selection import full, full_except

from ppctl.executors.reference import reference

NUM_LAYERS, BATCH_SIZE = 3, 8


def step_of(stack, **changes):
    settings = {
        "num_microbatches": 1,
        "remat": "none",
        "unroll": 16,
        "dtype": jnp.float64,
    } | changes
    step = jax.jit(reference(stack, **settings), compiler_options=COMPILE_FAST)

    def loss_and_grads(params, batch):
        losses, grads = step(params, batch)
        return losses["loss"], grads

    return loss_and_grads


@cache
def setup(model):
    stack = make_stack(model, NUM_LAYERS)
    return stack, make_params(stack), make_batch(model, BATCH_SIZE)


@cache
def run_plain(model):
    """(loss, gradients) of one microbatch, nothing recomputed, layers unrolled."""
    stack, params, batch = setup(model)
    return step_of(stack)(params, batch)


def mean_loss(stack, params, batch):
    x = stack.embed(params["embed_head"], batch["inputs"])
    for l in range(NUM_LAYERS):
        x = stack.layer(jax.tree.map(lambda a, l=l: a[l], params["layers"]), x)
    total, _ = stack.head(params["embed_head"], x, batch["targets"])
    return total / batch["targets"].size


@pytest.mark.parametrize("model", full_except([*MODELS], "mlp", "tied swiglu"))
def test_loss_and_gradients_equal_the_plain_mean_over_the_batch(model):
    stack, params, batch = setup(model)
    loss, grads = jax.jit(
        jax.value_and_grad(lambda params: mean_loss(stack, params, batch)),
        compiler_options=COMPILE_FAST,
    )(params)
    found_loss, found_grads = run_plain(model)
    assert found_loss == pytest.approx(float(loss), rel=1e-13)
    assert difference(found_grads, grads) <= 1e-12


@pytest.mark.parametrize("model", ["mlp", "tied swiglu"])
def test_gradients_are_the_slopes_of_the_loss(model):
    stack, params, batch = setup(model)
    _, grads = run_plain(model)
    loss = jax.jit(lambda params: mean_loss(stack, params, batch))
    leaves, treedef = jax.tree.flatten(params)
    rng, step = np.random.default_rng(3), 1e-5
    for i, (leaf, grad) in enumerate(zip(leaves, jax.tree.leaves(grads), strict=True)):
        places = np.unravel_index(rng.choice(leaf.size, 3, replace=False), leaf.shape)
        for place in zip(*places, strict=True):

            def moved(by, i=i, leaf=leaf, place=place):
                other = leaf.copy()
                other[place] += by
                return jax.tree.unflatten(treedef, [*leaves[:i], other, *leaves[i + 1 :]])

            slope = (loss(moved(step)) - loss(moved(-step))) / (2 * step)
            assert grad[place] == pytest.approx(float(slope), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("model", "num_microbatches"), [("mlp", 2), full(("mlp", 8)), full(("untied gelu", 4))]
)
def test_gradients_accumulated_over_microbatches_equal_the_whole_batchs(model, num_microbatches):
    stack, params, batch = setup(model)
    loss, grads = run_plain(model)
    found_loss, found_grads = step_of(stack, num_microbatches=num_microbatches)(params, batch)
    assert found_loss == pytest.approx(float(loss), rel=1e-13)
    assert difference(found_grads, grads) <= 1e-12


CHANGES = [{"unroll": 0, "remat": "layer"}, {"remat": "full"}, {"remat": "layer"}, {"unroll": 0}]


@pytest.mark.parametrize("changes", full_except(CHANGES, {"unroll": 0, "remat": "layer"}), ids=str)
def test_recomputing_and_scanning_do_not_change_the_gradients(changes):
    stack, params, batch = setup("untied swiglu grouped")
    loss, grads = run_plain("untied swiglu grouped")
    found_loss, found_grads = step_of(stack, num_microbatches=2, **changes)(params, batch)
    assert found_loss == pytest.approx(float(loss), rel=1e-13)
    assert difference(found_grads, grads) <= 1e-12


def test_a_run_of_equal_layers_is_scanned_and_gives_the_same_gradients():
    stack, params, batch = setup("mlp")
    plain = stack.layer
    other = lambda w, x: x - plain(w, x)
    stack = replace(stack, layer=(other, *[plain] * (NUM_LAYERS - 1)))
    loss, grads = step_of(stack)(params, batch)
    scanned = reference(stack, num_microbatches=1, remat="none", unroll=0, dtype=jnp.float64)
    found, found_grads = jax.jit(scanned, compiler_options=COMPILE_FAST)(params, batch)
    assert found["loss"] == pytest.approx(float(loss), rel=1e-13)
    assert difference(found_grads, grads) <= 1e-12
    text = str(jax.make_jaxpr(scanned)(params, batch))
    assert f"length={NUM_LAYERS - 1}" in text
