"""Flax modules train in a pipeline as plain Flax and Optax train them, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from support.flax_models import (
    TOLERANCE,
    VOCAB,
    WIDTH,
    Gpt,
    adamw,
    assert_close,
    batch_of,
    clipped,
    loss,
    make,
    make_linen,
    trained,
    variables,
)
from support.selection import full

import ppctl
from ppctl.errors import ConfigError


def pipe_of(model, mesh=None, schedule="1f1b", **how):
    how = {"num_microbatches": 4, "dtype": "float64", "clip_norm": 1.0} | how
    mesh = ppctl.mesh(**({"pp": 2} if mesh is None else mesh))
    return ppctl.pipeline(model, mesh, schedule, adamw(), batch=batch_of(), **how)


def steps(pipe, number=3):
    state, losses = pipe.init(), []
    for _ in range(number):
        state, metrics = pipe.step(state, batch_of())
        losses.append(float(metrics["loss"]))
    return losses, state


LAYOUTS = [
    ("stack", {"schedule": "1f1b"}),
    ("network", {"schedule": "zb_v"}),
    ("stack", {"schedule": "zb_h1", "executor": "mpmd", "partition": [3, 1]}),
    full(("stack", {"schedule": "interleaved", "num_chunks": 2, "mesh": {"pp": 2, "fsdp": 2}})),
    full(("stack", {"schedule": "zb_v", "executor": "mpmd", "mesh": {"pp": 2, "dp": 2}})),
    full(("network", {"schedule": "1f1b", "executor": "mpmd"})),
    full(("network", {"schedule": "interleaved", "num_chunks": 2, "remat": "full"})),
]


@pytest.mark.parametrize(("form", "how"), LAYOUTS)
def test_a_module_trains_as_by_plain_flax_and_optax(form, how):
    model, of_ppctl = make(form)
    pipe = pipe_of(of_ppctl, **how)
    losses, state = steps(pipe)
    wanted, expected = trained(model)
    np.testing.assert_allclose(losses, wanted, rtol=TOLERANCE)
    found = pipe.flax_model(state)
    assert type(found) is Gpt
    assert_close(variables(found), variables(expected))
    np.testing.assert_allclose(
        pipe.predict(state, batch_of()["inputs"]), found(batch_of()["inputs"]), atol=TOLERANCE
    )


def test_parameters_have_the_modules_paths():
    stack = make()[1]
    names = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree.leaves_with_path(stack.param_shapes)
    }
    assert {"embed_head/token/embedding", "layers/attention/kernel"} <= names
    params = jax.eval_shape(make("network")[1].init, jax.random.key(0))
    assert {*params["blocks"]} == {"0", "1", "2", "3"}


def losses_with(form, rate=0.3, mesh=None, **how):
    pipe = pipe_of(make(form, rate=rate)[1], mesh, **how)
    return steps(pipe)[0], float(pipe.evaluate(pipe.init(), batch_of())["loss"])


@pytest.mark.parametrize(
    "how",
    [
        {"schedule": "zb_h1", "executor": "mpmd", "num_microbatches": 2},
        full({"schedule": "zb_v", "remat": "full"}),
        full({"mesh": {"pp": 2, "dp": 2}, "num_microbatches": 2}),
        full({"mesh": {"pp": 1}, "executor": "reference", "num_microbatches": 1}),
    ],
)
def test_dropout_draws_by_example_on_every_layout(how):
    usual, evaluated = losses_with("stack")
    found, again = losses_with("stack", **how)
    np.testing.assert_allclose(found, usual, rtol=TOLERANCE)
    np.testing.assert_allclose(again, evaluated, rtol=TOLERANCE)
    assert abs(usual[0] - evaluated) > 1e-3, "dropout is on in training only"


@pytest.mark.full
def test_a_network_drops_too():
    found, evaluated = losses_with("network")
    assert abs(found[0] - evaluated) > 1e-3
    np.testing.assert_allclose(evaluated, losses_with("stack")[1], rtol=TOLERANCE)


@pytest.mark.parametrize("form", ["stack", full("network")])
def test_sown_losses_are_attached_losses(form):
    model, of_ppctl = make(form, sows=True)
    pipe = pipe_of(of_ppctl, schedule="zb_h1")
    losses, state = steps(pipe)
    wanted, expected = trained(model)
    assert pipe.attached_losses == ("small",)
    np.testing.assert_allclose(losses, wanted, rtol=TOLERANCE)
    assert_close(variables(pipe.flax_model(state)), variables(expected))


def test_nnx_remat_inside_blocks():
    assert steps(pipe_of(make(remat=True)[1]))[0] == pytest.approx(trained(make()[0])[0])


def test_only_chosen_variables_are_trained():
    model = make()[0]
    for block in model.blocks:
        block.up = nnx.LoRALinear(
            WIDTH,
            2 * WIDTH,
            lora_rank=2,
            rngs=nnx.Rngs(1),
            param_dtype=jnp.float64,
            lora_param_dtype=jnp.float64,
        )
    parts = {"embed": Gpt.embed, "head": Gpt.head, "loss": loss}
    stack = ppctl.flax.stack(model, trainable=nnx.LoRAParam, **parts)
    pipe = pipe_of(stack)
    _, state = steps(pipe, 1)
    before, after = (nnx.to_flat_state(nnx.state(m)) for m in (model, pipe.flax_model(state)))
    for (path, old), (_, new) in zip(before, after, strict=True):
        if isinstance(old, nnx.Param):
            is_equal = np.array_equal(old[...], new[...])
            assert is_equal != isinstance(old, nnx.LoRAParam), path


@pytest.mark.parametrize("form", ["stack", full("network")])
def test_linen_modules_train_as_by_plain_flax(form):
    model, variables, of_ppctl = make_linen(form)
    pipe = pipe_of(of_ppctl)
    losses, state = steps(pipe)
    params, update = variables["params"], clipped()
    inner = update.init(params)
    wanted = []

    def mean(params):
        logits, sown = model.apply(
            {"params": params}, batch_of()["inputs"], train=True, mutable="losses"
        )
        total, number = loss(logits, batch_of()["targets"])
        return total / number + sum(jax.tree.leaves(sown)), total / number

    for _ in range(3):
        (_, value), grads = jax.jit(jax.value_and_grad(mean, has_aux=True))(params)
        change, inner = update.update(grads, inner, params)
        params = optax.apply_updates(params, change)
        wanted.append(float(value))
    np.testing.assert_allclose(losses, wanted, rtol=TOLERANCE)
    assert_close(pipe.flax_model(state)["params"], params)


def test_linen_dropout_is_off_in_evaluations():
    pipe = pipe_of(make_linen(rate=0.5)[2])
    state = pipe.init()
    whole = pipe_of(make_linen(rate=0.0)[2])
    evaluated = float(pipe.evaluate(state, batch_of())["loss"])
    assert evaluated == pytest.approx(float(whole.evaluate(whole.init(), batch_of())["loss"]))
    assert abs(float(pipe.step(state, batch_of())[1]["loss"]) - evaluated) > 1e-3


class Noisy(linen.Module):
    """A linen model with a stream of random numbers besides dropout's."""

    @linen.compact
    def __call__(self, tokens, *, train):
        x = linen.Embed(VOCAB, WIDTH, param_dtype=jnp.float64)(tokens)
        if train:
            x += jax.random.normal(self.make_rng("noise"), x.shape)
        x = ppctl.stage_boundary(x)
        return linen.Dense(VOCAB, param_dtype=jnp.float64)(x)


def test_all_streams_of_linen_draw():
    variables = lambda key: Noisy().init(key, batch_of()["inputs"], train=False)
    call = lambda m, x, train: m(x, train=train)
    pipe = pipe_of(ppctl.flax.network(Noisy(), variables, loss=loss, call=call))
    state = pipe.init()
    evaluated = float(pipe.evaluate(state, batch_of())["loss"])
    assert abs(float(pipe.step(state, batch_of())[1]["loss"]) - evaluated) > 1e-3


def test_a_pipeline_starts_from_given_parameters():
    pipe = pipe_of(make()[1])
    _, state = steps(pipe, 1)
    again = pipe.init(params=pipe.params(state))
    assert_close(pipe.params(again), pipe.params(state))
    assert float(pipe.loss(again, batch_of())) == float(pipe.loss(state, batch_of()))
    with pytest.raises(
        ConfigError, match=r"^The state does not fit this model .*: it has no params"
    ):
        pipe.init(params={"layers": {}})


# --- refused --------------------------------------------------------------------------------------


def test_flax_by_hand_leads_to_ppctl_flax():
    graph, params, rest = nnx.split(Gpt(rngs=nnx.Rngs(0), rate=0.1), nnx.Param, ...)
    by_hand = lambda params, inputs: nnx.merge(graph, params, rest)(inputs)
    with pytest.raises(
        ConfigError, match=r"change variables of a Flax module .*ppctl\.flax\.stack"
    ):
        pipe_of(ppctl.Network(lambda key: params, by_hand, loss))
    state = nnx.state(Gpt(rngs=nnx.Rngs(0)))
    with pytest.raises(ConfigError, match=r"^init makes \S+ of uint32.* ppctl\.flax\.network\("):
        pipe_of(ppctl.Network(lambda key: state, by_hand, loss))


def test_wrong_arguments_name_the_call_that_leads_on():
    model = make()[0]
    with pytest.raises(ConfigError, match=r"Use ppctl\.flax\.stack\(model, .*flax\.network"):
        pipe_of(model)
    with pytest.raises(ConfigError, match=r"^Gpt is an nnx\.Module, which holds its variables"):
        ppctl.flax.network(model, {}, loss=loss)
    with pytest.raises(ConfigError, match=r"^LinenGpt is a flax\.linen module, which needs its"):
        ppctl.flax.network(make_linen()[0], loss=loss)
    with pytest.raises(ConfigError, match=r"^int is not a Flax module"):
        ppctl.flax.network(3, loss=loss)


# --- a stack as a module --------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [full(0.0), 0.2])
def test_the_transformer_is_a_module(dropout):
    sizes = {"num_layers": 4, "d_model": WIDTH, "num_heads": 2, "vocab_size": VOCAB}
    stack = ppctl.transformer(**sizes, dtype="float64", dropout=dropout)
    pipe = pipe_of(stack, schedule="zb_v")
    state = pipe.init(seed=0)
    module = ppctl.flax.module(stack, seed=0)
    module.eval()
    inputs = batch_of()["inputs"]
    np.testing.assert_allclose(module(inputs), pipe.predict(state, inputs), atol=TOLERANCE)
    _, state = steps(pipe, 1)
    again = pipe.flax_model(state)
    again.eval()
    np.testing.assert_allclose(again(inputs), pipe.predict(state, inputs), atol=TOLERANCE)
    kind = type(module)
    back = ppctl.flax.stack(again, embed=kind.embed, head=kind.head, loss=loss)
    other = pipe_of(back)
    assert float(other.loss(other.init(), batch_of())) == pytest.approx(
        float(pipe.loss(state, batch_of())), rel=TOLERANCE
    )
