"""A custom model: equal residual layers between an embedding and a head.

ppctl divides the layers over the stages of a pipeline; every executor, schedule and mesh takes the
model as it is.
"""

import jax
import jax.numpy as jnp

from ppctl.model.stack import Stack, StackOptions


def residual_mlp(*, num_layers, dtype, data, width=32):
    """Layers x + tanh(x W) V of `width`, for rows [batch, features] and targets [batch, values].

    `dtype` is that of parameters; `data` knows sizes. `width` is this model's own:
    +model.options.width=64.
    """

    def normal(key, num_in, num_out):
        return jax.random.normal(key, (num_in, num_out), dtype) / num_in**0.5

    def init_embed_head(key):  # parameters before the first layer and after the last
        first, last = jax.random.split(key)
        return {
            "embed": normal(first, data.input_dim, width),
            "head": normal(last, width, data.target_dim),
        }

    def init_layer(key, index):  # layer 0, 1, ...; all have these shapes
        first, last = jax.random.split(key)
        return {
            "in": normal(first, width, 2 * width),
            "out": normal(last, 2 * width, width) / num_layers**0.5,
        }

    def embed(embed_head, inputs):  # -> x, which goes from layer to layer and from stage to stage
        return inputs.astype(embed_head["embed"].dtype) @ embed_head["embed"]

    def layer(weights, x):  # x -> x, of the same shape and dtype
        return x + jnp.tanh(x @ weights["in"]) @ weights["out"]

    def outputs(embed_head, x):  # the result of run.predict (see predict.py)
        return x @ embed_head["head"]

    def head(embed_head, x, targets):  # -> sum of losses, number of losses
        errors = outputs(embed_head, x).astype(jnp.promote_types(x.dtype, jnp.float32)) - targets
        return jnp.square(errors).sum(), jnp.asarray(errors.size, errors.dtype)

    options = StackOptions(outputs=outputs)
    return Stack(num_layers, init_embed_head, init_layer, embed, layer, head, options)
