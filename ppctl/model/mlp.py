"""Multi-layer perceptron for regression on the stack protocol.

Shape suffixes: B batch, I inputs, D width, O targets.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ppctl.model.stack import Stack, Tree

ACTIVATIONS = {"relu": jax.nn.relu, "tanh": jnp.tanh, "gelu": jax.nn.gelu}


def mlp(*, num_layers: int, d_model: int, activation: str, input_dim: int, target_dim: int, dtype: jnp.dtype) -> Stack:
    """Return the stack activation(x W + b), num_layers times, between two linear maps; for regression.

    inputs: [B, input_dim], targets: [B, target_dim], floating; x: [B, d_model]. activation: relu | tanh | gelu.
    The loss is the squared error, one a target value, in at least float32. dtype: of the parameters, drawn by He et al.
    (2015). KeyError for another activation.
    """
    act = ACTIVATIONS[activation]
    he = nnx.initializers.he_normal()

    def linear(num_in: int, num_out: int, key: jax.Array) -> Tree:
        module = nnx.Linear(num_in, num_out, kernel_init=he, param_dtype=dtype, rngs=nnx.Rngs(key))
        return nnx.to_pure_dict(nnx.state(module, nnx.Param))

    def init_layer(key: jax.Array, _: jax.Array) -> Tree:
        return linear(d_model, d_model, key)

    def init_ends(key: jax.Array) -> Tree:
        embed_key, head_key = jax.random.split(key)
        return {"embed": linear(input_dim, d_model, embed_key), "head": linear(d_model, target_dim, head_key)}

    def apply(params: Tree, x: jax.Array) -> jax.Array:
        return x @ params["kernel"] + params["bias"]

    def embed(ends: Tree, inputs_BI: jax.Array) -> jax.Array:
        return act(apply(ends["embed"], inputs_BI.astype(ends["embed"]["kernel"].dtype)))

    def layer(params: Tree, x_BD: jax.Array) -> jax.Array:
        return act(apply(params, x_BD))

    def outputs(ends: Tree, x_BD: jax.Array) -> jax.Array:
        return apply(ends["head"], x_BD)

    def head(ends: Tree, x_BD: jax.Array, targets_BO: jax.Array) -> tuple[jax.Array, jax.Array]:
        predictions_BO = outputs(ends, x_BD)
        errors_BO = predictions_BO.astype(jnp.promote_types(predictions_BO.dtype, jnp.float32)) - targets_BO
        return jnp.square(errors_BO).sum(), jnp.asarray(errors_BO.size, errors_BO.dtype)

    return Stack(num_layers, init_ends, init_layer, embed, layer, head, mixes_examples=False, outputs=outputs)
