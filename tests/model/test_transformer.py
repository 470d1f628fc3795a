"""The function of the transformer, by its public functions. Shape suffixes as in the model."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.selection import full

from ppctl import transformer
from ppctl.config.groups.rope_settings import Rope
from ppctl.executors.reference import reference
from ppctl.model.attention.attention_kernels import kernel_named
from ppctl.model.attention.attention_scores import softmax
from ppctl.model.attention.rotary_positions import rotate
from ppctl.model.stack import init

B, T, D, V, L, HEADS = 2, 8, 16, 32, 3, 4
SETTINGS = {
    "num_layers": L,
    "d_model": D,
    "num_heads": HEADS,
    "num_kv_heads": None,
    "mlp_width": 40,
    "activation": "gelu",
    "vocab_size": V,
    "tied": False,
    "dtype": jnp.float64,
}
VARIANTS = [
    {},
    {"tied": True},
    {"activation": "swiglu"},
    {"num_kv_heads": 2},
    {"num_kv_heads": 1, "activation": "swiglu"},
]
variants = pytest.mark.parametrize("changes", VARIANTS, ids=str)


def make(**changes):
    return transformer(**(SETTINGS | changes))


def random_params(stack, seed=0):
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: init(stack, 0))
    return jax.tree.map(lambda a: (0.3 * rng.standard_normal(a.shape)).astype(a.dtype), shapes)


def random_tokens(seed=1):
    return np.random.default_rng(seed).integers(0, V, (2, B, T), np.int32)


def layer_of(params, l):
    return jax.tree.map(lambda a: a[l], params["layers"])


def outputs(stack, params, inputs):
    """x after every layer: [B, T, D]."""
    x = stack.embed(params["embed_head"], inputs)
    for l in range(stack.num_layers):
        x = stack.layer(layer_of(params, l), x)
    return x


def num_params(tree):
    return sum(math.prod(a.shape) for a in jax.tree.leaves(tree))


@variants
def test_shapes_and_sizes_follow_the_settings(changes):
    stack = make(**changes)
    params = jax.eval_shape(lambda: init(stack, 0))
    assert all(
        leaf.shape[0] == L and leaf.dtype == jnp.float64
        for leaf in jax.tree.leaves(params["layers"])
    )
    kv_width = D // HEADS * changes.get("num_kv_heads", HEADS)
    num_matrices = 3 if changes.get("activation") == "swiglu" else 2
    assert num_params(params["layers"]) == L * (
        2 * D * D + 2 * D * kv_width + num_matrices * D * 40 + 2 * D
    )
    assert num_params(params["embed_head"]) == V * D * (1 if changes.get("tied") else 2) + D
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
    x = jax.eval_shape(stack.embed, params["embed_head"], tokens)
    layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), params["layers"])
    assert jax.eval_shape(stack.layer, layer, x) == x
    assert x.shape == (B, T, D)
    loss, number = jax.eval_shape(stack.head, params["embed_head"], x, tokens)
    assert loss.shape == number.shape == ()


@variants
def test_a_token_changes_all_later_outputs_and_no_earlier_one(changes):
    stack = make(**changes)
    params, (inputs, _) = random_params(stack), random_tokens()
    run = jax.jit(lambda params, inputs: outputs(stack, params, inputs))
    before = run(params, inputs)
    for t in range(T):
        other = inputs.copy()
        other[0, t] = (other[0, t] + 1) % V
        changed = np.abs(np.asarray(run(params, other) - before)).max(axis=-1)
        assert (changed[0, :t] == 0).all()
        assert (changed[0, t:] > 1e-6).all()
        assert (changed[1] == 0).all()  # nor another sequence


# --- rotary positions ---------------------------------------------------------------------------


@pytest.mark.parametrize("theta", [10.0, 10000.0])
def test_scores_of_rotated_queries_and_keys_depend_only_on_the_distance(theta):
    rng = np.random.default_rng(0)
    q_H, k_H = rng.standard_normal((2, 6))
    repeat = lambda x_H: jnp.asarray(np.tile(x_H, (1, 12, 1, 1)))
    q_TH, k_TH = (
        rotate(repeat(q_H), Rope(theta))[0, :, 0],
        rotate(repeat(k_H), Rope(theta))[0, :, 0],
    )
    scores_TS = np.asarray(q_TH @ k_TH.T)
    for distance in range(-11, 12):
        diagonal = np.diagonal(scores_TS, distance)
        assert diagonal == pytest.approx(np.full(len(diagonal), diagonal[0]), rel=1e-12)
    assert (
        len({round(float(np.diagonal(scores_TS, d)[0]), 9) for d in range(-11, 12)}) == 23
    )  # and they do depend


def test_pairs_turn_by_the_angle_of_their_frequency():
    H, theta, t = 6, 100.0, 5
    x = np.random.default_rng(0).standard_normal((1, t + 1, 1, H))
    turned = np.asarray(rotate(jnp.asarray(x), Rope(theta)))[0, t, 0]
    for i in range(H // 2):
        number = complex(x[0, t, 0, i], x[0, t, 0, i + H // 2])
        number *= np.exp(1j * t * theta ** (-2 * i / H))
        assert (turned[i], turned[i + H // 2]) == pytest.approx((number.real, number.imag))
    assert np.asarray(rotate(jnp.asarray(x), Rope(theta)))[0, 0, 0] == pytest.approx(
        x[0, 0, 0]
    )  # position 0 stays


# --- attention ----------------------------------------------------------------------------------


def test_attention_is_the_softmax_of_scaled_scores_over_earlier_tokens():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, B, T, HEADS, 4))
    found = np.asarray(kernel_named("xla")(*map(jnp.asarray, (q, k, v))))
    for b, t, n in np.ndindex(B, T, HEADS):
        weights = np.exp(k[b, : t + 1, n] @ q[b, t, n] / 2.0)  # 2 = sqrt(4)
        assert found[b, t, n] == pytest.approx(weights @ v[b, : t + 1, n] / weights.sum())


def test_the_derivative_of_softmax_follows_its_formula():
    scores, change = np.random.default_rng(0).standard_normal((2, 3, 5))
    formula = lambda a: jnp.exp(a) / jnp.exp(a).sum(-1, keepdims=True)
    ours = lambda a: softmax(a, jnp.float64)
    for found, expected in zip(
        *(jax.jvp(f, (scores,), (change,)) for f in (ours, formula)), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)
    found, expected = (jax.vjp(f, scores)[1](change)[0] for f in (ours, formula))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_grouped_queries_equal_full_attention_with_the_kv_heads_repeated(num_kv_heads):
    H, repeats = D // HEADS, HEADS // num_kv_heads
    grouped, full = make(num_kv_heads=num_kv_heads), make()
    params = random_params(grouped)

    def repeated(path, leaf):
        if path[-2].key not in ("key", "value"):
            return leaf
        heads = leaf.reshape(L, D, num_kv_heads, H)
        return np.repeat(heads, repeats, axis=2).reshape(L, D, HEADS * H)

    wide = jax.tree_util.tree_map_with_path(repeated, params)
    inputs, _ = random_tokens()
    found, wanted = (
        np.asarray(jax.jit(partial(outputs, stack))(w, inputs))
        for stack, w in ((grouped, params), (full, wide))
    )
    assert found == pytest.approx(wanted, rel=1e-12)


# --- head and loss ------------------------------------------------------------------------------


def step_of(stack, dtype=jnp.float64):
    step = reference(stack, num_microbatches=1, remat="none", unroll=0, dtype=dtype)

    def loss_and_grads(params, batch):
        losses, grads = step(params, batch)
        return losses["loss"], grads

    return jax.jit(
        loss_and_grads, compiler_options={"xla_backend_optimization_level": 0}
    )  # most time is compiling


def test_the_gradient_of_a_tied_embedding_is_the_sum_of_both_its_uses():
    tied, untied = make(tied=True), make()
    params, (inputs, targets) = random_params(tied), random_tokens()
    batch = {"inputs": inputs, "targets": targets}
    embed_head = params["embed_head"] | {"head": params["embed_head"]["embedding"].T}
    loss, grads = step_of(tied)(params, batch)
    other_loss, other = step_of(untied)(params | {"embed_head": embed_head}, batch)
    assert loss == pytest.approx(float(other_loss), rel=1e-13)
    both = np.asarray(other["embed_head"]["embedding"] + other["embed_head"]["head"].T)
    assert np.asarray(grads["embed_head"]["embedding"]) == pytest.approx(both, rel=1e-10, abs=1e-14)
    for use in (
        other["embed_head"]["embedding"],
        other["embed_head"]["head"].T,
    ):  # one needs the other
        assert np.abs(np.asarray(grads["embed_head"]["embedding"] - use)).max() > 1e-3


@pytest.mark.parametrize("tied", [True, False])
def test_an_untrained_models_loss_is_the_logarithm_of_the_vocabulary(tied):
    stack = make(tied=tied)
    params = jax.tree.map(np.zeros_like, random_params(stack))
    inputs, targets = random_tokens()
    loss, _ = step_of(stack)(params, {"inputs": inputs, "targets": targets})
    assert loss == pytest.approx(math.log(V), rel=1e-12)


def test_the_loss_is_the_cross_entropy_of_every_token():
    stack = make()
    embed_head, (_, targets) = random_params(stack)["embed_head"], random_tokens()
    x = np.random.default_rng(2).standard_normal((B, T, D))
    loss, number = stack.head(embed_head, jnp.asarray(x), targets)
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * embed_head["norm"]["scale"]
    logits = normed @ embed_head["head"]
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert loss == pytest.approx(
        -sum(log_probs[b, t, targets[b, t]] for b, t in np.ndindex(B, T)), rel=1e-12
    )
    assert number == B * T


@pytest.mark.parametrize(
    "changes", [{"tied": True}, full({"num_kv_heads": 2, "activation": "swiglu"})], ids=str
)
def test_bfloat16_compute_keeps_losses_and_parameters_in_float32(changes):
    stack = make(dtype=jnp.float32, **changes)
    params, (inputs, targets) = random_params(stack), random_tokens()
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
    batch = {"inputs": inputs, "targets": targets}
    loss, grads = step_of(stack, jnp.bfloat16)(params, batch)
    assert loss.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {np.dtype("float32")}
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    x = jax.eval_shape(lambda: outputs(stack, half, inputs))
    assert x.dtype == jnp.bfloat16  # nothing on the way is widened for good
    exact, _ = step_of(stack, jnp.float32)(params, batch)
    assert loss == pytest.approx(float(exact), rel=0.05)
    assert loss != exact


def test_rotary_positions_compile_without_concatenation():
    there_and_back = lambda x: jax.vjp(lambda x: rotate(x, Rope()), x)[1](x)
    found = {
        eqn.primitive.name
        for eqn in jax.make_jaxpr(there_and_back)(jnp.zeros((1, 4, 2, 8))).jaxpr.eqns
    }
    assert "rev" in found
    assert "concatenate" not in found


def test_a_program_holds_one_copy_of_the_rotary_tables():
    step = reference(make(), num_microbatches=1, remat="layer", dtype=jnp.float64)
    inputs, targets = random_tokens()
    batch = {"inputs": inputs, "targets": targets}
    text = jax.jit(step).lower(random_params(make()), batch).as_text()
    constants = [line for line in text.splitlines() if "stablehlo.constant" in line]
    for pairs in (1, 2):  # cosines, signed sines
        assert (
            sum(f"tensor<{T}x1x{pairs}x{D // HEADS // 2}xf64>" in line for line in constants) == 1
        )
