"""The reference executor: the un-pipelined model, gradients accumulated over microbatches in one program.

The oracle of every other executor. It shares no code with them: plain autodiff through the whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.model.stack import Stack, divisor
from ppctl.model.trainable import trained_part, with_trained
from ppctl.schedule.remat import Remat

Tree = Any


def reference(
    stack: Stack, *, num_microbatches: int, remat: Remat | str, unroll: int, dtype: Any, with_grads: bool = True
) -> Callable[[Tree, Tree], tuple[jax.Array, Tree]]:
    """Return the function (params, batch) -> (loss, gradients) of the un-pipelined model.

    params: parameters in natural order; batch: {"inputs", "targets"}, arrays [batch, ...].

    The loss is the mean over the batch. `dtype` is that of compute; gradients have the parameters', and are None for
    those that are frozen. remat: none | layer (each layer is recomputed in the backward) | full (the whole model is).
    Layers are unrolled up to `unroll` of them, and where they differ.
    Without with_grads the function returns (loss, number of losses that it is the mean of). ConfigError for another
    remat.
    """

    setting = Remat.of(remat)

    def layer(l: int) -> Callable[[Tree, jax.Array], jax.Array]:
        return jax.checkpoint(stack.layer_of(l)) if setting.keeps_layer_inputs else stack.layer_of(l)

    def loss_sum(params: Tree, microbatch: Tree) -> tuple[jax.Array, jax.Array]:
        params = jax.tree.map(lambda a: a.astype(dtype), params)
        x = _before_head(stack, params, microbatch["inputs"], layer, unroll)
        return stack.head(params["ends"], x, microbatch["targets"])

    if setting.keeps_input_only:
        loss_sum = jax.checkpoint(loss_sum)

    def loss_and_grads(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        microbatches = jax.tree.map(lambda a: a.reshape(num_microbatches, -1, *a.shape[1:]), batch)
        trained = trained_part(params, stack.trainable)
        of_trained = lambda trained, microbatch: loss_sum(with_trained(trained, params), microbatch)  # noqa: E731

        def add(sums: Tree, microbatch: Tree) -> tuple[Tree, None]:
            (loss, number), grads = jax.value_and_grad(of_trained, has_aux=True)(trained, microbatch)
            return jax.tree.map(jnp.add, sums, (loss, number, grads)), None

        first = jax.tree.map(lambda a: a[0], microbatches)
        loss, number = jax.eval_shape(loss_sum, params, first)
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (loss, number, trained))
        (loss, number, grads), _ = jax.lax.scan(add, zeros, microbatches)
        number = divisor(number)
        return loss / number, jax.tree.map(lambda g: g / number.astype(g.dtype), grads)

    def loss_only(params: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        loss, number = loss_sum(params, batch)
        return loss / divisor(number), number

    return loss_and_grads if with_grads else loss_only


def outputs_of(stack: Stack, *, unroll: int, dtype: Any) -> Callable[[Tree, jax.Array], Tree]:
    """Return the function (params, inputs) -> outputs of a model that states them; arguments as of `reference`."""
    outputs = stack.outputs
    assert outputs is not None, "a stack that states no outputs"

    def predict(params: Tree, inputs: jax.Array) -> Tree:
        params = jax.tree.map(lambda a: a.astype(dtype), params)
        return outputs(params["ends"], _before_head(stack, params, inputs, stack.layer_of, unroll))

    return predict


def _before_head(
    stack: Stack, params: Tree, inputs: jax.Array, layer: Callable[[int], Callable[[Tree, jax.Array], Any]], unroll: int
) -> jax.Array:
    """Return x behind the last layer."""
    x = stack.embed(params["ends"], inputs)
    if stack.num_layers <= unroll or not stack.are_alike:
        functions = [stack.layer_of(l) for l in range(stack.num_layers)]
        traced_once = {id(f): jax.jit(layer(l)) for l, f in enumerate(functions) if functions.count(f) > 1}
        for l, function in enumerate(functions):
            run = layer(l) if stack.are_alike else traced_once.get(id(function), layer(l))
            x = run(jax.tree.map(lambda a, l=l: a[l], params["layers"]), x)
        return x
    return jax.lax.scan(lambda x, w: (layer(0)(w, x), None), x, params["layers"])[0]
