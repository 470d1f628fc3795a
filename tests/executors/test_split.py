"""I, then W, equal the whole backward bit for bit, and W does not repeat the chain of gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import MODELS, SAME_BITS, make_params, make_stack
from support.selection import full, full_except

from ppctl import transformer
from ppctl.errors import ConfigError
from ppctl.executors.stage.jaxpr_flops import matmul_flops
from ppctl.executors.stage.slot_programs import LayerSlots
from ppctl.executors.stage.stage import Stage
from ppctl.schedule.remat import Remat

WIDTH = 16


# --- layers whose backwards are hard to split ---------------------------------------------------


def dense(w, x):
    return jnp.tanh(x @ w["a"]) @ w["b"] + x


def nested_jit(w, x):
    outer = jax.jit(lambda w, x: jax.jit(dense)(w, x) * w["scale"])
    return outer(w, x) + x


def sub_layers(w, x):
    return jax.lax.scan(lambda x, sub: (dense(sub, x), None), x, w["subs"])[0] * w["scale"]


def time_steps(w, x):
    """A recurrent layer: the weights are constants of the loop, their gradients sums that it
    carries.
    """

    def step(h, x_t):
        h = jnp.tanh(x_t @ w["a"] + h @ w["b"])
        return h, h

    return jax.lax.scan(step, jnp.zeros(x.shape[1:], x.dtype), x, reverse=True)[1] * w["scale"]


def nested_scan(w, x):
    return jax.lax.scan(
        lambda x, scale: (sub_layers(w, x) * scale, None), x, jnp.arange(1.0, 3.0, dtype=x.dtype)
    )[0]


def remat(w, x):
    return jax.checkpoint(dense)(w, x) * w["scale"]


def remat_in_scan(w, x):
    return jax.lax.scan(jax.checkpoint(lambda x, sub: (dense(sub, x), None)), x, w["subs"])[0]


def scan_in_remat(w, x):
    return jax.checkpoint(sub_layers)(w, x)


@jax.custom_vjp
def clipped(w, x):
    return x @ w


clipped.defvjp(
    lambda w, x: (x @ w, (w, x)),
    lambda saved, g: (saved[1].T @ jnp.clip(g, -1, 1), jnp.clip(g, -1, 1) @ saved[0].T),
)


def custom_vjp(w, x):
    return clipped(w["a"], jax.nn.silu(x)) * w["scale"] + x  # silu: a custom jvp


@jax.checkpoint
def constants(w, x):
    """A mask that no microbatch changes, a weight of weights, and parameters that are not used."""
    mask = jnp.tril(jnp.ones((WIDTH, WIDTH)))
    return x @ (w["a"] * mask) @ (w["b"] @ w["a"])


def input_passed_on(w, x):
    return x + w["scale"]


def no_input_gradient(w, x):
    return jnp.broadcast_to(w["scale"] * jnp.square(w["scale"]), x.shape)


LAYERS = (
    *(
        dense,
        nested_jit,
        sub_layers,
        time_steps,
        nested_scan,
        remat,
        remat_in_scan,
        scan_in_remat,
        custom_vjp,
    ),
    *(constants, input_passed_on, no_input_gradient),
)


def synthetic(layer):
    """(layer, parameters of one layer, shape of x)."""
    rng = np.random.default_rng(0)
    square = lambda *lead: jnp.asarray(rng.standard_normal((*lead, WIDTH, WIDTH)) / WIDTH**0.5)
    w = {"a": square(), "b": square(), "scale": jnp.asarray(rng.standard_normal(WIDTH))}
    return layer, w | {"subs": {"a": square(3), "b": square(3)}}, (8, WIDTH)


def of_model(model):
    stack = make_stack(model, 1)
    w = jax.tree.map(lambda a: jnp.asarray(a[0]), make_params(stack)["layers"])
    return stack.layer, w, (8, WIDTH) if model == "mlp" else (2, 4, WIDTH)


BLOCKS = {layer.__name__: partial(synthetic, layer) for layer in LAYERS} | {
    m: partial(of_model, m) for m in MODELS
}


# --- the same gradients -------------------------------------------------------------------------


class Halves:
    """The compiled backward of a stage of equal layers, whole and in halves, and its arguments."""

    def __init__(self, block, remat, *, num_layers=1, stacked=False, count=None, dtype=jnp.float64):
        layer, w0, shape = block
        self.w = [jax.tree.map(lambda a, n=n: a / n, w0) for n in range(1, num_layers + 1)]
        if stacked:
            self.w = jax.tree.map(lambda *leaves: jnp.stack(leaves), *self.w)
        x, gy = (
            jnp.asarray(a, dtype) for a in np.random.default_rng(1).standard_normal((2, *shape))
        )
        self.stage = stage = Stage(
            layer, Remat.of(remat), w0, jax.ShapeDtypeStruct(x.shape, x.dtype)
        )
        rows = None if count is None else LayerSlots(jnp.int32(count))
        cotangent = lambda gy: lambda y: (gy, y)
        self.stash = jax.jit(lambda w: stage.forward(w, rows, x)[1])(self.w)
        self.whole = self.compile(
            lambda w, stash, gy: stage.backward(w, rows, stash, cotangent(gy)), self.stash, gy
        )
        self.first = self.compile(
            lambda w, stash, gy: stage.input_grad(w, rows, stash, cotangent(gy)), self.stash, gy
        )
        gx, self.pending, aux = self.first(self.w, self.stash, gy)
        self.second = self.compile(
            lambda w, pending: stage.weight_grad(w, rows, pending), self.pending
        )
        self.found = gx, self.second(self.w, self.pending), aux
        self.expected = self.whole(self.w, self.stash, gy)

    def compile(self, function, *args):
        return jax.jit(function).lower(self.w, *args).compile(SAME_BITS)


def check_bits(halves):
    assert jax.tree.structure(halves.found) == jax.tree.structure(halves.expected)
    for found, expected in zip(*map(jax.tree.leaves, (halves.found, halves.expected)), strict=True):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert np.array_equal(found, expected)
    for pending in jax.tree.leaves(halves.pending):
        assert not any(pending is leaf for leaf in jax.tree.leaves(halves.w))


QUICK = (
    "nested_jit",
    "time_steps",
    "nested_scan",
    "remat",
    "remat_in_scan",
)  # they have dense parts


@pytest.mark.parametrize("name", full_except([*BLOCKS], *QUICK))
def test_the_halves_give_the_bits_of_the_whole(name):
    check_bits(Halves(BLOCKS[name](), "none"))


STAGES = [  # blocks x remat x (stacked, padded)
    *(
        ("untied swiglu grouped", remat, *how)
        for remat in ("none", "layer", "full")
        for how in ((False, None), (True, 2))
    ),
    ("sub_layers", "layer", True, None),
    ("remat", "full", False, 2),
]


@pytest.mark.parametrize(
    ("name", "remat", "stacked", "count"),
    full_except(STAGES, ("untied swiglu grouped", "none", False, None)),
)
def test_the_halves_of_a_stage_give_the_bits_of_the_whole(name, remat, stacked, count):
    check_bits(Halves(BLOCKS[name](), remat, num_layers=3, stacked=stacked, count=count))


# --- the work -----------------------------------------------------------------------------------


def split_of(name):
    """(whole backward, its split, arguments of the whole) of a block, as functions of saved
    residuals.
    """
    layer, w, shape = BLOCKS[name]()
    x = jnp.ones(shape)
    programs = Stage(layer, Remat.NONE, w, jax.ShapeDtypeStruct(shape, x.dtype)).programs.layers[0]
    return programs.pull, programs.split, (w, programs.saved, x)


@pytest.mark.parametrize("model", [model for model in MODELS if model != "mlp"])
def test_a_backward_without_recomputation_runs_no_matrix_product_of_the_forward(model):
    layer, w, shape = of_model(model)
    x = jax.ShapeDtypeStruct(shape, jnp.float64)
    programs = Stage(layer, Remat.NONE, w, x).programs.layers[0]
    assert matmul_flops(programs.pull, w, programs.saved, x) == 2 * matmul_flops(layer, w, x)


def test_residuals_depend_on_the_microbatch_and_each_is_kept_once():
    layer, w, shape = of_model("untied gelu")
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape))
    B, T, D = shape
    programs = Stage(layer, Remat.NONE, w, jax.ShapeDtypeStruct(shape, x.dtype)).programs.layers[0]
    hidden = 2 * D  # width of the MLP
    # x; value, the projection of the mixed values; query and key after their rotation, and the
    # mixed values, of 4 heads; the hidden values; the heads' weights
    of_heads = (B, T, 4, D // 4)
    expected = [(B, T, D), *2 * [(B * T, D)], *3 * [of_heads], (B * T, hidden), (B, 4, T, T)]
    assert sorted(shape.shape for shape in programs.saved) == sorted(expected)
    other = programs.save(w, x + 1)[1]
    for a, b in zip(programs.save(w, x)[1], other, strict=True):
        assert not np.array_equal(a, b)


@pytest.mark.parametrize(
    ("dtype", "rounds"), [("float32", False), ("float64", False), ("bfloat16", True)]
)
def test_residuals_are_rounded_where_a_compiler_would_keep_more_bits(dtype, rounds):
    w, x = (
        {"a": jnp.ones((WIDTH, WIDTH), dtype), "b": jnp.ones((WIDTH, WIDTH), dtype)},
        jnp.ones((8, WIDTH), dtype),
    )
    programs = Stage(dense, Remat.NONE, w, jax.ShapeDtypeStruct(x.shape, x.dtype)).programs.layers[
        0
    ]
    assert ("reduce_precision" in str(jax.make_jaxpr(programs.save)(w, x))) is rounds


@pytest.mark.parametrize("name", BLOCKS)
def test_no_matrix_product_runs_twice(name):
    pull, split, (w, saved, x) = split_of(name)
    whole, first = matmul_flops(pull, w, saved, x), matmul_flops(split.input_grad, w, saved, x)
    assert first + matmul_flops(split.weight_grad, w, split.pending) == whole


def test_values_equal_for_all_microbatches_are_not_pending():
    _, split, (_, _, x) = split_of("constants")
    assert {shape.shape for shape in split.pending} == {
        x.shape
    }  # neither the mask nor anything made of weights


@pytest.mark.parametrize(("activation", "num_kv_heads"), [("gelu", None), full(("swiglu", 2))])
def test_flops_of_a_transformer_block_as_compiled(activation, num_kv_heads):
    settings = {
        "d_model": 256,
        "num_heads": 8,
        "num_kv_heads": num_kv_heads,
        "mlp_width": 1024,
        "activation": activation,
    }
    stack = transformer(num_layers=1, vocab_size=8, tied=True, dtype=jnp.float32, **settings)
    w = jax.tree.map(lambda a: jnp.asarray(a[0]), make_params(stack)["layers"])
    halves = Halves((stack.layer, w, (4, 128, 256)), "none", dtype=jnp.float32)
    whole, first, second = (
        f.cost_analysis()["flops"] for f in (halves.whole, halves.first, halves.second)
    )
    assert first + second <= 1.01 * whole
    assert first <= 0.57 * whole
    check_bits(halves)
    # pending: both operands of every product of W, and the gradients of two norms
    kv, hidden = (num_kv_heads or 8) * 32, 1024
    widths = 6 * 256 + 2 * kv + (2 + (activation == "swiglu")) * hidden
    assert sum(leaf.size for leaf in jax.tree.leaves(halves.pending)) == 4 * 128 * widths + 2 * 256


# --- what cannot be split -----------------------------------------------------------------------


def with_backward(backward):
    """A layer x @ a whose backward is the given function of (a, x, g)."""
    product = jax.custom_vjp(lambda a, x: x @ a)
    product.defvjp(lambda a, x: (x @ a, (a, x)), lambda saved, g: backward(*saved, g))
    return lambda w, x: product(w["a"], x)


def loop_of_both(a, x, g):
    def body(carry):
        i, da, dx = carry
        return i + 1, da + x.T @ g, dx + g @ a.T

    return jax.lax.while_loop(
        lambda carry: carry[0] < 1, body, (0, jnp.zeros_like(a), jnp.zeros_like(x))
    )[1:]


def branch_of_both(a, x, g):
    return jax.lax.cond(g[0, 0] > 0, lambda: (x.T @ g, g @ a.T), lambda: (jnp.zeros_like(a), g))


def host_call_of_both(a, x, g):
    shapes = jax.ShapeDtypeStruct(a.shape, a.dtype), jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda a, x, g: (x.T @ g, g @ a.T), shapes, a, x, g)


INSEPARABLE = {
    "while": (loop_of_both, "int64[], float64[16, 16], float64[8, 16]"),
    "cond": (branch_of_both, "float64[16, 16], float64[8, 16]"),
    "pure_callback": (host_call_of_both, "float64[16, 16], float64[8, 16]"),
}


@pytest.mark.parametrize("name", INSEPARABLE)
def test_an_operation_that_gives_both_gradients_is_refused(name):
    backward, results = INSEPARABLE[name]
    layer, w, shape = synthetic(with_backward(backward))
    stage = Stage(layer, Remat.NONE, w, jax.ShapeDtypeStruct(shape, jnp.float64))
    with pytest.raises(ConfigError) as error:
        _ = stage.programs.layers[0].split
    assert str(error.value) == (
        f"the backward of a layer cannot be split: {name}, with results {results}, yields the "
        "gradients of the layer's input and of its weights together. Write it with jax.lax.scan, "
        "or use a schedule of unsplit backwards, such as schedule=interleaved."
    )


def test_effects_run_once_in_the_first_half():
    seen = []

    def backward(a, x, g):
        dx = g @ a.T
        jax.debug.callback(lambda: seen.append(1), ordered=False)
        return x.T @ g, dx

    halves = Halves(synthetic(with_backward(backward)), "none")
    jax.effects_barrier()
    assert len(seen) == 2  # the whole and the first half
    check_bits(halves)
