"""A model that gives NaN for zeros, so that what an executor reads wrongly shows."""

import jax
import jax.numpy as jnp
import numpy as np

from ppctl.model.stack import Stack

WIDTH = 4


def normalizing_stack(num_layers):
    """A model whose layer divides by the norm of its product: zeros, as empty slots and padding
    hold, give NaN.
    """

    def layer(w, x):
        product = x @ w["kernel"]
        return product / jnp.linalg.norm(product, axis=-1, keepdims=True)

    def head(embed_head, x, targets):
        errors = x @ embed_head["head"] - targets
        return jnp.square(errors).sum(), jnp.asarray(errors.size, errors.dtype)

    return Stack(
        num_layers,
        init_embed_head=lambda key: {
            name: jax.random.normal(key, (WIDTH, WIDTH)) for name in ("embed", "head")
        },
        init_layer=lambda key, _: {"kernel": jax.random.normal(key, (WIDTH, WIDTH))},
        embed=lambda embed_head, inputs: inputs @ embed_head["embed"],
        layer=layer,
        head=head,
    )


def normalizing_inputs(num_layers, batch_size):
    """(parameters, batch) of it."""
    rng = np.random.default_rng(0)
    params = {
        "embed_head": {name: rng.standard_normal((WIDTH, WIDTH)) for name in ("embed", "head")},
        "layers": {"kernel": rng.standard_normal((num_layers, WIDTH, WIDTH))},
    }
    return params, {
        name: rng.standard_normal((batch_size, WIDTH)) for name in ("inputs", "targets")
    }
