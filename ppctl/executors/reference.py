"""The reference executor: the un-pipelined model, microbatches accumulated in one program.

The oracle of every other executor, by plain autodiff through the whole model. It shares no code
with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.model.stack import Stack, divisor
from ppctl.model.trainable_parameters import trained_part, with_trained
from ppctl.schedule.remat import Remat

Tree = Any
MOST_UNROLLED = 16  # layers in the program; more are scanned


def reference(
    stack: Stack,
    *,
    num_microbatches: int,
    remat: Remat | str,
    dtype: Any,
    unroll: int = MOST_UNROLLED,
    with_grads: bool = True,
) -> Callable[[Tree, Tree], tuple[jax.Array, Tree]]:
    """Return the function (params, batch) -> (loss, gradients) of the un-pipelined model.

    params: parameters in natural order; batch: {"inputs", "targets"}, arrays [batch, ...].

    The loss is the mean over the batch. `dtype` is that of compute; gradients have the parameters',
    and are None for frozen ones. remat: none | layer (the backward recomputes each layer) | full
    (the whole model). Up to `unroll` layers are unrolled, and layers that differ.
    Without with_grads the function returns (loss, number of losses in the mean).
    ConfigError for another remat.
    """
    # 1. the loss of a microbatch
    setting = Remat.of(remat)

    def layer(l: int) -> Callable[[Tree, jax.Array], jax.Array]:
        run = stack.layer_of(l)
        return jax.checkpoint(run) if setting.keeps_layer_inputs else run

    def loss_sum(params: Tree, microbatch: Tree) -> tuple[jax.Array, jax.Array]:
        params = jax.tree.map(lambda a: a.astype(dtype), params)
        x = _before_head(stack, params, microbatch["inputs"], layer, unroll)
        return stack.head(params["embed_head"], x, microbatch["targets"])

    if setting.keeps_input_only:
        loss_sum = jax.checkpoint(loss_sum)
    # 2. summed over microbatches with gradients, or alone
    if with_grads:
        return _accumulated(stack, loss_sum, num_microbatches)

    def loss_only(params: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        loss, number = loss_sum(params, batch)
        return loss / divisor(number), number

    return loss_only


def _accumulated(
    stack: Stack, loss_sum: Callable, num_microbatches: int
) -> Callable[[Tree, Tree], tuple[jax.Array, Tree]]:
    """Return the mean loss and its gradients, summed over microbatches by autodiff of loss_sum."""

    def loss_and_grads(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        microbatches = jax.tree.map(lambda a: a.reshape(num_microbatches, -1, *a.shape[1:]), batch)
        trained = trained_part(params, stack.trainable)
        of_trained = lambda trained, microbatch: loss_sum(with_trained(trained, params), microbatch)  # noqa: E731
        grad = jax.value_and_grad(of_trained, has_aux=True)

        def add(sums: Tree, microbatch: Tree) -> tuple[Tree, None]:
            (loss, number), grads = grad(trained, microbatch)
            return jax.tree.map(jnp.add, sums, (loss, number, grads)), None

        first = jax.tree.map(lambda a: a[0], microbatches)
        loss, number = jax.eval_shape(loss_sum, params, first)
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (loss, number, trained))
        (loss, number, grads), _ = jax.lax.scan(add, zeros, microbatches)
        number = divisor(number)
        return loss / number, jax.tree.map(lambda g: g / number.astype(g.dtype), grads)

    return loss_and_grads


def outputs_of(
    stack: Stack, *, dtype: Any, unroll: int = MOST_UNROLLED
) -> Callable[[Tree, jax.Array], Tree]:
    """Return the function (params, inputs) -> stack.outputs; arguments as in `reference`."""
    outputs = stack.outputs
    assert outputs is not None, "a stack that states no outputs"

    def predict(params: Tree, inputs: jax.Array) -> Tree:
        params = jax.tree.map(lambda a: a.astype(dtype), params)
        x = _before_head(stack, params, inputs, stack.layer_of, unroll)
        return outputs(params["embed_head"], x)

    return predict


def _before_head(
    stack: Stack,
    params: Tree,
    inputs: jax.Array,
    layer: Callable[[int], Callable[[Tree, jax.Array], Any]],
    unroll: int,
) -> jax.Array:
    """Return x after the last layer."""
    x = stack.embed(params["embed_head"], inputs)
    if stack.num_layers <= unroll or not stack.are_alike:
        functions = [stack.layer_of(l) for l in range(stack.num_layers)]
        repeated = ((l, f) for l, f in enumerate(functions) if functions.count(f) > 1)
        traced_once = {id(f): jax.jit(layer(l)) for l, f in repeated}
        for l, function in enumerate(functions):
            run = layer(l) if stack.are_alike else traced_once.get(id(function), layer(l))
            x = run(jax.tree.map(lambda a, l=l: a[l], params["layers"]), x)
        return x
    return jax.lax.scan(lambda x, w: (layer(0)(w, x), None), x, params["layers"])[0]
