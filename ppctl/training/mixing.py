"""Whether a model computes each example by itself, so that microbatches train the function of the whole batch.

Found by trying: a forward of a few examples is compared with forwards of its halves in another order. Batch norm, masks
and noise drawn by the shape of a batch, losses between examples, and means where sums are expected all differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppctl.errors import ConfigError
from ppctl.executors.compiler_preset import cpu_options
from ppctl.model.stack import Stack, init
from ppctl.training.user_code import call_user_code

Tree = Any
NUM_TRIED = 4  # examples
NEW_PLACES = (1, 2, 3, 0)  # no example keeps its place in its half
MOST_BYTES = 2**30  # of parameters, which are on one device while the model is tried
NOISE = 0.05  # of the parameters' own size: a head that starts with zeros would hide what is before it
TOLERANCE = {"float64": 1e-8, "float32": 1e-4, "bfloat16": 5e-3}  # of the loss: rounding, on which alone halves differ


def refuse_mixing(name: str, stack: Stack, batch: Mapping[str, np.ndarray], dtype: jnp.dtype) -> str | None:
    """Return why a model could not be tried on these examples, None where it passed; ConfigError where it mixes them.

    name: of the model, for people. batch: an even number of examples, at most NUM_TRIED. dtype: of compute.
    """
    whole, halved = call_user_code(name, "its loss of a few examples", lambda: _mean_losses(stack, batch, dtype))
    if not (math.isfinite(whole) and math.isfinite(halved)):
        return f"{name} was not tried for mixing examples: the loss of a few is {whole:g}."
    if abs(whole - halved) <= TOLERANCE[str(dtype)] * max(abs(whole), abs(halved)):
        return None
    number = len(batch["inputs"])
    raise ConfigError(
        f"{name} mixes the examples of a batch: the mean loss of {number} examples is {whole:.7g}, of the same in two "
        f"microbatches and another order {halved:.7g}, so that microbatches would train another function. Let it "
        "compute each example by itself (layer norm in place of batch norm, no masks or noise by the shape of a batch) "
        "and return the sum and the number of losses, or use model.mixes_examples=true if this is meant."
    )


def few_examples(batch: Mapping[str, Any], shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, np.ndarray]:
    """Return the first examples of a batch, or made-up ones where it is shapes alone or on other processes' devices."""
    number = min(NUM_TRIED, shapes["inputs"].shape[0] // 2 * 2)
    is_here = lambda a: isinstance(a, np.ndarray) or (isinstance(a, jax.Array) and a.is_fully_addressable)  # noqa: E731
    if all(is_here(batch[name]) for name in shapes):
        return {name: np.asarray(batch[name][:number], a.dtype) for name, a in shapes.items()}
    return {name: _made_up((number, *a.shape[1:]), a.dtype) for name, a in shapes.items()}


def _made_up(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return waves, or zeros and ones where numbers are whole: those are ids in any table."""
    places = np.arange(math.prod(shape)).reshape(shape)
    is_floating = jnp.issubdtype(dtype, jnp.floating)
    return (np.sin(1.7 * places) if is_floating else places * places // 3 % 2).astype(dtype)


def _mean_losses(stack: Stack, batch: Mapping[str, np.ndarray], dtype: jnp.dtype) -> tuple[float, float]:
    """Return the mean loss of a batch, and that of its two halves in another order, both with the same parameters."""
    number = len(batch["inputs"])
    order = [place for place in NEW_PLACES if place < number]

    def losses(params: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        x = stack.embed(params["ends"], batch["inputs"])
        if stack.are_alike:
            x, _ = jax.lax.scan(lambda x, w: (stack.layer_of(0)(w, x), None), x, params["layers"])
        else:
            for l in range(stack.num_layers):
                x = stack.layer_of(l)(jax.tree.map(lambda a, l=l: a[l], params["layers"]), x)
        return stack.head(params["ends"], x, batch["targets"])

    def both(batch: Tree) -> tuple[jax.Array, jax.Array]:
        params = jax.tree.map(lambda a: _with_noise(a).astype(dtype), init(stack, 0))
        halves = jax.tree.map(lambda a: a[np.array(order)].reshape(2, number // 2, *a.shape[1:]), batch)
        whole, in_whole = losses(params, batch)
        sums, in_halves = jax.lax.map(lambda half: losses(params, half), halves)
        return whole / in_whole, sums.sum() / in_halves.sum()

    given = {name: np.asarray(batch[name]) for name in ("inputs", "targets")}
    options = cpu_options("once") if jax.default_backend() == "cpu" else None
    whole, halved = jax.jit(both).lower(given).compile(options)(given)
    return float(whole), float(halved)


def _with_noise(a: jax.Array) -> jax.Array:
    """Return initial parameters with waves added, so that none is zero."""
    size = jnp.sqrt(jnp.mean(jnp.square(a)))
    waves = jnp.sin(1.3 * jnp.arange(a.size, dtype=a.dtype) + 1).reshape(a.shape)
    return a + NOISE * jnp.where(size > 0, size, 1.0).astype(a.dtype) * waves
