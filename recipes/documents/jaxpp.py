"""The model and data of JaxPP's tutorial: a transformer without embedding or head that learns to
return its input.

A block is attention of an eighth of the width, in 8 heads, and an MLP of four times the width, each
added to its input and normalized after. Every token of the input is a vector of ones, so that all
tokens are equal at all times, and the loss is that of one token: the sequence is as long as one
likes.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import ppctl
from ppctl.data.dataset import DataSet, fingerprint

SEED = 0


class Block(nn.Module):
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_BTD):
        width, types = x_BTD.shape[-1], {"param_dtype": self.dtype}
        attended = nn.MultiHeadDotProductAttention(num_heads=8, qkv_features=width // 8, **types)(
            x_BTD
        )
        x_BTD = nn.LayerNorm(**types)(x_BTD + attended)
        hidden = nn.gelu(nn.Dense(4 * width, **types)(x_BTD))
        return nn.LayerNorm(**types)(x_BTD + nn.Dense(width, **types)(hidden))


class Transformer(nn.Module):
    num_layers: int
    dtype: jnp.dtype

    def setup(self):
        self.block = [Block(self.dtype) for _ in range(self.num_layers)]

    def __call__(self, x_BTD):
        for block in self.block:
            x_BTD = block(x_BTD)
        return x_BTD


def initial(num_layers, width, dtype):
    """The parameters, as Flax draws them: in float32, from the document's key."""
    with jax.threefry_partitionable(False):  # as JAX drew when the document was written
        drawn = Transformer(num_layers, jnp.float32).init(
            jax.random.key(SEED), jnp.ones((1, 1, width))
        )["params"]
    return jax.tree.map(lambda a: a.astype(dtype), drawn)


def transformer(*, num_layers, dtype, data):
    """The stack of blocks on examples of `ones`: x [batch, tokens, width]."""

    def loss(outputs_BTD, targets_BTD):
        errors_BTD = outputs_BTD.astype(jnp.promote_types(outputs_BTD.dtype, jnp.float32))
        errors_BTD -= targets_BTD
        return jnp.square(errors_BTD).sum(), jnp.asarray(errors_BTD.size, errors_BTD.dtype)

    return ppctl.flax.stack(
        Transformer(num_layers, dtype),
        {"params": initial(num_layers, data.input_dim, dtype)},
        blocks="block",
        embed=lambda _, inputs_BTD: inputs_BTD.astype(dtype),
        head=lambda _, x_BTD: x_BTD,
        loss=loss,
    )


def ones(*, batch_size, seed, eval_fraction, seq_len, width):
    """Sequences of ones, which are their own targets."""
    if eval_fraction:
        raise ValueError(
            f"data.eval_fraction={eval_fraction} would hold out sequences, and all are alike: use 0"
        )

    def read(numbers):
        rows = np.ones((len(numbers), seq_len, width), np.float32)
        return {"inputs": rows, "targets": rows}

    return DataSet(
        name="ones",
        source=f"sequences of {seq_len} vectors of {width} ones",
        fingerprint=fingerprint(
            name="ones", rule=[seq_len, width], batch_size=batch_size, seed=seed
        ),
        batch_size=batch_size,
        seed=seed,
        num_examples=batch_size,
        num_eval_examples=0,
        read=read,
        input_dim=width,
        target_dim=width,
    )
