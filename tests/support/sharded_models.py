"""Custom models that give PartitionSpecs of their parameters over tp."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import ppctl
from ppctl import parallel

INPUTS, TARGETS, WIDTH = 6, 4, 8
COLUMNS_THEN_ROWS = {"up": P(None, "tp"), "bias": P("tp"), "down": P("tp"), "scale": None}


def normal(*shape):
    """Numbers of variance 1 / the first size, the same ones for every key: random numbers of JAX's
    compile slowly.
    """
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape) / shape[0] ** 0.5)


def block(params, x):
    return x + jax.nn.gelu((x * params["scale"]) @ params["up"] + params["bias"]) @ params["down"]


def new_block(hidden):
    up, down, bias = (
        normal(WIDTH, hidden),
        normal(hidden, WIDTH),
        0.1 * jnp.arange(hidden, dtype=float),
    )
    return {"up": up, "bias": bias, "down": down, "scale": 1.0 + normal(WIDTH)}


def squared_error(outputs, targets):
    errors = outputs - targets
    return jnp.square(errors).sum(), jnp.asarray(errors.size, errors.dtype)


def stack(num_layers=4, *, hidden=16, layer=block, sharding=None, dtype=jnp.float64):
    """Residual layers of two matrices, the first in columns, the second in rows; the head in
    columns.
    """

    def init_layer(key, index):
        del key
        return jax.tree.map(lambda a: (a * (1 + 0.1 * index)).astype(dtype), new_block(hidden))

    def init_embed_head(key):
        del key
        return {
            "embed": normal(INPUTS, WIDTH).astype(dtype),
            "head": normal(WIDTH, TARGETS).astype(dtype),
        }

    def embed(embed_head, inputs):
        return jnp.tanh(inputs.astype(embed_head["embed"].dtype) @ embed_head["embed"])

    def head(embed_head, x, targets):
        return squared_error(x @ embed_head["head"], targets)

    if sharding is None:
        sharding = {
            "embed_head": {"embed": P(), "head": P(None, "tp")},
            "layers": COLUMNS_THEN_ROWS,
        }
    options = ppctl.StackOptions(sharding=sharding)
    return ppctl.Stack(num_layers, init_embed_head, init_layer, embed, layer, head, options)


def of_config(*, num_layers, dtype, data):
    """The stack for a request with model=custom and rows of these sizes."""
    assert (data.input_dim, data.target_dim) == (INPUTS, TARGETS)
    return stack(num_layers, dtype=dtype)


def by_hand(num_layers=4, dtype=jnp.float64):
    """The stack divided by custom collectives; over tp each device has its part of the rows."""
    whole = stack(num_layers, dtype=dtype)

    def divided(axes):
        def embed(embed_head, inputs):
            x = whole.embed(embed_head, inputs)
            return parallel.own_part(x, axes, dim=0) if axes.divides_rows else x

        def layer(params, x):
            hidden = parallel.column(x * params["scale"], params["up"], axes) + params["bias"]
            return x + parallel.row(jax.nn.gelu(hidden), params["down"], axes)

        def head(embed_head, x, targets):
            losses = whole.head(embed_head, parallel.gather(x, axes), targets)
            return tuple(parallel.on_first(a, axes) for a in losses)

        sharding = {"embed_head": None, "layers": COLUMNS_THEN_ROWS}
        return ppctl.DividedStack(embed, layer, head, sharding)

    return whole.with_options(divided=divided)


def rows(number=16):
    rng = np.random.default_rng(0)
    shapes = {"inputs": (number, INPUTS), "targets": (number, TARGETS)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}
