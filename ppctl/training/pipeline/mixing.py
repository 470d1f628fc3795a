"""A trial whether a model computes each example by itself, as training by microbatches needs.

A forward of a few examples is compared with forwards of its halves in another order. Batch norm,
masks and noise drawn by the shape of a batch, losses between examples, and means where sums are
expected all differ.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppctl.errors import ConfigError, setting
from ppctl.executors.compiler_options import cpu_options
from ppctl.executors.reference import reference
from ppctl.model.stack import Stack, init, num_examples
from ppctl.training.pipeline.user_code import call_user_code

Tree = Any
NUM_TRIED = 4  # examples
NEW_PLACES = (1, 2, 3, 0)  # no example keeps its place in its half
MOST_BYTES = 2**30  # of parameters, which are on one device while the model is tried
NOISE = 0.05  # of the parameters' size: a head of zeros would hide the layers before it
TOLERANCE = {"float64": 1e-8, "float32": 1e-4, "bfloat16": 5e-3}  # relative rounding of the loss


def refuse_mixing(
    name: str, stack: Stack, batch: Mapping[str, np.ndarray], dtype: jnp.dtype
) -> str | None:
    """Return why a model could not be tried, None if it passed; ConfigError if it mixes examples.

    name: of the model, for messages. batch: an even number of examples, at most NUM_TRIED. dtype:
    of compute.
    """
    losses = partial(_mean_losses, stack, batch, dtype)
    whole, halved = call_user_code(name, "its loss of a few examples", losses)
    if not (math.isfinite(whole) and math.isfinite(halved)):
        return f"{name} was not tried for mixing examples: the loss of a few is {whole:g}."
    if abs(whole - halved) <= TOLERANCE[str(dtype)] * max(abs(whole), abs(halved)):
        return None
    number, meant = (
        num_examples(batch["inputs"]),
        "mixes_examples=True of the Network or StackOptions",
    )
    meant = setting("model.mixes_examples", "true", meant)
    raise ConfigError(
        f"{name} mixes the examples of a batch: the mean loss of {number} examples is "
        f"{whole:.7g}, of the same in two microbatches and another order {halved:.7g}, so that "
        "microbatches would train another function. Let it compute each example by itself (layer "
        "norm in place of batch norm, no masks or noise by the shape of a batch) and return the "
        f"sum and the number of losses, or use {meant} if this is meant."
    )


def few_examples(
    batch: Mapping[str, Any], shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, np.ndarray]:
    """Return the first examples of a batch, made up if it is shapes or on other processes."""
    number = min(NUM_TRIED, num_examples(shapes["inputs"]) // 2 * 2)
    batch = {name: batch[name] for name in shapes}
    arrays = jax.tree.leaves(batch)
    if all(isinstance(a, np.ndarray) or getattr(a, "is_fully_addressable", False) for a in arrays):
        first = lambda a, shape: np.asarray(a[:number], shape.dtype)  # noqa: E731
        return jax.tree.map(first, batch, dict(shapes))
    return jax.tree.map(lambda a: _made_up((number, *a.shape[1:]), a.dtype), dict(shapes))


def _made_up(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return waves; for integers zeros and ones, which are ids in any table."""
    places = np.arange(math.prod(shape)).reshape(shape)
    is_floating = jnp.issubdtype(dtype, jnp.floating)
    return (np.sin(1.7 * places) if is_floating else places * places // 3 % 2).astype(dtype)


def _mean_losses(
    stack: Stack, batch: Mapping[str, np.ndarray], dtype: jnp.dtype
) -> tuple[float, float]:
    """Return the mean loss of a batch, and of its two halves in another order."""
    number = num_examples(batch["inputs"])
    order = [place for place in NEW_PLACES if place < number]
    how = {"num_microbatches": 1, "remat": "none", "unroll": 0, "with_grads": False}
    mean_loss = reference(stack, dtype=dtype, **how)

    def both(batch: Tree) -> tuple[jax.Array, jax.Array]:
        params = jax.tree.map(_with_noise, init(stack, 0))
        reordered = jax.tree.map(lambda a: a[np.array(order)], batch)
        halves = jax.tree.map(lambda a: a.reshape(2, number // 2, *a.shape[1:]), reordered)
        whole, _ = mean_loss(params, batch)
        of_halves, counts = jax.lax.map(lambda half: mean_loss(params, half), halves)
        return whole, (of_halves * counts).sum() / counts.sum()

    given = jax.tree.map(np.asarray, {name: batch[name] for name in ("inputs", "targets")})
    options = cpu_options("once") if jax.default_backend() == "cpu" else None
    whole, halved = jax.jit(both).lower(given).compile(options)(given)
    return float(whole), float(halved)


def _with_noise(a: jax.Array) -> jax.Array:
    """Return initial parameters with waves added, so that none is zero."""
    size = jnp.sqrt(jnp.mean(jnp.square(a)))
    waves = jnp.sin(1.3 * jnp.arange(a.size, dtype=a.dtype) + 1).reshape(a.shape)
    return a + NOISE * jnp.where(size > 0, size, 1.0).astype(a.dtype) * waves
