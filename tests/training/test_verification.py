"""What `ppctl verify` compares, array by array, by the names that the model's author knows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.flax_models import heads_of_flax
from support.networks import widths

import ppctl
from ppctl.executors.stage.traced_network import TracedNetwork, stack_of
from ppctl.model.mlp import mlp
from ppctl.model.stack import init
from ppctl.training.verification.verification import compare_trees, in_layers, of_author


def test_arrays_of_a_network_have_the_authors_names():
    network = widths()
    inputs = jax.ShapeDtypeStruct((2, 6), jnp.float64)
    stack = stack_of(
        TracedNetwork(network, 4, auto=False, inputs=inputs, dtype=jnp.float64, compute=jnp.float64)
    )
    natural = jax.device_get(init(stack, 0))
    wanted = of_author(stack, {"params": natural, "optimizer": ({"mu": natural}, np.int32(3))})
    jax.tree.map(np.testing.assert_array_equal, wanted["params"], network.init(jax.random.key(0)))
    params = network.init(jax.random.key(0))
    params[2]["w"] = params[2]["w"] + 1.0
    found = {
        leaf.name: leaf
        for leaf in in_layers(stack, compare_trees(wanted, wanted | {"params": params}))
    }
    assert found["params/2/w"].error > 0.1
    assert {name for name, leaf in found.items() if leaf.error} == {"params/2/w"}
    assert (found["params/0/w"].layer, found["params/1/w"].layer, found["params/2/w"].layer) == (
        0,
        0,
        1,
    )
    assert (found["optimizer/0/mu/4/bias"].layer, found["optimizer/1"].layer) == (3, None)
    assert found["optimizer/1"].shape == ()


def test_arrays_of_a_stack_keep_theirs():
    stack = mlp(
        num_layers=3, d_model=4, activation="relu", input_dim=2, target_dim=1, dtype=jnp.float64
    )
    natural = init(stack, 0)
    assert of_author(stack, natural) is natural


def test_a_gradient_that_cancels_in_a_narrower_dtype_is_rounding():
    """The scores of Flax's attention are float32, and the bias of keys changes no probability."""
    stack = heads_of_flax()
    ids = np.random.default_rng(0).integers(16, size=(16, 9))
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
    how = {"batch": batch, "num_microbatches": 4, "dtype": "float64"}
    pipe = ppctl.pipeline(stack, ppctl.mesh(pp=2), "1f1b", optax.sgd(0.1), **how)
    found = ppctl.verify(pipe, batch)
    bias = next(leaf for leaf in found.gradients if leaf.name == "layers/key/bias")
    assert bias.max_abs < bias.max_difference / found.tolerance
    assert (found.tolerance, found.ok) == (1e-4, True)
