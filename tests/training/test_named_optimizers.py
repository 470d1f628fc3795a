"""Optimizers by name: one step by their formulas, written in NumPy, and learning rates by theirs."""

from typing import get_args

import jax
import numpy as np
import pytest
from support.selection import full_except

from ppctl import config
from ppctl.config.groups.optim_settings import AnyOptim, Lion
from ppctl.errors import ConfigError
from ppctl.training.pipeline.optimizers import MAKERS, learning_rates, make_optimizer

RNG = np.random.default_rng(0)
LR = 0.5
HOW = {"lr": LR, "lr_schedule": "constant", "warmup_steps": 0}
SHAPES = {
    "embed_head": {"embedding": (7, 4), "norm": {"scale": (4,)}},
    "layers": {"up": {"kernel": (4, 6)}, "experts": {"down": (3, 6, 4)}, "norm": {"scale": (4,)}},
}


def drawn(seed):
    rng = np.random.default_rng(seed)
    is_shape = lambda a: isinstance(a, tuple)
    return jax.tree.map(rng.standard_normal, SHAPES, is_leaf=is_shape)


def first_update(request):
    """(parameters, gradients, updates) of an optimizer's first step."""
    optimizer, _ = make_optimizer(request, 5)
    params, grads = drawn(0), drawn(1)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    return params, grads, updates


def at(tree, path):
    for name in path.split("/"):
        tree = tree[name]
    return tree


def orthogonalized(g):
    """Five turns of Newton-Schulz, with Jordan's coefficients, on the smaller side."""
    is_tall = g.shape[0] > g.shape[1]
    x = (g.T if is_tall else g) / (np.linalg.norm(g) + 1e-8)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x.T if is_tall else x


@pytest.mark.parametrize("update_rms", [0.2, None])
@pytest.mark.parametrize("path", ["layers/up/kernel", "layers/experts/down"])
def test_muon_orthogonalizes_the_matrices_of_layers_each_experts_by_itself(path, update_rms):
    params, grads, updates = first_update(config.Muon(**HOW, update_rms=update_rms))
    w, g = np.atleast_3d(at(params, path)), at(grads, path)
    of_one = lambda g: orthogonalized(1.95 * g)  # Nesterov's momentum, in any size
    turned = np.stack([*map(of_one, g)]) if g.ndim == 3 else of_one(g)
    rows, columns = g.shape[-2:]
    size = np.sqrt(max(1, columns / rows) if update_rms is None else max(rows, columns))
    wanted = -LR * (size * (update_rms or 1) * turned + 0.1 * at(params, path))
    assert w.size == g.size
    assert np.allclose(at(updates, path), wanted, atol=1e-5)


@pytest.mark.parametrize("path", ["embed_head/embedding", "layers/norm/scale"])
def test_muon_leaves_embeddings_and_vectors_to_adamw(path):
    _, _, found = first_update(config.Muon(**HOW))
    _, _, wanted = first_update(config.AdamW(**HOW))
    assert np.array_equal(at(found, path), at(wanted, path))


@pytest.mark.parametrize("path", ["layers/up/kernel", "layers/norm/scale"])
def test_lion_steps_by_signs_and_decays_no_vector(path):
    params, grads, updates = first_update(Lion(**HOW, weight_decay=0.3))
    decay = 0.3 * at(params, path) * (at(params, path).ndim > 1)
    assert np.allclose(at(updates, path), -LR * (np.sign(at(grads, path)) + decay), atol=1e-6)


def test_lamb_steps_as_far_as_a_parameter_is_long():
    params, _, updates = first_update(config.Lamb(**HOW))
    lengths = [np.linalg.norm(at(tree, "layers/up/kernel")) for tree in (params, updates)]
    assert lengths[1] == pytest.approx(LR * lengths[0], rel=1e-5)


def test_every_class_of_optimizers_has_its_maker():
    assert [*MAKERS] == [*get_args(AnyOptim)]


# --- learning rates -----------------------------------------------------------------------------

BEFORE, STEPS = 4, 20  # warm-up, all


@pytest.mark.parametrize("shape", full_except(["linear", "constant", "wsd"]))
def test_rates_after_the_warm_up_follow_their_shape(shape):
    rate = learning_rates(0.4, 0.1, BEFORE, STEPS, shape, decay_fraction=0.25)
    rates = [float(rate(k)) for k in range(STEPS + 1)]
    assert rates[:BEFORE] == pytest.approx([0.4 * (k + 1) / (BEFORE + 1) for k in range(BEFORE)])
    share = {  # share of the way from the peak to the end
        "linear": lambda k: (k - BEFORE) / (STEPS - BEFORE),
        "constant": lambda k: 0.0,
        "wsd": lambda k: max(0.0, (k - 15) / 5),
    }[shape]
    wanted = [0.4 * (1 - 0.9 * share(k)) for k in range(BEFORE, STEPS + 1)]
    assert rates[BEFORE:] == pytest.approx(wanted)


@pytest.mark.parametrize("shape", ["linear", "constant", "wsd"])
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_runs_of_few_steps_reach_the_peak(shape, num_steps):
    rate = learning_rates(0.4, 0.1, 20, num_steps, shape)
    assert float(rate(num_steps - 1)) == pytest.approx(0.4)


# --- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            {"lr_schedule": "constant", "min_lr_fraction": 0.5},
            "optim.min_lr_fraction=0.5 has no effect",
        ),
        (
            {"decay_fraction": 0.5},
            "optim.decay_fraction=0.5 has no effect: optim.lr_schedule=cosine",
        ),
        ({"lr_schedule": "steps"}, "is not one of cosine, linear, constant, wsd"),
    ],
)
def test_settings_that_a_schedule_does_not_have_are_refused(request_, message):
    with pytest.raises(ConfigError, match=message):
        config.AdamW(**request_).check()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("optax.adma", "optim.target=optax.adma"),
        ("optax.global_norm", "optim.target=optax.global_norm"),  # no learning rate
        ("builtins.dict", "optim.target=builtins.dict"),
    ],
)
def test_functions_that_make_no_optimizer_are_refused(target, message):
    with pytest.raises(ConfigError, match=message):
        make_optimizer(config.CustomOptim(target=target), 5)
