"""Inputs that are a dict of arrays, in a Stack and a Network, against plain JAX in float64."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.selection import full

import ppctl

BATCH, D = 8, 6


def make_batch(size=BATCH):
    rng = np.random.default_rng(0)
    ids = rng.integers(5, size=(size, 3), dtype=np.int32)
    image = {"pixels": rng.standard_normal((size, 4)), "scale": rng.standard_normal(size)}
    return {"inputs": {"ids": ids, "image": image}, "targets": rng.standard_normal((size, 2))}


def embed(params, inputs):
    seen = inputs["image"]["pixels"] * inputs["image"]["scale"][:, None]
    return params["table"][inputs["ids"]].sum(1) + seen @ params["in"]


def loss(y, targets):
    return jnp.square(y - targets).sum(), jnp.asarray(y.size, y.dtype)


def init(key):
    keys = jax.random.split(key, 5)
    normal = lambda k, *shape: jax.random.normal(k, shape, jnp.float64) / 2
    ends = {"table": normal(keys[0], 5, D), "in": normal(keys[1], 4, D)}
    return {**ends, "w": [normal(k, D, D) for k in keys[2:4]], "out": normal(keys[4], D, 2)}


def network():
    def apply(params, inputs):
        x = embed(params, inputs)
        x = ppctl.stage_boundary(x + jnp.tanh(x @ params["w"][0]))
        x = x + jnp.tanh(x @ params["w"][1])
        return (x + inputs["image"]["pixels"].sum(-1, keepdims=True)) @ params["out"]

    return ppctl.Network(init, apply, loss)


def stack():
    def initial():
        params = init(jax.random.key(0))
        layers = {"w": jnp.stack(params.pop("w"))}
        return {"embed_head": params, "layers": layers}

    return ppctl.Stack(
        2,
        lambda key: initial()["embed_head"],
        lambda key, l: {"w": initial()["layers"]["w"][l]},
        embed,
        lambda layer, x: x + jnp.tanh(x @ layer["w"]),
        lambda params, x, targets: loss(x @ params["out"], targets),
        ppctl.StackOptions(outputs=lambda params, x: x @ params["out"]),
    )


@cache
def of_plain_network():
    batch, params = make_batch(), init(jax.random.key(0))

    def mean(params):
        total, number = loss(network().apply(params, batch["inputs"]), batch["targets"])
        return total / number

    return jax.device_get(jax.value_and_grad(mean)(params))


def assert_same(found, wanted):
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


def make(model, mesh, batch=None, **how):
    usual = {"num_microbatches": 2, "optimizer": optax.sgd(0.1), "dtype": "float64"} | how
    batch = make_batch() if batch is None else batch
    return ppctl.pipeline(model, mesh=ppctl.mesh(**mesh), batch=batch, **usual)


WAYS = [
    ({"pp": 2, "dp": 2}, {"schedule": "1f1b"}),
    ({"pp": 2, "dp": 2}, {"schedule": "zb_h1", "executor": "mpmd"}),
]


@pytest.mark.parametrize(("mesh", "how"), [*map(full, WAYS)])
def test_a_network_takes_a_tree(mesh, how):
    pipe = make(network(), mesh, **how)
    state = pipe.init(seed=0)
    loss, grads = pipe.loss_and_grads(state, make_batch())
    assert_same((loss, pipe.stack.options.network.parameters.from_parts(grads)), of_plain_network())


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "how"), [WAYS[0], full(WAYS[1])])
def test_a_stack_takes_a_tree(mesh, how):
    pipe = make(stack(), mesh, **how)
    plain = make(stack(), {}, executor="reference", num_microbatches=1)
    placed = pipe.put(make_batch())
    state = pipe.init(seed=0)
    same = plain.from_natural(pipe.to_natural(state))
    wanted = jax.device_get(plain.loss_and_grads(same, make_batch()))
    assert_same(pipe.loss_and_grads(state, placed), wanted)
    few = make_batch(3)
    outputs = pipe.predict(state, few["inputs"])
    ends = init(jax.random.key(0))
    x = embed(ends, few["inputs"])
    for w in ends["w"]:
        x = x + jnp.tanh(x @ w)
    assert_same(outputs, x @ ends["out"])
    _, metrics = pipe.step(state, placed)
    assert float(metrics["loss"]) == pytest.approx(float(wanted[0]), rel=1e-12)


def test_wrong_input_trees_are_refused_in_one_line():
    batch = make_batch()
    uneven = batch | {"inputs": batch["inputs"] | {"ids": batch["inputs"]["ids"][:4]}}
    with pytest.raises(
        ppctl.PpctlError, match=r"^inputs\.ids \(4, 3\) and .* differ in batch size"
    ):
        make(stack(), {"pp": 2}, uneven, schedule="1f1b")
    with pytest.raises(ppctl.PpctlError, match=r"^inputs\.image is an empty dict"):
        make(stack(), {"pp": 2}, batch | {"inputs": {"image": {}}}, schedule="1f1b")
    pipe = make(stack(), {"pp": 2}, schedule="1f1b")
    other = batch | {"inputs": {"ids": batch["inputs"]["ids"]}}
    with pytest.raises(ppctl.PpctlError, match=r"The batch has shapes .*inputs\.image\.pixels"):
        pipe.step(pipe.init(), other)
