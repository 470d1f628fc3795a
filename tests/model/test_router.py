"""The router: experts and weights of tokens by a formula written in NumPy, for each setting.

Shape suffixes as in the router: M tokens, E experts, K experts of a token.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from ppctl.config.groups.moe_settings import Experts
from ppctl.model.experts.router import route, tokens_of
from ppctl.model.parallel import WHOLE

M, D, E = 40, 6, 8
GROUPED = {"num_groups": 4, "top_groups": 2}
SETTINGS = [
    {},
    {"normalize": False, "top_k": 1},
    {"scale": 16.0, "normalize": False, **GROUPED},  # DeepSeek-V2
    {"score": "softmax_chosen", "normalize": False, "top_k": 3},  # gpt-oss
    {"score": "sigmoid", "choice_bias": True},  # GLM-4.5
    # DeepSeek-V3
    {"score": "sigmoid", "choice_bias": True, "scale": 2.5, "group_score": "top2", **GROUPED},
    {"score": "softmax", "choice_bias": True, "top_k": 8},
]


def sizes_of(**settings):
    return Experts(**{"num_experts": E} | settings)


def plain(x, kernel, bias, sizes):
    """(experts [M, K], weights [M, K]) of tokens."""
    softmax = lambda a: np.exp(a) / np.exp(a).sum(-1, keepdims=True)
    logits = x @ kernel
    scores = 1 / (1 + np.exp(-logits)) if sizes.score == "sigmoid" else softmax(logits)
    choice = scores + (bias if sizes.choice_bias else 0)
    for scores_E in choice if sizes.num_groups > 1 else ():
        groups = scores_E.reshape(sizes.num_groups, -1)  # a view
        most = np.sort(groups)[:, -2:].sum(1) if sizes.group_score == "top2" else groups.max(1)
        groups[np.argsort(-most, kind="stable")[sizes.top_groups :]] = -np.inf
    chosen = np.argsort(-choice, axis=-1, kind="stable")[:, : sizes.top_k]
    of = logits if sizes.score == "softmax_chosen" else scores
    weights = np.take_along_axis(of, chosen, -1)
    weights = softmax(weights) if sizes.score == "softmax_chosen" else weights
    if sizes.normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    return chosen, weights * sizes.scale


def numbers(seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(M, D)), rng.normal(size=(D, E)), 0.2 * rng.normal(size=E)


def routed(x, kernel, bias, sizes):
    params = {"kernel": jnp.asarray(kernel), "bias": jnp.asarray(bias)}
    tokens = tokens_of(M, 1, None, WHOLE)
    return route(params, jnp.asarray(x), sizes, tokens, WHOLE, is_counted=False)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_experts_and_weights_follow_the_formula(settings):
    sizes = sizes_of(**settings)
    found, (chosen, weights) = routed(*numbers(), sizes), plain(*numbers(), sizes)
    np.testing.assert_array_equal(found.chosen_MK, chosen)
    np.testing.assert_allclose(found.weights_MK, weights, rtol=1e-12)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_of_equal_scores_the_first_experts_are_chosen(settings):
    x, kernel, _ = numbers()
    kernel, sizes = np.round(kernel[:, :2]).repeat(E // 2, 1), sizes_of(**settings)
    found, (chosen, _) = (
        routed(np.round(x), kernel, np.zeros(E), sizes),
        plain(np.round(x), kernel, np.zeros(E), sizes),
    )
    np.testing.assert_array_equal(found.chosen_MK, chosen)
    assert all(len({*row}) == sizes.top_k for row in np.asarray(found.chosen_MK).tolist())


def test_a_choice_bias_changes_the_choice_but_no_weight():
    x, kernel, _ = numbers()
    sizes = sizes_of(choice_bias=True, normalize=False)
    bias = np.where(np.arange(E) == 5, 100.0, 0.0)
    found, (_, weights) = routed(x, kernel, bias, sizes), plain(x, kernel, bias, sizes)
    assert (np.asarray(found.chosen_MK)[:, 0] == 5).all()
    np.testing.assert_allclose(found.weights_MK, weights, rtol=1e-12)
    assert found.weights_MK.max() < 1


def test_routing_is_in_float32_where_activations_are_in_bfloat16():
    x, kernel, bias = (jnp.asarray(a, jnp.bfloat16) for a in numbers())
    sizes = sizes_of(score="sigmoid", choice_bias=True)
    found = routed(x, kernel, bias.astype(jnp.float32), sizes)
    exact = [np.asarray(a, np.float64) for a in (x, kernel, bias)]
    chosen, weights = plain(*exact, sizes)
    assert found.weights_MK.dtype == jnp.float32
    np.testing.assert_array_equal(found.chosen_MK, chosen)
    np.testing.assert_allclose(found.weights_MK, weights, rtol=1e-5)
