"""Gradients added to their sums as they are made: equal to autodiff's, no arrays besides, and layer
after layer.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases
from support.mpmd_cases import MpmdCase, make_engine

from ppctl.executors.outer_layers import add_head_grads
from ppctl.executors.stage.jaxpr_tools import add_outputs, demand, depending_only, flatten
from ppctl.executors.stage.layer_programs import LayerPrograms
from ppctl.executors.stage.stage import Stage
from ppctl.model import cross_entropy as module
from ppctl.model.experts import triton_products
from ppctl.model.experts.grouped_products import KERNELS
from ppctl.schedule.remat import Remat

TOKENS, WIDTH, VOCAB_SIZE = 12, 6, 11


# --- the head -----------------------------------------------------------------------------------


def head(is_tied):
    def run(embed_head, y, targets):
        x = y * embed_head["scale"]
        form = module.HeadForm(is_tied, None, VOCAB_SIZE)
        loss = module.cross_entropy(x, embed_head["matrix"], targets, form)
        return loss, jnp.float32(TOKENS)

    return run


def arrays(is_tied, dtype="float64"):
    draw = np.random.default_rng(0)
    some = lambda *shape: jnp.asarray(draw.standard_normal(shape), dtype)
    embed_head = {
        "matrix": some(*(VOCAB_SIZE, WIDTH)[:: 1 if is_tied else -1]),
        "scale": some(WIDTH),
    }
    return embed_head, some(TOKENS, WIDTH), jnp.asarray(draw.integers(VOCAB_SIZE, size=TOKENS))


@pytest.fixture(params=[1, 3], ids=["one chunk", "three chunks"])
def chunks(request, monkeypatch):
    for name, size in {"LEAST_TOKENS": TOKENS // request.param, "MOST_LOGITS": 1}.items():
        monkeypatch.setattr(module, name, size)


@pytest.mark.parametrize("is_tied", [False, True])
def test_gradient_sums_with_a_chunked_head_equal_autodiff(is_tied, chunks):
    with jax.enable_x64(True):
        embed_head, y, targets = arrays(is_tied)
        total = jax.tree.map(jnp.cos, embed_head)
        loss, pull, number = jax.vjp(
            lambda embed_head, y: head(is_tied)(embed_head, y, targets), embed_head, y, has_aux=True
        )
        embed_head_grad, y_grad = pull(jnp.ones_like(loss))
        wanted = y_grad, jax.tree.map(jnp.add, total, embed_head_grad), loss, number
        found = jax.jit(lambda *args: add_head_grads(head(is_tied), *args))(
            embed_head, y, targets, total
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-13), found, wanted
        )


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_gradient_of_a_head_by_chunks_is_no_array_by_itself(is_tied, chunks):
    """Before the chunks or after them: the sum goes through their loop in its precision."""
    embed_head, y, targets = arrays(is_tied, "bfloat16")
    total = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), embed_head)
    jaxpr = jax.make_jaxpr(lambda *args: add_head_grads(head(is_tied), *args))(
        embed_head, y, targets, total
    ).jaxpr
    needed, _ = demand(jaxpr, [True] * len(jaxpr.outvars))
    shape = embed_head["matrix"].shape
    made = [
        eqn.primitive.name
        for i, eqn in enumerate(jaxpr.eqns)
        if i in needed
        for v in eqn.outvars
        if v.aval.shape == shape
    ]
    assert made == ["scan"]


HEADS = {  # arguments: embed_head {"scale", "w"}, y [4, 3], targets [4, 3]
    "a scalar and an array that are not read": lambda embed_head, y, t: (
        jnp.square(y - t).sum(),
        y.size,
    ),
    "a scalar": lambda embed_head, y, t: (embed_head["scale"] * (y * t).sum(), y.size),
    "the parameters alone": lambda embed_head, y, t: (
        embed_head["scale"] + embed_head["w"].sum(),
        1,
    ),
    "a product twice": lambda embed_head, y, t: (
        (y @ embed_head["w"] + jnp.tanh(y @ embed_head["w"])).sum(),
        y.size,
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_any_head_has_the_sums_of_autodiff(name):
    y, targets = jnp.arange(12.0).reshape(4, 3), jnp.ones((4, 3))
    embed_head = {"scale": jnp.asarray(2.0), "w": jnp.arange(6.0).reshape(3, 2)}
    total, run = (
        jax.tree.map(jnp.cos, embed_head),
        lambda embed_head, y: HEADS[name](embed_head, y, targets)[0],
    )
    loss, (grads, y_grad) = jax.jit(jax.value_and_grad(run, (0, 1)))(embed_head, y)
    found = jax.jit(lambda *args: add_head_grads(HEADS[name], *args))(embed_head, y, targets, total)
    wanted = (
        y_grad,
        jax.tree.map(jnp.add, total, grads),
        loss,
        HEADS[name](embed_head, y, targets)[1],
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-13), found, wanted)


def test_a_scalar_of_a_layer_that_is_not_read_has_its_sum():
    layer = LayerPrograms(
        lambda w, x: x * 2,
        Remat.of("layer"),
        w := {"scale": jnp.asarray(1.0)},
        x := jnp.ones((2, 3)),
    )
    gx, sums = layer.add_grads("redo", (w, x, x), {"scale": jnp.asarray(5.0)})
    np.testing.assert_array_equal(gx, 2 * x)
    assert float(sums["scale"]) == 5


# --- products -----------------------------------------------------------------------------------


def test_a_product_is_rounded_as_its_sum_is():
    g, x = jnp.full((64, 3), 1 + 2**-7, jnp.bfloat16), jnp.ones((64, 5), jnp.bfloat16)
    program = flatten(jax.make_jaxpr(lambda g, x: ((g.T @ x).T, g @ (g.T @ x)))(g, x))
    total = jnp.full((5, 3), 2.0**-10, jnp.float32)
    found, other = add_outputs(program, (g, x), (total, None))
    assert other.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, np.full((5, 3), 64 * (1 + 2**-7) + 2**-10, np.float32))


def test_a_product_that_something_else_reads_stays_as_it_is():
    g, x = jnp.ones((4, 3), jnp.bfloat16), jnp.ones((4, 5), jnp.bfloat16)

    def program(g, x):
        product = g.T @ x
        return product, jnp.tanh(product)

    jaxpr = jax.make_jaxpr(
        lambda *args: add_outputs(
            flatten(jax.make_jaxpr(program)(g, x)), args, (jnp.zeros((3, 5)), None)
        )
    )
    dots = [eqn for eqn in jaxpr(g, x).jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert [eqn.outvars[0].aval.dtype for eqn in dots] == [jnp.bfloat16]


@pytest.mark.parametrize(("kernel", "by"), [("scan", "scan"), ("triton", "pallas_call")])
def test_gradients_of_experts_begin_with_their_sum(kernel, by):
    """No array of all experts' gradients is made to be added."""
    interpreted = partial(triton_products.weights, interpret=True)
    weights = {"scan": KERNELS["scan"].weights, "triton": interpreted}[kernel]
    sizes = jnp.asarray([3, 0, 4], jnp.int32)
    x, w, g = jnp.ones((8, 4), jnp.bfloat16), jnp.ones((3, 4, 5), jnp.bfloat16), jnp.ones((8, 5))

    def program(x, w, g):
        return (weights(x, g.astype(x.dtype), sizes).astype(w.dtype),)

    total = jnp.cos(jnp.arange(60.0, dtype=jnp.float32)).reshape(w.shape)
    begin = lambda total: add_outputs(
        flatten(jax.make_jaxpr(program)(x, w, g)), (x, w, g), (total,)
    )
    np.testing.assert_array_equal(begin(total)[0], total + program(x, w, g)[0])
    jaxpr = jax.make_jaxpr(begin)(total).jaxpr
    needed, _ = demand(jaxpr, [True])
    made = [
        jaxpr.eqns[i].primitive.name
        for i in needed
        for v in jaxpr.eqns[i].outvars
        if v.aval.shape == w.shape
    ]
    assert made == [by]


# --- the order of layers ------------------------------------------------------------------------


def block(w, x):
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def backward_of(num_layers, remat):
    """(jaxpr of the backward of a stage with sums, its inputs by name)."""
    w0 = {"up": jnp.ones((4, 8)), "down": jnp.ones((8, 4))}
    x = jnp.ones((2, 4))
    stage, w = Stage(block, Remat.of(remat), w0, x, in_order=True), [w0] * num_layers
    stash = stage.programs.stash_shapes(w)
    args = {
        "w": w,
        "stash": jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), stash),
        "gy": x,
        "sums": w,
    }

    def run(args):
        return stage.backward(
            args["w"], None, args["stash"], lambda _: (args["gy"], ()), args["sums"]
        )

    jaxpr = jax.make_jaxpr(run)(args).jaxpr
    names = [
        path[0].key + str(path[1].idx if len(path) > 1 else "")
        for path, _ in jax.tree_util.tree_leaves_with_path(args)
    ]
    return jaxpr, names


@pytest.mark.parametrize("absent", ["gy", "sums2", "sums1"])
def test_a_layer_is_recomputed_after_the_backward_of_later_layers(absent):
    """Else XLA for GPUs recomputes all layers of a stage before the backward of the last one."""
    jaxpr, names = backward_of(3, "layer")
    before = depending_only(jaxpr, [name != absent for name in names])
    products = [
        eqn.outvars[0] in before for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"
    ]
    of_layer = len(products) // 3
    done = {"gy": 0, "sums2": of_layer, "sums1": 2 * of_layer}[absent]
    assert products == [True] * done + [False] * (len(products) - done)


# --- after the tasks ----------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["untied gelu", "tied swiglu"])
def test_finishing_the_gradients_of_a_rank_copies_no_array(model):
    engine, _ = make_engine(MpmdCase("1f1b", (1, 2, 1), model=model, num_layers=4))
    found = [each for each in engine.programs().programs if each.name.startswith("finish")]
    assert found
    for program in found:
        leaves = jax.tree.leaves(program.traced.out_info[1:])
        if (
            model == "tied swiglu" and 0 in program.ranks
        ):  # the sum of both ranks' embeddings is a result once more
            leaves.remove(
                next(
                    a for a in leaves if a.shape == (cases.VOCAB_SIZE, cases.TRANSFORMER["d_model"])
                )
            )
        aliased = program.compiled.memory_analysis().alias_size_in_bytes
        assert aliased >= sum(a.size * a.dtype.itemsize for a in leaves)
