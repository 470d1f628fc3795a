"""Statistics of a mixture are means and sums over real tokens: masked targets count, and padding does
not. Closed forms; `test_experts_equal_reference` compares with a plain model.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.cases import make_params, state_of
from support.selection import full

import ppctl
from ppctl.data.token_examples import PADDING

SIZES = {"num_layers": 1, "d_model": 8, "num_heads": 2, "mlp_width": 6, "vocab_size": 16}
LOSSES = {"balance_loss": 0.1, "z_loss": 0.01}
MOE = {"num_experts": 8, "top_k": 2, "choice_bias": True, "bias_update": 0.1, **LOSSES}
TOKENS = np.random.default_rng(0).integers(16, size=(2, 8, 12), dtype=np.int32)


@cache
def pipe_of(shape, ep, packed, **moe):
    stack = ppctl.transformer(**SIZES, dtype=jnp.float64, packed=packed, moe=MOE | moe)
    how = {"num_microbatches": 1, "dtype": "float64", "optimizer": optax.sgd(0.1)}
    how |= {"executor": "spmd" if ep > 1 else "reference"}
    batch = dict.fromkeys(("inputs", "targets"), jax.ShapeDtypeStruct(shape, np.int32))
    return ppctl.pipeline(stack, ppctl.mesh(ep=ep), "gpipe", batch=batch, **how)


def step(batch, ep=1, packed=False, even=False, **moe):
    """(metrics, parameters after a step) from equal parameters; even: routers are zero."""
    pipe = pipe_of(batch["inputs"].shape, ep, packed, **moe)
    params = make_params(pipe.stack)
    router = params["layers"]["router"]
    router["bias"] = np.zeros_like(router["bias"])
    if even:
        router["kernel"] = np.zeros_like(router["kernel"])
    state, metrics = pipe.step(state_of(pipe, params), batch)
    return jax.device_get((metrics, pipe.to_natural(state)["params"]))


def difference(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(np.abs(a - b).max() for a, b in pairs)


def statistics(metrics):
    return {name: metrics[name] for name in (*LOSSES, "counts")}


@pytest.mark.full
def test_losses_of_experts_do_not_depend_on_the_number_of_targets():
    inputs, targets = TOKENS[:, :4, :8]  # 32 tokens
    whole, _ = step({"inputs": inputs, "targets": targets})
    last = np.where(np.arange(32).reshape(4, 8) >= 24, targets, -1)
    masked, _ = step({"inputs": inputs, "targets": last})
    assert difference(statistics(masked), statistics(whole)) < 1e-12
    assert abs(masked["loss"] - whole["loss"]) > 1e-3


FORMS = {"alone": (8, 12, 1), "padded": (8, 48, 1), "full": (2, 48, 4), "between": (4, 48, 2)}


def batch_in(form):
    """The same eight documents of 12 tokens in sequences: (sequences, length, documents of each)."""
    number, length, each = FORMS[form]
    inputs = TOKENS[0].copy()
    inputs[:, 0] = ~inputs[:, 0]
    shape, widths = (number, each * 12), [(0, 0), (0, length - each * 12)]
    inputs, targets = (np.pad(a.reshape(shape), widths) for a in (inputs, TOKENS[1]))
    inputs[:, each * 12 : each * 12 + 1], targets[:, each * 12 :] = PADDING, -1
    return {"inputs": inputs, "targets": targets}


@cache
def steps_of(form, dispatch):
    how = {"capacity": 1.0, "dispatch": dispatch}
    return step(batch_in(form), ep=2, packed=True, **how)


@pytest.mark.full
@pytest.mark.parametrize("dispatch", ["gather", full("alltoall")])
@pytest.mark.parametrize("form", [full("padded"), full("full"), "between"])
def test_packing_and_padding_change_no_statistic_and_drop_the_same_rows(form, dispatch):
    (metrics, params), (wanted, wanted_params) = (steps_of(f, dispatch) for f in (form, "alone"))
    np.testing.assert_array_equal(metrics["counts"]["router/bias"].sum(-1), [96 * 2])
    assert wanted["counts"]["router/dropped"].min() > 0
    assert difference(metrics, wanted) < 1e-12
    assert difference(params, wanted_params) < 1e-12


def test_even_shares_have_the_losses_of_the_formulas_with_masks_and_padding():
    batch = batch_in("padded")
    batch["targets"][1, 2:] = -1
    metrics, _ = step(batch, packed=True, even=True)
    assert abs(metrics["balance_loss"] - LOSSES["balance_loss"]) < 1e-12
    assert abs(metrics["z_loss"] - LOSSES["z_loss"] * np.log(8) ** 2) < 1e-12


def test_a_batch_of_only_padding_changes_no_parameter():
    inputs, targets = np.full((8, 48), PADDING, np.int32), np.full((8, 48), -1, np.int32)
    metrics, params = step({"inputs": inputs, "targets": targets}, packed=True)
    assert metrics["grad_norm"] == metrics["balance_loss"] == metrics["z_loss"] == 0
    bias = params["layers"]["router"]["bias"]
    np.testing.assert_array_equal(bias, np.zeros_like(bias))
