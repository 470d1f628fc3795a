"""Multi-layer perceptron for regression on the stack protocol.

Shape suffixes: B batch, I inputs, D width, O targets.
"""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp

from ppctl.model.random_keys import drawing, dropout as drop
from ppctl.model.stack import Stack, StackOptions, Tree

ACTIVATIONS = {  # transformers have them too
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "gelu": jax.nn.gelu,  # approximated by tanh
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}


@lru_cache(32)  # equal requests get one stack: JAX traces its functions once in a process
def mlp(
    *,
    num_layers: int,
    d_model: int,
    activation: str,
    input_dim: int,
    target_dim: int,
    dtype: jnp.dtype,
    dropout: float = 0.0,
) -> Stack:
    """Return a multi-layer perceptron: embedding and layers activation(x W + b), a linear head.

    inputs [B, input_dim] and targets [B, target_dim] are floating; x is [B, d_model]. The losses
    are the squared errors of all target values, in at least float32.
    activation: a name in ACTIVATIONS. dropout: rate of dropped entries of a layer's output. dtype:
    dtype of the parameters, which are initialized by He et al. (2015).
    """
    act = ACTIVATIONS[activation]

    # 1. parameters
    def linear(num_in: int, num_out: int, key: jax.Array) -> Tree:
        draw = drawing(key, dtype)
        kernel = draw(jax.nn.initializers.he_normal(), num_in, num_out)
        return {"kernel": kernel, "bias": draw(jax.nn.initializers.zeros, num_out)}

    def init_layer(key: jax.Array, _: jax.Array) -> Tree:
        return linear(d_model, d_model, key)

    def init_embed_head(key: jax.Array) -> Tree:
        embed, head = jax.random.split(key)
        return {
            "embed": linear(input_dim, d_model, embed),
            "head": linear(d_model, target_dim, head),
        }

    # 2. the functions of the stack
    def layer(params: Tree, x: jax.Array) -> jax.Array:
        return act(x @ params["kernel"] + params["bias"])

    def embed(embed_head: Tree, inputs_BI: jax.Array) -> jax.Array:
        params = embed_head["embed"]
        return layer(params, inputs_BI.astype(params["kernel"].dtype))

    def outputs(embed_head: Tree, x_BD: jax.Array) -> jax.Array:
        return x_BD @ embed_head["head"]["kernel"] + embed_head["head"]["bias"]

    def head(
        embed_head: Tree, x_BD: jax.Array, targets_BO: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        predictions_BO = outputs(embed_head, x_BD)
        wide = jnp.promote_types(predictions_BO.dtype, jnp.float32)
        errors_BO = predictions_BO.astype(wide) - targets_BO
        return jnp.square(errors_BO).sum(), jnp.asarray(errors_BO.size, errors_BO.dtype)

    def with_dropout(params: Tree, x: jax.Array, key: jax.Array | None) -> jax.Array:
        return drop(key, layer(params, x), dropout)

    functions = init_embed_head, init_layer, embed, with_dropout if dropout else layer, head
    return Stack(num_layers, *functions, StackOptions(outputs, mixes_examples=False))
