"""Functions other than stacks, each with rows to learn from."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from ppctl import Network, stage_boundary


def normal(*shape, of=None):
    """Numbers of variance 1 / `of`, the same ones for every key: random numbers of JAX's take long
    to compile.
    """
    numbers = np.random.default_rng(sum(shape)).standard_normal(shape)
    return jnp.asarray(numbers / (of or shape[0]) ** 0.5)


def squared_error(outputs, targets):
    errors = outputs - targets
    return jnp.square(errors).sum(), jnp.asarray(errors.size, float)


def widths(*, marked=True):
    """Layers of different widths, a value that skips two boundaries, a mask that crosses one,
    relu's own derivative.
    """
    sizes = (6, 24, 8, 16, 8, 3)

    def init(key):
        return [
            {"w": normal(a, b), "bias": 0.1 * jnp.arange(b, dtype=float)}
            for a, b in pairwise(sizes)
        ]

    mark = stage_boundary if marked else lambda x: x

    def apply(params, x):
        dense = lambda i, x: (
            x @ params[i]["w"] / jnp.linalg.norm(params[i]["w"]) + params[i]["bias"]
        )
        x = jax.nn.relu(dense(0, x))
        kept = dense(1, x)
        x, is_small = mark((kept, kept < 0.1))
        x = jnp.where(is_small, jnp.tanh(x), x)
        x = mark(dense(2, x).reshape(len(x), 4, 4)).reshape(len(x), 16)
        x = jax.nn.silu(mark(dense(3, x) + kept))
        return dense(4, x)

    return Network(init, apply, squared_error)


def images(*, marked=True):
    """Convolutions, with a loop that makes one layer, and a head wider than all before it."""

    def init(key):
        kernels = {"in": normal(3, 3, 2, 4, of=10), "same": normal(2, 3, 3, 4, 4, of=10)}
        return kernels | {"scale": 1.0 + normal(4), "out": normal(16, 80)}

    mark = stage_boundary if marked else lambda x: x

    def convolved(x, kernel, stride=1):
        same = {"padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
        return jax.lax.conv_general_dilated(x, kernel, (stride, stride), **same)

    def apply(params, x):
        x = mark(jnp.tanh(convolved(x, params["in"], 2)))
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(convolved(x, w)), None), x, params["same"])
        x = mark(x * params["scale"])
        return jnp.tanh(x.reshape(len(x), -1)) @ params["out"]

    return Network(init, apply, squared_error)


def tokens(*, marked=True):
    """Ids, whose table the head shares; each row is attended to by itself."""

    def init(key):
        return {"table": normal(50, 8), "qkv": normal(3, 8, 8, of=8), "mlp": {"w": normal(8, 8)}}

    mark = stage_boundary if marked else lambda x: x

    def apply(params, ids):
        x = params["table"][ids]
        x = mark(x)
        q, k, v = (x @ params["qkv"][i] for i in range(3))
        x = x + jax.nn.softmax(q @ k.swapaxes(1, 2) + jnp.where(jnp.tri(5), 0.0, -1e9)) @ v
        x = mark(x)
        x = x + jnp.tanh(x @ params["mlp"]["w"])
        return x @ params["table"].T

    def loss(logits, targets):
        found = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
        return found.sum(), jnp.asarray(found.size, float)

    return Network(init, apply, loss)


def deep(*, marked=True):
    """Seven layers of three kinds, a value that skips one boundary."""
    sizes = (6, 8, 8, 12, 8, 8, 8, 3)

    def init(key):
        return [{"w": normal(a, b), "scale": 1.0 + normal(b, of=20)} for a, b in pairwise(sizes)]

    mark = stage_boundary if marked else lambda x: x

    def apply(params, x):
        kept = None
        for i, layer in enumerate(params):
            y = x @ layer["w"] * layer["scale"]
            x = y if i == 6 else (jnp.tanh, jax.nn.relu, jax.nn.silu)[i % 3](y)
            if i == 1:
                x, kept = mark((x, y))
            elif i == 4:
                x = mark(x + kept)
            elif i < 6:
                x = mark(x)
        return x

    return Network(init, apply, squared_error)


# layers by marks, and auto
NETWORKS = {
    "widths": (widths, 4, 4),
    "images": (images, 3, 2),
    "tokens": (tokens, 3, 2),
    "deep": (deep, 7, 5),
}


def rows_of(name, number, seed=0):
    """A batch for a network."""
    rng = np.random.default_rng(seed)
    if name == "tokens":
        return {key: rng.integers(0, 50, (number, 5), np.int32) for key in ("inputs", "targets")}
    shapes = {"widths": ((6,), (3,)), "deep": ((6,), (3,)), "images": ((4, 4, 2), (80,))}[name]
    return {
        key: rng.standard_normal((number, *shape))
        for key, shape in zip(("inputs", "targets"), shapes, strict=True)
    }
