"""Adapters: initial values, merged weights, and refused settings."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import TRANSFORMER, make_params

import ppctl
from ppctl import transformer
from ppctl.config.groups.transformer_sizes import TARGETS
from ppctl.errors import ConfigError
from ppctl.executors.reference import outputs_of
from ppctl.model.layer_inputs import LayerInputs
from ppctl.model.lora import A, B, Lora, adapted_modules, merged, without_adapters
from ppctl.model.stack import init

SIZES = TRANSFORMER | {
    "num_layers": 2,
    "activation": "swiglu",
    "num_kv_heads": 2,
    "family": "glm4p5",
}
IDS = np.random.default_rng(0).integers(0, 32, (2, 8))


def logits(stack, params):
    return jax.jit(outputs_of(stack, dtype=jnp.float64))(params, IDS)


def test_the_choice_bias_keeps_its_dtype_with_and_without_adapters():
    sizes = TRANSFORMER | {"moe": {"num_experts": 4, "choice_bias": True}}
    for lora in (None, Lora(2, 4.0)):
        stack = ppctl.transformer(**sizes, lora=lora, dtype=jnp.float32)
        cast = lambda params, s=stack: LayerInputs().computed(params, jnp.bfloat16, s.uncast)
        router = jax.eval_shape(cast, stack.param_shapes)["layers"]["router"]
        assert (router["bias"].dtype, router["kernel"].dtype) == (jnp.float32, jnp.bfloat16)


@pytest.mark.full
def test_a_model_begins_as_it_is_without_adapters():
    plain, adapted = (
        transformer(**SIZES, lora=lora, dtype=jnp.float64) for lora in (None, Lora(4, 8.0))
    )
    base, params = (jax.jit(lambda s=each: init(s, 3))() for each in (plain, adapted))
    jax.tree.map(np.testing.assert_array_equal, without_adapters(params), base)
    np.testing.assert_array_equal(logits(adapted, params), logits(plain, base))
    modules = dict(adapted_modules(params["layers"]))
    assert len(modules) == len(TARGETS)
    for module in modules.values():
        num_in = module["kernel"].shape[1]
        assert (
            0.9 / num_in**0.5 < np.abs(module[A]).max() <= 1 / num_in**0.5
        )  # kaiming_uniform(a=sqrt(5)), as PEFT has it
        assert not module[B].any()
        assert not np.array_equal(module[A][0], module[A][1])


@pytest.mark.parametrize("targets", [None, ("k", "down")])
def test_merged_parameters_are_the_same_function(targets):
    lora = Lora(4, 12.0, targets)
    plain, adapted = (transformer(**SIZES, lora=each, dtype=jnp.float64) for each in (None, lora))
    params = make_params(adapted)
    found = merged(params, lora.scale)
    assert jax.tree.structure(found) == jax.tree.structure(jax.eval_shape(lambda: init(plain, 0)))
    assert np.abs(logits(plain, found) - logits(adapted, params)).max() < 1e-9
    assert np.abs(logits(plain, without_adapters(params)) - logits(adapted, params)).max() > 0.01


def test_targets_that_a_block_does_not_have_are_refused():
    with pytest.raises(ConfigError, match="x in lora_targets is not a linear map of a block"):
        Lora(targets=("x",))
    with pytest.raises(
        ConfigError, match="gate in lora_targets: the model's MLP has no gate matrix"
    ):
        init(
            transformer(
                **SIZES | {"activation": "gelu"}, lora=Lora(targets=("gate",)), dtype=jnp.float32
            ),
            0,
        )


def test_experts_take_no_adapters():
    experts = partial(ppctl.transformer, num_layers=2, d_model=16, num_heads=4, vocab_size=8)
    moe = {"num_experts": 4, "choice_bias": True}
    for targets in (None, ("q",)):
        stack = experts(moe=moe, lora=Lora(4, 8.0, targets))
        shapes = jax.eval_shape(lambda stack=stack: init(stack, 0))
        assert {path[0] for path, _ in adapted_modules(shapes["layers"])} == {"attention"}
    with pytest.raises(ConfigError, match="up in lora_targets: the model's layers have experts"):
        jax.eval_shape(lambda: init(experts(moe=moe, lora=Lora(4, 8.0, ("up",))), 0))
    for counted in ({"bias_update": 0.1}, {"capacity": 1.5}):
        with pytest.raises(ConfigError, match="counts tokens in a parameter of the router"):
            experts(moe=moe | counted, lora=Lora(4, 8.0))
