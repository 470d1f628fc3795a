"""The optimizer over a pipeline is the optimizer over the whole model."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.cases import Case, staged_step
from support.selection import full

from ppctl import transformer
from ppctl.executors.reference import reference
from ppctl.model.mlp import mlp
from ppctl.model.stack import init
from ppctl.training.pipeline import optimizers as optim
from ppctl.training.pipeline.optimizers import init_state, train_step

CLIP_NORM = 0.05
SETTINGS = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
LR_SCHEDULE = optim.learning_rates(lr=1e-2, min_lr_fraction=0.1, warmup_steps=2, num_steps=5)
NUM_STEPS = 5


def make_stack(num_layers):
    return mlp(
        num_layers=num_layers,
        d_model=16,
        activation="tanh",
        input_dim=8,
        target_dim=4,
        dtype=jnp.float64,
    )


def batches(batch_size):
    rng = np.random.default_rng(0)
    return [
        {
            "inputs": rng.standard_normal((batch_size, 8)),
            "targets": rng.standard_normal((batch_size, 4)),
        }
        for _ in range(NUM_STEPS)
    ]


def trained(loss_and_grads, optimizer, state, data):
    """(parameters, metrics of each step) after all batches."""
    options = {"xla_backend_optimization_level": 0}  # most time is compiling
    step, found = (
        jax.jit(train_step(loss_and_grads, optimizer, LR_SCHEDULE), compiler_options=options),
        [],
    )
    for batch in data:
        state, metrics = step(state, batch)
        found.append({name: float(value) for name, value in metrics.items()})
    assert state["step"] == len(data)
    return state["params"], found


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "num_chunks", "num_layers"),
    [((2, 2, 2), 2, 8), full(((1, 3, 1), 1, 7))],
    ids=["2x2x2", "1x3"],
)
def test_five_clipped_steps_of_a_pipeline_equal_five_of_the_reference_with_optax(
    mesh, num_chunks, num_layers
):
    stack, data = make_stack(num_layers), batches(48)
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda a: 0.3 * rng.standard_normal(a.shape), jax.eval_shape(lambda: init(stack, 0))
    )

    # the oracle: optax's own parts on the tree in natural order
    kernels = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)
    plain = optax.chain(
        optax.clip_by_global_norm(CLIP_NORM),
        optax.adamw(LR_SCHEDULE, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=kernels),
    )
    step = reference(stack, num_microbatches=1, remat="none", unroll=16, dtype=jnp.float64)
    expected, expected_metrics = trained(step, plain, init_state(params, plain), data)
    assert all(
        metrics["grad_norm"] > 2 * CLIP_NORM for metrics in expected_metrics
    )  # clipping is active in every step

    case = Case("interleaved", mesh, 6, num_chunks, num_layers, batch_size=48)
    layout = case.layout()
    optimizer = optim.clipped(optim.adamw(LR_SCHEDULE, **SETTINGS), CLIP_NORM)
    state = layout.to_staged(init_state(params, optimizer))
    state = jax.device_put(state, layout.shardings(layout.staged_specs(state)))
    step = staged_step(case, stack)
    found, metrics = trained(step, optimizer, state, data)

    for ours, theirs in zip(metrics, expected_metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10)
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        layout.to_natural(jax.tree.map(np.asarray, found))
    ):
        other = dict(jax.tree_util.tree_leaves_with_path(expected))[path]
        assert np.max(np.abs(leaf - other)) <= 1e-10 * np.max(np.abs(other)), path


def test_the_norm_of_a_gradient_is_over_all_its_leaves():
    rng = np.random.default_rng(0)
    tree = {
        "embed_head": rng.standard_normal((3, 4)),
        "layers": [rng.standard_normal(5), rng.standard_normal((2, 2, 2))],
    }
    flat = np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])
    assert optim.global_norm(tree) == pytest.approx(np.sqrt(np.sum(flat**2)), rel=1e-14)


def test_the_norm_of_a_bfloat16_gradient_is_computed_in_float32():
    tree = {"embed_head": jnp.full(4096, 1.0, jnp.bfloat16)}  # a sum in bfloat16 would stop at 256
    norm = optim.global_norm(tree)
    assert norm.dtype == jnp.float32
    assert norm == 64.0


def test_metrics_are_of_the_step_before_the_update():
    optimizer = optim.clipped(optim.adamw(LR_SCHEDULE, **SETTINGS), CLIP_NORM)
    grads = {"w": jnp.array([3.0, 4.0])}
    step = train_step(lambda params, batch: (batch, grads), optimizer, LR_SCHEDULE)
    state = init_state({"w": jnp.zeros(2)}, optimizer)
    for k in range(3):
        state, metrics = step(state, {"loss": jnp.asarray(float(k))})
        assert metrics["loss"] == k
        assert metrics["grad_norm"] == 5.0  # before clipping
        assert metrics["lr"] == pytest.approx(float(LR_SCHEDULE(k)))
        assert state["step"] == k + 1


@pytest.mark.parametrize("clip_norm", [4.0, 5.0, 6.0])
def test_clipping_by_a_known_norm_equals_optax_clipping_by_the_global_norm(clip_norm):
    grads = {"a": jnp.array([3.0]), "b": jnp.array([[4.0]])}
    found, state = optim.clip_by_norm(clip_norm).update(
        grads, optax.EmptyState(), norm=jnp.asarray(5.0)
    )
    theirs = optax.clip_by_global_norm(clip_norm)
    expected, expected_state = theirs.update(grads, theirs.init(grads))
    assert state == expected_state  # checkpoints hold it
    for ours, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(ours, other)


# --- weight decay -------------------------------------------------------------------------------


def models():
    settings = {
        "num_layers": 2,
        "d_model": 8,
        "num_heads": 2,
        "num_kv_heads": 1,
        "mlp_width": 16,
        "vocab_size": 16,
    }
    settings |= {"activation": "swiglu", "dtype": jnp.float64}
    return {
        "mlp": make_stack(2),
        "tied": transformer(**settings, tied=True),
        "untied": transformer(**settings, tied=False),
    }


@pytest.mark.parametrize("name", ["mlp", "tied", "untied"])
def test_weight_decay_moves_matrices_and_neither_norms_nor_biases(name):
    stack = models()[name]
    shapes = jax.eval_shape(lambda: init(stack, 0))
    params = jax.tree.map(lambda a: np.ones(a.shape), shapes)
    optimizer = optim.clipped(optim.adamw(optax.constant_schedule(0.5), **SETTINGS), CLIP_NORM)
    zero = jax.tree.map(np.zeros_like, params)
    update = jax.jit(partial(optimizer.update, norm=jnp.zeros(())))
    updates, _ = update(zero, jax.jit(optimizer.init)(params), params)
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        is_layer = path[0].key == "layers"
        is_matrix = update.ndim - is_layer == 2
        assert np.allclose(update, -0.5 * 0.1 if is_matrix else 0.0, rtol=1e-12, atol=0), path


def test_no_clipping_leaves_the_gradient_as_it_is():
    params, grads = {"kernel": jnp.zeros((2, 2))}, {"kernel": jnp.full((2, 2), 1e6)}
    settings = SETTINGS | {
        "b1": 0.0,
        "b2": 0.0,
        "eps": 1e6,
    }  # the update is g / (|g| + eps): 1/2 for g = 1e6

    def update(clip_norm):
        optimizer = optim.clipped(optim.adamw(optax.constant_schedule(1.0), **settings), clip_norm)
        norm = optim.global_norm(grads)
        return optimizer.update(grads, optimizer.init(params), params, norm=norm)[0]["kernel"]

    assert np.allclose(update(None), -0.5)
    assert np.allclose(update(1.0), -0.5 / 1e6, rtol=1e-3)


# --- learning rate ------------------------------------------------------------------------------


@pytest.mark.parametrize(("warmup_steps", "num_steps"), [(20, 200), (1, 10), (5, 6), (0, 50)])
def test_the_rate_rises_to_its_peak_after_warm_up_and_falls_to_its_fraction(
    warmup_steps, num_steps
):
    rate = optim.learning_rates(
        lr=0.4, min_lr_fraction=0.1, warmup_steps=warmup_steps, num_steps=num_steps
    )
    rates = [float(rate(k)) for k in range(num_steps + 1)]
    assert rates[0] == pytest.approx(0.4 / (warmup_steps + 1))  # not 0: the first update counts
    assert rates[: warmup_steps + 1] == pytest.approx(
        [0.4 * (k + 1) / (warmup_steps + 1) for k in range(warmup_steps + 1)]
    )
    assert max(rates) == rates[warmup_steps] == pytest.approx(0.4)
    middle = warmup_steps + (num_steps - warmup_steps) / 2
    assert float(rate(middle)) == pytest.approx(0.4 * (0.1 + 0.9 / 2))
    for k in range(warmup_steps, num_steps):
        turn = math.pi * (k - warmup_steps) / (num_steps - warmup_steps)
        assert rates[k] == pytest.approx(0.4 * (0.1 + 0.9 * (1 + math.cos(turn)) / 2), rel=1e-6)
    assert rates[num_steps] == pytest.approx(0.04)


def test_a_run_shorter_than_its_warm_up_still_reaches_the_peak():
    rate = optim.learning_rates(lr=0.4, min_lr_fraction=0.1, warmup_steps=20, num_steps=4)
    assert [float(rate(k)) for k in range(4)] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    one = optim.learning_rates(lr=0.4, min_lr_fraction=0.1, warmup_steps=20, num_steps=1)
    assert float(one(0)) == pytest.approx(0.4)


# --- stochastic gradient descent ----------------------------------------------------------------


def test_sgd_over_a_pipeline_is_its_formula_over_the_whole_model():
    stack, data, momentum = make_stack(4), batches(12), 0.9
    params = jax.jit(lambda: init(stack, 0))()

    # the oracle: v <- momentum*v + g, w <- w - lr*v
    gradient = jax.jit(
        reference(stack, num_microbatches=1, remat="none", unroll=16, dtype=jnp.float64)
    )
    expected, v = params, jax.tree.map(np.zeros_like, params)
    for k, batch in enumerate(data):
        g = jax.tree.map(np.asarray, gradient(expected, batch)[1])
        norm = np.sqrt(sum(np.sum(np.square(a)) for a in jax.tree.leaves(g)))
        assert norm > 2 * CLIP_NORM
        v = jax.tree.map(lambda v, g: momentum * v + CLIP_NORM / norm * g, v, g)  # noqa: B023
        expected = jax.tree.map(lambda w, v: w - float(LR_SCHEDULE(k)) * v, expected, v)  # noqa: B023

    case = Case("1f1b", (2, 2, 1), 6, num_layers=4, batch_size=12)
    layout = case.layout()
    optimizer = optim.clipped(optax.sgd(LR_SCHEDULE, momentum=momentum), CLIP_NORM)
    state = layout.to_staged(init_state(params, optimizer))
    state = jax.device_put(state, layout.shardings(layout.staged_specs(state)))
    step = staged_step(case, stack)
    found, _ = trained(step, optimizer, state, data)
    natural = layout.to_natural(jax.tree.map(np.asarray, found))
    for ours, theirs in zip(*map(jax.tree.leaves, (natural, expected)), strict=True):
        assert np.max(np.abs(ours - theirs)) <= 1e-10 * np.max(np.abs(theirs))


def test_sgd_without_momentum_and_clipping_moves_by_the_gradient():
    params, grads = {"kernel": jnp.ones((2, 2))}, {"kernel": jnp.full((2, 2), 1e6)}
    optimizer = optim.clipped(optax.sgd(optax.constant_schedule(1e-3), momentum=None), None)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    assert np.array_equal(updates["kernel"], np.full((2, 2), -1e3))


def test_sgd_keeps_no_more_than_its_momentum():
    params = {"kernel": jnp.zeros((64, 64))}

    def kept(momentum):
        state = optim.clipped(optax.sgd(LR_SCHEDULE, momentum=momentum), 1.0).init(params)
        return sum(a.size for a in jax.tree.leaves(state) if a.ndim)

    assert (kept(None), kept(0.9)) == (0, 64 * 64)


def test_a_rate_may_stay():
    rate = optim.learning_rates(lr=0.4, min_lr_fraction=1.0, warmup_steps=0, num_steps=5)
    assert [float(rate(k)) for k in range(5)] == [0.4] * 5
