"""A custom model in Flax: equal blocks between an embedding and a head.

ppctl divides the blocks over the stages of a pipeline; every executor, schedule and mesh takes the
model as it is.
"""

from functools import partial

import jax.numpy as jnp
from flax import nnx

import ppctl


class Block(nnx.Module):
    """Attention and a perceptron, each with dropout: x [batch, samples, width] -> x."""

    def __init__(self, width, heads, rate, param_dtype, rngs):
        how = {"param_dtype": param_dtype, "rngs": rngs}
        self.norms = nnx.List([nnx.LayerNorm(width, **how) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, **how)
        self.up = nnx.Linear(width, 4 * width, **how)
        self.down = nnx.Linear(4 * width, width, **how)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        x = x + self.dropout(self.attention(self.norms[0](x)))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norms[1](x)))))


class Waves(nnx.Module):
    """Reads the samples of a wave as tokens, and writes its amplitude and frequency."""

    def __init__(self, num_layers, data, width, heads, rate, param_dtype, rngs):
        how = {"param_dtype": param_dtype, "rngs": rngs}
        self.sample = nnx.Linear(1, width, **how)
        self.place = nnx.Embed(data.input_dim, width, **how)
        self.blocks = nnx.List(
            [Block(width, heads, rate, param_dtype, rngs) for _ in range(num_layers)]
        )
        self.norm = nnx.LayerNorm(width, **how)
        self.last = nnx.Linear(width, data.target_dim, **how)

    def embed(self, inputs):  # [batch, samples] -> x, which goes from block to block
        return self.sample(inputs[..., None]) + self.place(jnp.arange(inputs.shape[1]))

    def head(self, x):  # -> outputs: the result of run.predict (see predict.py)
        return self.last(self.norm(x).mean(1))

    def __call__(self, inputs):  # outside of ppctl
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def squared_errors(outputs, targets):  # -> sum of losses, number of losses
    errors = outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32)) - targets
    return jnp.square(errors).sum(), jnp.asarray(errors.size, errors.dtype)


def waves(*, num_layers, dtype, data, width=32, heads=4, rate=0.05):
    """Return the model. dtype: dtype of the parameters. data: the data set, which has the sizes of
    inputs and targets. The other arguments are set by +model.options.width=64 and the like.
    """
    module = partial(Waves, num_layers, data, width, heads, rate, dtype)  # takes rngs
    return ppctl.flax.stack(module, embed=Waves.embed, head=Waves.head, loss=squared_errors)
