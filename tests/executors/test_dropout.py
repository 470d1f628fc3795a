"""Dropout is the same for every mesh, schedule, executor, remat and number of microbatches."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases
from support.cases import make_params
from support.equality import SMALL, make_batch, make_pipe
from support.selection import full

import ppctl
from ppctl.config.groups.transformer_sizes import Architecture
from ppctl.errors import ConfigError
from ppctl.model.layer_parts import BlockDropout
from ppctl.model.parallel import WHOLE
from ppctl.model.random_keys import example_keys, key_of_seed, layer_keys, wrapped

TOLERANCE = 1e-12
STEP = 3


@cache
def dropping(rate=0.3, model="transformer"):
    how = {"dtype": jnp.float64, "dropout": rate}
    if model == "mlp":
        return ppctl.mlp(num_layers=4, d_model=16, input_dim=5, target_dim=3, **how)
    if model == "adapters":  # kv heads fewer than tp=4
        how |= {"dropout": 0.0, "lora": ppctl.Lora(4, 8.0, dropout=rate)}
    sizes = SMALL if model == "transformer" else SMALL | {"num_layers": 2}
    return ppctl.transformer(**sizes, vocab_size=32, num_kv_heads=2, **how)


def batch_of(model):
    if model != "mlp":
        return make_batch(12, 32)
    rng = np.random.default_rng(0)
    return {"inputs": rng.standard_normal((8, 5)), "targets": rng.standard_normal((8, 3))}


def state_of(pipe, step=STEP):
    return cases.state_of(pipe, make_params(pipe.stack), step)


def losses_and_grads(mesh, model, **how):
    batch = batch_of(model)
    pipe = make_pipe(dropping(model=model), batch, mesh, **how)
    loss, grads = pipe.loss_and_grads(state_of(pipe), batch)
    return float(loss), jax.tree.map(np.asarray, grads)


@cache
def expected(model):
    return losses_and_grads({}, model, executor="reference", num_microbatches=1)


def error(found, wanted):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in pairs)


CASES = [
    ({"pp": 2}, "mlp", {"schedule": "1f1b", "num_microbatches": 4}),
    full(({"pp": 2, "dp": 2}, "mlp", {"schedule": "zb_h1", "executor": "mpmd", "remat": "layer"})),
    full(({"tp": 2, "cp": 2}, "short", {"schedule": "gpipe", "executor": "mpmd", "unroll": 0})),
    full(({"pp": 2, "tp": 2}, "adapters", {"schedule": "zb_h1"})),
]
ALL = [
    ({"pp": 2}, {"schedule": "1f1b", "num_microbatches": 4, "remat": "none"}),
    ({}, {"executor": "reference", "num_microbatches": 4, "remat": "layer"}),
    ({"pp": 2}, {"schedule": "gpipe", "remat": "full"}),
    ({"pp": 2}, {"schedule": "interleaved", "remat": "full", "num_chunks": 2}),
    ({"pp": 2}, {"schedule": "zb_v", "remat": "layer"}),
    ({"pp": 2}, {"schedule": "zb_h1", "remat": "none", "unroll": 0}),
    ({"pp": 2}, {"schedule": "zb_h1", "remat": "full", "executor": "mpmd", "unroll": 0}),
    ({"pp": 2, "fsdp": 2}, {"schedule": "1f1b", "gather": "layer"}),
    ({"pp": 2, "fsdp": 2}, {"schedule": "zb_h1", "executor": "mpmd", "gather": "layer"}),
    ({"pp": 2, "tp": 2}, {"schedule": "1f1b"}),
    ({"pp": 2, "tp": 2}, {"schedule": "1f1b", "sequence_parallel": False}),
    ({"pp": 2, "cp": 2}, {"schedule": "1f1b", "remat": "layer"}),
    ({"pp": 2, "tp": 2}, {"schedule": "zb_h1", "executor": "mpmd"}),
    ({"pp": 2}, {"schedule": "1f1b", "vocab": "parallel"}),
    ({"pp": 3}, {"schedule": "1f1b", "partition": [1, 2, 1]}),
]
ADAPTERS = [
    ({"tp": 4}, {"schedule": "gpipe"}),
    ({"tp": 2, "cp": 2}, {"schedule": "gpipe", "executor": "mpmd", "remat": "none"}),
    ({"pp": 2, "tp": 2}, {"schedule": "1f1b", "sequence_parallel": False, "remat": "none"}),
    ({"pp": 2, "fsdp": 2}, {"schedule": "zb_h1", "executor": "mpmd", "gather": "layer"}),
]


@pytest.mark.parametrize(("mesh", "model", "how"), CASES)
def test_equals_the_model_without_a_pipeline(mesh, model, how):
    assert error(losses_and_grads(mesh, model, **how), expected(model)) <= TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "mesh", "how"),
    [("transformer", *case) for case in ALL] + [("adapters", *case) for case in ADAPTERS],
)
def test_equals_the_model_without_a_pipeline_everywhere(model, mesh, how):
    assert error(losses_and_grads(mesh, model, **how), expected(model)) <= TOLERANCE


@pytest.mark.full
def test_dropout_of_adapters_drops_only_their_inputs():
    batch, rate = batch_of("adapters"), 0.25
    plain, dropping_ = (
        make_pipe(dropping(r, "adapters"), batch, {}, unroll=0) for r in (0.0, rate)
    )
    # 1. while all B are zero the loss is the model's without adapters, and a step draws the gradient
    zeroed = jax.tree_util.tree_map_with_path(
        lambda path, w: w * (path[-1].key != "lora_b"), make_params(plain.stack)
    )
    found = [
        dropping_.loss_and_grads(cases.state_of(dropping_, zeroed, step), batch)
        for step in (STEP, STEP + 1)
    ]
    wanted = float(plain.loss(cases.state_of(plain, zeroed), batch))
    assert [float(loss) for loss, _ in found] == pytest.approx([wanted] * 2, rel=1e-13)
    of_query = [grads["layers"]["attention"]["query"]["lora_b"] for _, grads in found]
    assert error(of_query[1], of_query[0]) > 0.1
    # 2. each linear map draws separately, at the rate
    lora, keys = ppctl.Lora(dropout=rate), np.arange(16, dtype=np.uint32).reshape(8, 2)
    drop, x = BlockDropout(0.0, lora, WHOLE, wrapped(keys), 50), jnp.ones((400, 20))
    maps = {each.target: each for each in Architecture().linear_maps}
    inputs = [np.asarray(drop.adapter_input(x, maps[name])) for name in ("q", "k", "down")]
    for each in inputs:
        assert set(np.unique(each)) == {0, 1 / (1 - rate)}
        assert np.mean(each == 0) == pytest.approx(rate, abs=0.02)
    assert len({each.tobytes() for each in inputs}) == 3
    assert replace(drop, key=None).adapter_input(x, maps["q"]) is x
    with pytest.raises(ConfigError, match=r"dropout=1.0 of adapters is invalid. Use 0 <= rate < 1"):
        ppctl.Lora(dropout=1.0)


def test_dropout_depends_on_seed_and_step_and_is_off_in_evaluations():
    batch, how = batch_of("mlp"), {"mesh": {"pp": 2}, "schedule": "1f1b"}
    pipe = make_pipe(dropping(model="mlp"), batch, **how)
    other = make_pipe(dropping(model="mlp"), batch, **how, seed=1)
    plain = make_pipe(dropping(0.0, "mlp"), batch, **how)
    losses = [
        pipe.step(state_of(pipe, STEP), batch)[1]["loss"],
        pipe.step(state_of(pipe, STEP + 1), batch)[1]["loss"],
        other.step(state_of(other, STEP), batch)[1]["loss"],
        plain.step(state_of(plain, STEP), batch)[1]["loss"],
    ]
    assert len({float(loss) for loss in losses}) == 4
    assert float(losses[0]) == pytest.approx(expected("mlp")[0], rel=TOLERANCE)
    evaluated = [float(each.loss(state_of(each), batch)) for each in (pipe, plain)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-13)
    assert evaluated[1] == pytest.approx(float(losses[3]), rel=1e-12)


@pytest.mark.full
def test_a_step_that_is_taken_again_from_a_state_is_the_same():
    batch, found, stack = batch_of("mlp"), [], dropping(model="mlp")
    first = make_pipe(stack, batch, {"pp": 2}, schedule="1f1b", num_microbatches=4)
    again = make_pipe(stack, batch, {"dp": 2, "pp": 2}, schedule="zb_h1", executor="mpmd")
    state, _ = first.step(state_of(first), batch)
    natural = jax.device_get(first.to_natural(state))
    for pipe in (first, again):
        state = pipe.from_natural(jax.tree.map(jnp.asarray, natural))
        found.append(float(pipe.step(state, batch)[1]["loss"]))
    assert found[0] == pytest.approx(found[1], rel=TOLERANCE)


# --- keys and draws -----------------------------------------------------------------------------


def noting_stack(num_layers=2):
    """A layer adds noise of its key; the loss of an example is the sum of its noise, to a power."""

    def layer(w, x, key):
        noise = jax.vmap(lambda k: jax.random.normal(k, x.shape[1:]))(key) if key is not None else 0
        return 2 * x + w["one"] * noise

    def head(embed_head, x, targets):
        return jnp.vdot(x[:, 0], targets), jnp.float64(1)

    return ppctl.Stack(
        num_layers,
        lambda key: {"zero": jnp.zeros(1)},
        lambda key, l: {"one": jnp.ones(1)},
        lambda embed_head, inputs: inputs + embed_head["zero"],
        layer,
        head,
        ppctl.StackOptions(mixes_examples=False),
    )


def drawing_outside(stack):
    """The stack with noise in embedding and head too."""
    noise = lambda key, like: (
        0.0 if key is None else jax.vmap(lambda k: jax.random.normal(k, like.shape[1:]))(key)
    )
    embed = lambda e, inputs, key: stack.embed(e, inputs) + noise(key, inputs)

    def head(e, x, targets, key):
        total, _ = stack.head(e, x + (1 + e["zero"]) * noise(key, x), targets)
        return total, jnp.float64(len(x))

    return replace(stack, embed=embed, head=head)


OUTSIDE = [
    full({"mesh": {"pp": 2, "dp": 2}, "schedule": "1f1b"}),
    {"mesh": {"pp": 2}, "schedule": "zb_h1", "executor": "mpmd", "remat": "full"},
    full({"mesh": {"pp": 2, "fsdp": 2}, "schedule": "interleaved", "num_chunks": 2}),
    full({"mesh": {"pp": 2}, "schedule": "zb_v", "executor": "mpmd", "num_microbatches": 4}),
]


@pytest.mark.parametrize("how", OUTSIDE)
def test_embedding_and_head_draw_the_same_on_every_layout(how):
    stack, rng = drawing_outside(noting_stack(4)), np.random.default_rng(0)
    batch = {"inputs": rng.standard_normal((8, 1)), "targets": rng.standard_normal(8)}
    found = []
    for each in ({"mesh": {}, "executor": "reference"}, how):
        pipe = make_pipe(stack, batch, **each)
        state = pipe.init()
        loss, grads = pipe.loss_and_grads(state, batch)
        found.append((float(loss), jax.device_get(grads), float(pipe.loss(state, batch))))
    assert error(*found) <= TOLERANCE
    # an evaluation draws nothing
    (trained, _, evaluated), plain = found[0], make_pipe(noting_stack(4), batch, {})
    wanted = float(plain.loss(plain.init(), batch)) * 2 / 8  # a loss a microbatch, not an example
    assert evaluated == pytest.approx(wanted, rel=1e-12)
    assert abs(trained - evaluated) > 1e-3


def test_layers_and_examples_have_separate_keys():
    batch = {"inputs": np.zeros((4, 1)), "targets": np.eye(4)[0] * 0 + 1.0}
    noise = {}
    for example in range(4):
        batch["targets"] = np.eye(4)[example]
        pipe = make_pipe(noting_stack(), batch, {}, executor="reference")
        _, grads = pipe.loss_and_grads(pipe.init(), batch)
        noise[example] = np.asarray(grads["layers"]["one"]).ravel().tolist()
    # d loss / d one of layer 0 is twice its noise, of layer 1 its noise
    draws = [value for first, second in noise.values() for value in (first / 2, second)]
    assert len({round(value, 9) for value in draws}) == 8


def test_dropout_drops_the_rate_and_keeps_the_mean():
    keys, x = jax.random.split(jax.random.key(0), 8), jnp.ones((8, 50, 100))
    once, again, other = (np.asarray(ppctl.dropout(keys, x, 0.25, draw=d)) for d in (0, 0, 1))
    np.testing.assert_array_equal(once, again)
    assert np.mean(once != other) > 0.3
    assert set(np.unique(once)) == {0.0, np.float64(1 / 0.75)}
    assert np.mean(once == 0) == pytest.approx(0.25, abs=0.01)
    rows = once.reshape(-1, 100)
    assert len({row.tobytes() for row in rows}) == len(rows)  # every token draws
    assert ppctl.dropout(None, x, 0.25) is x


def test_dropout_of_a_token_does_not_depend_on_the_attached_part_of_its_sequence():
    keys = jax.random.split(jax.random.key(1), 3)
    whole = jax.random.key_data(ppctl.parallel.token_keys(keys, 6))
    assert whole.shape == (3, 6, 2)
    longer = jax.random.key_data(ppctl.parallel.token_keys(keys, 9))
    np.testing.assert_array_equal(longer[:, :6], whole)


@pytest.mark.parametrize("rate", [1.0, -0.1])
def test_an_impossible_dropout_rate_is_refused(rate):
    with pytest.raises(ppctl.PpctlError, match=r"0 <= rate < 1|must lie in \[0, 1\)"):
        ppctl.dropout(None, jnp.ones(2), rate)
    with pytest.raises(ppctl.PpctlError, match=r"model.dropout=.* must lie in \[0, 1\)"):
        ppctl.mlp(input_dim=2, target_dim=2, dropout=rate)


# --- networks -----------------------------------------------------------------------------------


def drawing_network():
    """Return a stack of three layers: the first two drop, and the last two add the same noise."""

    def init(key):
        return [0.3 * jax.random.normal(k, (6, 6)) for k in jax.random.split(key, 3)]

    def apply(params, x, key=None):
        noise = 0.0
        if key is not None:
            noise = jax.vmap(lambda k: jax.random.normal(k, x.shape[1:], x.dtype))(key)
        for l, w in enumerate(params):
            x = x + jnp.tanh(x @ w) + (noise if l else 0.0)
            if l < 2:
                x = ppctl.stage_boundary(ppctl.dropout(key, x, 0.4, draw=l))
        return x

    loss = lambda y, targets: (jnp.square(y - targets).sum(), jnp.float64(y.size))
    return ppctl.Network(init, apply, loss)


NETWORKS = [
    {"mesh": {"pp": 3, "dp": 2}, "schedule": "zb_h1", "executor": "mpmd"},
    {"mesh": {"pp": 3}, "schedule": "1f1b", "num_microbatches": 4, "remat": "layer"},
]


@pytest.mark.parametrize("how", [*map(full, NETWORKS)])
def test_a_network_draws_as_the_function_of_its_key(how):
    network, rng = drawing_network(), np.random.default_rng(0)
    batch = {name: rng.standard_normal((8, 6)) for name in ("inputs", "targets")}
    pipe = make_pipe(network, batch, **how)
    state = pipe.init(seed=2)
    params = jax.device_get(
        pipe.stack.options.network.parameters.from_parts(pipe.to_natural(state)["params"])
    )
    keys = example_keys(jnp.asarray(key_of_seed(0)), jnp.int32(0), jnp.arange(8))
    key = wrapped(layer_keys(keys, jnp.int32(0)))  # the same in all layers

    def mean_loss(params, key):
        total, number = network.loss(
            network.apply(params, batch["inputs"], key=key), batch["targets"]
        )
        return total / number

    wanted = jax.jit(jax.value_and_grad(mean_loss))(params, key)
    loss, grads = pipe.loss_and_grads(state, batch)
    found, wanted = jax.device_get(
        ((loss, pipe.stack.options.network.parameters.from_parts(grads)), wanted)
    )
    assert error(found, wanted) <= TOLERANCE
    assert float(pipe.loss(state, batch)) == pytest.approx(
        float(mean_loss(params, None)), rel=1e-12
    )


def test_a_network_that_cannot_have_keys_is_refused():
    network, batch = drawing_network(), {name: np.zeros((8, 6)) for name in ("inputs", "targets")}
    with pytest.raises(ppctl.PpctlError, match="cuts a network by its operations, and apply has"):
        make_pipe(network, batch, {"pp": 2}, layers=2)

    def other(params, x, key=None):
        return network.apply(params if key is None else params[::-1], x, key)

    with pytest.raises(
        ppctl.PpctlError,
        match=r"^Parameter \S+ is used by another layer with a key than with key=None",
    ):
        make_pipe(replace(network, apply=other), batch, {"pp": 3})
