"""Mixtures of experts: losses, gradients, counts and train steps equal those of experts that compute
all tokens, whatever executor, schedule, mesh and dispatch, in float64.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.cases import make_params, state_of
from support.mixtures import (
    MIXTURES,
    OPTIMIZER,
    RATE,
    SIZES,
    TOLERANCE,
    check,
    error,
    make_batch,
    set_bias,
)
from support.selection import full, full_except
from support.spmd_cases import covering_array

import ppctl

# every executor, schedule, axis, remat, dispatch and mixture, and each other setting
CASES = {
    "spmd 1f1b ep2 tp2": (
        {"pp": 2, "ep": 2, "tp": 2},
        {"schedule": "1f1b", "remat": "full", "dispatch": "alltoall", "mixture": "sigmoid"}
        | {"vocab": "parallel", "packed": True, "unroll": 0},
    ),
    "spmd dualpipe_v ep2 fsdp2": (
        {"pp": 2, "ep": 2, "fsdp": 2},
        {"schedule": "dualpipe_v", "remat": "none", "mixture": "sigmoid", "gather": "layer"}
        | {"packed": True},
    ),
    "spmd interleaved ep4": (
        {"pp": 2, "ep": 4},
        {"schedule": "interleaved", "num_chunks": 2, "remat": "layer", "mixture": "chosen"}
        | {"dispatch": "alltoall"},
    ),
    "mpmd zb_h1 ep4": (
        {"pp": 2, "ep": 4},
        {"executor": "mpmd", "schedule": "zb_h1", "remat": "none", "mixture": "dense between"},
    ),
    "mpmd zb_v ep2 tp2": (
        {"pp": 2, "ep": 2, "tp": 2},
        {"executor": "mpmd", "schedule": "zb_v", "remat": "layer", "mixture": "dense between"}
        | {"dispatch": "alltoall", "packed": True, "post_validation": True},
    ),
    "mpmd gpipe tp2 cp2": (
        {"pp": 2, "tp": 2, "cp": 2},
        {"executor": "mpmd", "schedule": "gpipe", "remat": "full"},
    ),
}
FACTORS = {
    "executor": ["spmd", "mpmd"],
    "schedule": ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v"],
    "mesh": [  # pp, fsdp, ep, tp, cp
        *((2, 1, 1, 1, 1), (2, 2, 1, 2, 1), (2, 1, 2, 2, 1), (2, 2, 2, 1, 1), (2, 1, 4, 1, 1)),
        *((1, 1, 4, 2, 1), (1, 2, 4, 1, 1), (2, 1, 2, 1, 2), (1, 1, 2, 2, 2), (4, 1, 2, 1, 1)),
    ],
    "remat": ["none", "layer", "full"],
    "dispatch": ["gather", "alltoall"],
    "mixture": [*MIXTURES],
    "other": [
        None,
        ("gather", "layer"),
        ("vocab", "parallel"),
        ("packed", True),
        ("post_validation", True),
    ],
}
AXES = ("pp", "fsdp", "ep", "tp", "cp")
OF_TWO_CHUNKS = ("interleaved", "zb_v", "dualpipe_v")


def possible(values):
    """Whether a (partial) choice of factor values can be run."""
    (name, _), mesh = values.get("other") or (None, None), values.get("mesh", (2, 2, 1, 1, 1))
    sizes = dict(zip(AXES, mesh, strict=True))
    if sizes["pp"] == 1 and (name == "vocab" or values.get("schedule") == "dualpipe_v"):
        return False
    if sizes["pp"] == 4 and values.get("schedule") in OF_TWO_CHUNKS:  # the models have four layers
        return False
    if name == "gather" and sizes["fsdp"] == 1:
        return False
    if name == "packed" and sizes["cp"] > 1:
        return False
    return not (name == "post_validation" and values.get("executor") == "spmd")


def pairwise():
    """Yield cases that cover every possible pair of values."""
    wanted = {
        ((a, v), (b, w))
        for a, b in itertools.combinations(sorted(FACTORS), 2)
        for v, w in itertools.product(FACTORS[a], FACTORS[b])
        if possible({a: v, b: w})
    }
    for values in covering_array(FACTORS, wanted, possible):
        mesh = dict(zip(AXES, values.pop("mesh"), strict=True))
        other = values.pop("other")
        how = values | (dict([other]) if other else {})
        how |= {"num_chunks": 2} if how["schedule"] == "interleaved" else {}
        how |= {"num_microbatches": 8} if mesh["pp"] == 4 else {}
        words = [f"{axis}{size}" for axis, size in mesh.items() if size > 1]
        words += [str(value) for value in values.values()] + [other[0] if other else ""]
        yield pytest.param(mesh, how, id=" ".join(words))


@pytest.mark.parametrize(("mesh", "how"), full_except(CASES, "spmd 1f1b ep2 tp2"))
def test_a_mixture_trains_like_one_with_all_experts_computing_all_tokens(mesh, how):
    check(mesh, steps_only=True, **how)


@pytest.mark.parametrize(
    ("mesh", "num_microbatches"),
    [
        full(({"dp": 4, "pp": 2}, 8)),  # an example each
        full(({"pp": 1, "ep": 2}, 1)),
        full(({"dp": 2, "pp": 2, "tp": 2}, 2)),
        full(({"pp": 2, "cp": 2}, 16)),
    ],
)
def test_losses_of_a_mixture_do_not_depend_on_microbatches_and_replicas(mesh, num_microbatches):
    check(mesh, num_microbatches=num_microbatches, schedule="1f1b")


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "how"), [*pairwise()])
def test_a_mixture_equals_the_reference_for_every_pair_of_settings(mesh, how):
    check(mesh, **how)


def test_every_setting_occurs_in_the_cases():
    values = [dict(mesh) | {"executor": "spmd"} | how for mesh, how in CASES.values()]
    for name in ("executor", "schedule", "remat", "dispatch", "mixture"):
        assert {case.get(name, FACTORS[name][0]) for case in values} == {*FACTORS[name]}, name
    for name in ("gather", "vocab", "packed", "post_validation", "cp", "tp", "fsdp"):
        assert any(name in case for case in values), name


def pipe_of(stack, mesh, schedule, **how):
    batch = make_batch()
    how |= {"num_microbatches": 4, "optimizer": OPTIMIZER, "dtype": jnp.float64}
    return ppctl.pipeline(stack, ppctl.mesh(**mesh), schedule, batch=batch, **how)


@pytest.mark.full
def test_a_mixture_of_one_expert_equals_the_dense_model():
    stack, batch = ppctl.transformer(**SIZES), make_batch()
    dense = pipe_of(stack, {}, "gpipe", executor="reference")
    moe = {"num_experts": 1, "top_k": 1}
    one = pipe_of(ppctl.transformer(**SIZES, moe=moe), {"pp": 2}, "1f1b")
    params = jax.tree.map(jnp.asarray, make_params(stack))
    layers = dict(params["layers"])
    mlp = layers.pop("mlp")
    layers["experts"] = {name: w["kernel"][:, None] for name, w in mlp.items()}
    kernel = jnp.zeros((SIZES["num_layers"], SIZES["d_model"], 1))
    layers["router"] = {"kernel": kernel, "bias": kernel[:, 0]}
    loss, grads = one.loss_and_grads(state_of(one, params | {"layers": layers}), batch)
    wanted_loss, wanted = dense.loss_and_grads(state_of(dense, params), batch)
    found = dict(grads["layers"])
    experts, router = found.pop("experts"), found.pop("router")
    found["mlp"] = {name: {"kernel": w[:, 0]} for name, w in experts.items()}
    assert error((loss, found), (wanted_loss, wanted["layers"])) <= TOLERANCE
    assert error(grads["embed_head"], wanted["embed_head"]) <= TOLERANCE
    np.testing.assert_array_equal(router["kernel"], 0)  # one weight of 1
    np.testing.assert_array_equal(router["bias"], batch["targets"].size)


@pytest.mark.full
@pytest.mark.parametrize(
    ("executor", "dispatch"),
    [("spmd", "gather"), full(("mpmd", "gather")), full(("spmd", "alltoall"))],
)
def test_rows_beyond_the_capacity_are_counted_in_a_step(executor, dispatch):
    moe = {"num_experts": 8, "top_k": 2, "choice_bias": True, "capacity": 1.5, "dispatch": dispatch}
    num_layers = 2
    stack = ppctl.transformer(**SIZES | {"num_layers": num_layers}, moe=moe)
    params = jax.tree.map(jnp.asarray, make_params(stack))
    favored = jnp.where(jnp.arange(8) < 2, 100.0, params["layers"]["router"]["bias"])
    pipe = pipe_of(stack, {"pp": 2, "ep": 2}, "1f1b", executor=executor)
    _, metrics = pipe.step(state_of(pipe, set_bias(params, favored)), make_batch())
    # every token chooses experts 0 and 1, both of the first of two devices: twice its even share
    num_tokens = make_batch()["inputs"].size
    by_expert = np.where(np.arange(8) < 2, num_tokens, 0)
    np.testing.assert_array_equal(metrics["counts"]["router/bias"], [by_expert] * num_layers)
    dropped = [[2 * num_tokens * (1 - 1.5 / 2)]] * num_layers
    np.testing.assert_array_equal(metrics["counts"]["router/dropped"], dropped)


@pytest.mark.full
@pytest.mark.parametrize("executor", ["spmd", "mpmd"])
def test_adapters_of_a_mixture_have_the_references_gradients(executor):
    moe, lora = MIXTURES["softmax"] | {"first_dense": 1}, ppctl.Lora(2, 4.0)
    stack = ppctl.transformer(**SIZES, moe=moe, lora=lora)
    params = jax.tree.map(jnp.asarray, make_params(stack))
    pipes = (
        pipe_of(stack, {"pp": 2, "ep": 2}, "zb_h1", executor=executor),
        pipe_of(stack, {}, "gpipe", executor="reference"),
    )
    found, wanted = (each.loss_and_grads(state_of(each, params), make_batch()) for each in pipes)
    assert error(found, wanted) <= TOLERANCE
    adapters = found[1]["layers"]["attention"]["query"]
    assert np.abs(adapters["lora_a"]).max() > 0


NUM_STEPS = 30


def skewed_counts(mesh, schedule, bias_update, **how):
    """[steps, layers, experts] of weights that do not change, whose tokens like the first experts."""
    moe = {"num_experts": 8, "top_k": 2, "score": "sigmoid", "choice_bias": True}
    stack = ppctl.transformer(**SIZES | {"num_layers": 2}, moe=moe | {"bias_update": bias_update})
    batch, how = make_batch(), {"num_microbatches": 4, "dtype": jnp.float64} | how
    mesh, still = ppctl.mesh(**mesh), optax.sgd(0.0)
    pipe = ppctl.pipeline(stack, mesh, schedule, batch=batch, optimizer=still, **how)
    params = jax.tree.map(jnp.asarray, make_params(stack))
    table = params["embed_head"]["embedding"]
    params["embed_head"]["embedding"] = table.at[:, 0].set(jnp.abs(table).max())
    router = params["layers"]["router"]
    kernel = router["kernel"].at[:, 0].add(jnp.linspace(0.5, 0, 8))
    params = set_bias(params, jnp.zeros_like(router["bias"]))
    params["layers"]["router"]["kernel"] = kernel
    state, counts = state_of(pipe, params), []
    for _ in range(NUM_STEPS):
        state, metrics = pipe.step(state, batch)
        counts.append(np.asarray(metrics["counts"]["router/bias"]))
    return np.array(counts)


@pytest.mark.parametrize(
    ("executor", "mesh", "schedule"),
    [
        full(("spmd", {"pp": 2, "ep": 2}, "1f1b")),
        full(("mpmd", {"dp": 2, "pp": 2}, "zb_h1")),
        full(("mpmd", {"pp": 2, "tp": 2, "fsdp": 2}, "1f1b")),
    ],
)
def test_the_choice_bias_evens_the_load_equally_in_every_layout(executor, mesh, schedule):
    whole = {"mesh": {}, "schedule": "gpipe", "executor": "reference"}
    counts = skewed_counts(bias_update=RATE, **whole)
    load = counts.max(-1) / counts.mean(-1)
    assert load[0].min() >= 2.5
    assert load[-1].max() <= 1.5
    np.testing.assert_array_equal(skewed_counts(bias_update=0.0, **whole)[-1], counts[0])
    found = skewed_counts(mesh, schedule, RATE, executor=executor)
    np.testing.assert_array_equal(found, counts)


@pytest.mark.full
@pytest.mark.parametrize("executor", ["spmd", "mpmd"])
def test_tokens_beyond_the_rows_of_a_device_are_dropped(executor):
    moe = {"num_experts": 8, "top_k": 2, "capacity": 1.0}
    stack, batch = ppctl.transformer(**SIZES, moe=moe), make_batch()
    mesh, how = ppctl.mesh(pp=2, ep=2), {"executor": executor, "num_microbatches": 1}
    how |= {"optimizer": OPTIMIZER, "dtype": jnp.float64}
    pipe = ppctl.pipeline(stack, mesh, "gpipe", batch=batch, **how)
    counts = pipe.step(pipe.init(seed=0), batch)[1]["counts"]
    of_devices = np.asarray(counts["router/bias"]).reshape(SIZES["num_layers"], 2, -1).sum(-1)
    most = batch["targets"].size * moe["top_k"] / 2  # rows of a device, its even share
    dropped = np.maximum(of_devices - most, 0).sum(-1)
    np.testing.assert_array_equal(np.asarray(counts["router/dropped"])[:, 0], dropped)
    assert dropped.sum() > 0
