"""Check that a model computes each example by itself, as training by microbatches requires.

The loss of a few examples is compared with that of the same examples in another order and in two
halves. These losses differ if the model has batch norm, masks or noise drawn by the shape of a
batch, losses between examples, or means in place of sums.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ppctl.errors import ConfigError, setting
from ppctl.executors.compiler_options import compiled_quickly
from ppctl.executors.reference import reference
from ppctl.executors.stage.jaxpr_flops import inner_jaxprs
from ppctl.model.stack import Stack, init, num_examples, shapes_like
from ppctl.training.pipeline.user_code import call_user_code

Tree = Any
Batch = Mapping[str, np.ndarray]
NUM_TRIED = 4  # examples in the check
NEW_PLACES = (1, 2, 3, 0)  # new order: no example keeps its place in its half
MOST_BYTES = 2**30  # bytes of parameters: larger models are not checked, as one device holds all
# size of the noise relative to the parameters: a head of zeros would hide the layers before it
NOISE = 0.05
TOLERANCE = {"float64": 1e-8, "float32": 1e-4, "bfloat16": 5e-3}  # relative rounding of the loss


def refuse_mixing(name: str, stack: Stack, batch: Batch, dtype: jnp.dtype) -> str | None:
    """Raise ConfigError if a model mixes examples; return a note if it could not be checked.

    name: the model's name in messages. batch: an even number of examples, at most NUM_TRIED. dtype:
    the compute dtype.
    """
    losses, rounded = partial(_mean_losses, stack, batch, dtype), rounded_dtype(stack, batch, dtype)
    whole, halved = call_user_code(name, "its loss of a few examples", losses)
    if not (math.isfinite(whole) and math.isfinite(halved)):
        return f"{name} was not checked for mixing examples: their loss is {whole:g}."
    if abs(whole - halved) <= TOLERANCE[str(rounded)] * max(abs(whole), abs(halved)):
        return None
    number, argument = num_examples(batch["inputs"]), "mixes_examples=True of the Network"
    meant = setting("model.mixes_examples", "true", f"{argument} or StackOptions")
    raise ConfigError(
        f"{name} mixes the examples of a batch: the mean loss of {number} examples is "
        f"{whole:.7g}, but {halved:.7g} in two microbatches and another order, so microbatches "
        "would train another function. Let it compute each example by itself (layer norm in place "
        "of batch norm, no masks or noise by the shape of a batch) and return the sum and the "
        f"number of losses, or use {meant} if mixing is intended."
    )


def rounded_dtype(stack: Stack, batch: Batch, dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype that limits the precision of a loss in `dtype`.

    For a Flax module it is the narrowest dtype in TOLERANCE that the module casts to: attention of
    Flax computes scores in float32. For other models it is `dtype`.
    """
    if stack.options.author_model is None:
        return dtype
    shapes = shapes_like({name: batch[name] for name in ("inputs", "targets")})
    of_batch = reference(stack, num_microbatches=1, remat="none", dtype=dtype, with_grads=False)
    program = jax.make_jaxpr(of_batch)(stack.param_shapes, shapes)
    return min((dtype, *_casts(program.jaxpr)), key=lambda each: jnp.finfo(each).bits)


def _casts(jaxpr: core.Jaxpr) -> Iterator[jnp.dtype]:
    """Yield the dtypes in TOLERANCE that a program casts wider floating values to."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "convert_element_type":
            found: Any = equation.invars[0].aval
            made = equation.params["new_dtype"]
            if jnp.issubdtype(found.dtype, jnp.floating) and str(made) in TOLERANCE:
                yield made
        for inner in inner_jaxprs(equation):
            yield from _casts(inner)


def few_examples(batch: Mapping[str, Any], shapes: Mapping[str, Tree]) -> dict[str, np.ndarray]:
    """Return the first examples of a batch; made-up ones if it has shapes or remote arrays."""
    number = min(NUM_TRIED, num_examples(shapes["inputs"]) // 2 * 2)
    shapes, batch = dict(shapes), {name: batch[name] for name in shapes}
    arrays = jax.tree.leaves(batch)
    if all(isinstance(a, np.ndarray) or getattr(a, "is_fully_addressable", False) for a in arrays):
        return jax.tree.map(lambda a, shape: np.asarray(a[:number], shape.dtype), batch, shapes)

    def made_up(a: jax.ShapeDtypeStruct) -> np.ndarray:  # a sine wave; of integers 0 and 1: ids
        places = np.arange(number * math.prod(a.shape[1:])).reshape(number, *a.shape[1:])
        is_floating = jnp.issubdtype(a.dtype, jnp.floating)
        return (np.sin(1.7 * places) if is_floating else places * places // 3 % 2).astype(a.dtype)

    return jax.tree.map(made_up, shapes)


def _mean_losses(stack: Stack, batch: Batch, dtype: jnp.dtype) -> tuple[float, float]:
    """Return the mean loss of a batch as a whole, and in two halves in another order."""
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
    whole, halved = compiled_quickly(both)(given)
    return float(whole), float(halved)


def _with_noise(a: jax.Array) -> jax.Array:
    """Return initial parameters plus a sine wave, so that no array is zero."""
    size = jnp.sqrt(jnp.mean(jnp.square(a)))
    waves = jnp.sin(1.3 * jnp.arange(a.size, dtype=a.dtype) + 1).reshape(a.shape)
    return a + NOISE * jnp.where(size > 0, size, 1.0).astype(a.dtype) * waves
