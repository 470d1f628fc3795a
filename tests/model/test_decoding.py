"""A text read piece by piece, with kept keys and values, gives the same logits as read at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import make_params
from support.selection import full_except

from ppctl.config.groups.moe_settings import Experts
from ppctl.config.groups.rope_settings import Rope
from ppctl.config.groups.transformer_sizes import Architecture
from ppctl.executors.reference import outputs_of
from ppctl.model.cached_decoding import Decoder
from ppctl.model.stack import init
from ppctl.model.transformer import transformer

SIZES = {
    "num_layers": 2,
    "d_model": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 12,
    "mlp_width": 64,
    "activation": "swiglu",
    "vocab_size": 40,
    "tied": False,
}
FAMILIES = {
    "plain": {},
    "tied, caps, windows": {
        "tied": True,
        "attention_softcap": 5.0,
        "logit_softcap": 3.0,
        "window": 4,
        "window_pattern": "WF",
        "rope": Rope(local_theta=100.0),
        "family": "gemma2",
    },
    "biases, norms, yarn": {
        "family": "glm4p5",
        "rope": Rope(
            scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
        ),
    },
    "experts, norms of all heads, turned in part": {
        "family": "olmoe",
        "rope": Rope(fraction=0.5),
        "moe": Experts(num_experts=4, width=16, first_dense=1, shared_width=8),
    },
}


def decoder(sizes, params, num_devices=1, num_positions=32):
    sizes = Architecture(**sizes)
    make = lambda mix, rotate: transformer(sizes, dtype=jnp.float64, mix=mix, rotate=rotate)
    cached = sizes.attention_form.cached
    return Decoder(make, params, jax.devices()[:num_devices], num_positions, cached, jnp.float64)


@pytest.mark.full
def test_decoding_in_bfloat16_chooses_the_experts_of_the_whole_model():
    moe = Experts(num_experts=8, width=16, score="sigmoid", choice_bias=True)
    sizes = Architecture(**SIZES, moe=moe)
    stack = transformer(sizes, dtype=jnp.float32)
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), jax.jit(lambda: init(stack, 0))())
    # like GLM-4.5's: near 7, with differences that bfloat16 lacks
    bias = 7 + jnp.linspace(0, 0.015, 16, dtype=jnp.float32).reshape(2, 8)
    params["layers"]["router"] = params["layers"]["router"] | {"bias": bias}
    params["layers"]["router"]["kernel"] *= 1e-3
    make = lambda mix, rotate: transformer(sizes, dtype=jnp.bfloat16, mix=mix, rotate=rotate)
    reader = Decoder(make, params, jax.devices()[:1], 11, ((2, 12),) * 2, jnp.bfloat16)
    tokens = np.random.default_rng(0).integers(0, 40, (1, 11), np.int32)
    found, _ = reader.read(jnp.asarray(tokens), reader.empty(1), 0, jnp.zeros(1, jnp.int32))
    expected = jax.jit(outputs_of(stack, dtype=jnp.bfloat16))(params, tokens)[:, -1]
    assert jnp.abs(found - expected).max() < 0.05


@pytest.mark.parametrize(
    "changes", full_except(FAMILIES, "plain", "experts, norms of all heads, turned in part")
)
def test_pieces_give_the_logits_of_the_whole(changes):
    sizes = SIZES | changes
    stack = transformer(Architecture(**sizes), dtype=jnp.float64)
    params = jax.tree.map(jnp.asarray, make_params(stack))
    tokens = np.random.default_rng(0).integers(0, 40, (2, 11), np.int32)

    def whole(tokens):
        x = stack.embed(params["embed_head"], tokens)
        for l in range(stack.num_layers):
            x = stack.layer_of(l)(jax.tree.map(lambda a, l=l: a[l], params["layers"]), x)
        return stack.options.outputs(params["embed_head"], x)

    expected = np.array(jax.jit(whole)(tokens))
    short = np.asarray(jax.jit(whole)(tokens[1:, 3:]))  # a row whose first token is at position 3
    reader = decoder(sizes, params, num_devices=2)
    cache, starts = reader.empty(2), jnp.array([0, 3], jnp.int32)
    for first, last in ((0, 4), (4, 8), (8, 9), (9, 10), (10, 11)):
        logits, cache = reader.read(jnp.asarray(tokens[:, first:last]), cache, first, starts)
        assert np.abs(logits[0] - expected[0, last - 1]).max() < 1e-10
        assert np.abs(logits[1] - short[0, last - 4]).max() < 1e-10
