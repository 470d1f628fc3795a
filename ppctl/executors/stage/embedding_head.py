"""Gradients of the embedding and of the head, as every executor but the reference takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ppctl.executors.stage.jaxprs import add_last_outputs, flatten
from ppctl.model.trainable import trained_part, with_trained

Tree = Any


def add_embedding_grad(
    embed: Callable[[Tree, jax.Array], jax.Array],
    ends: Tree,
    inputs: jax.Array,
    gx: jax.Array,
    total: Tree,
    trainable: Tree = True,
) -> Tree:
    """Return `total` with the gradient of `ends` in x = embed(ends, inputs) added, from that of x.

    The gradient of a table of embeddings goes into the sum row by row: see `add_outputs`. trainable: which of `ends`
    have gradients, as of a `Stack`; sums of all others are None.
    """
    if not jax.tree.leaves(total):
        return total

    def grad(ends: Tree, inputs: jax.Array, gx: jax.Array) -> Tree:
        run = lambda trained: embed(with_trained(trained, ends), inputs)  # noqa: E731
        return jax.vjp(run, trained_part(ends, trainable))[1](gx)[0]

    program = flatten(jax.make_jaxpr(grad)(ends, inputs, gx))
    return add_last_outputs(program, (ends, inputs, gx), (), total)[1]


def add_head_grads(
    head: Callable[[Tree, jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
    ends: Tree,
    y: jax.Array,
    targets: jax.Array,
    total: Tree,
    trainable: Tree = True,
) -> tuple[jax.Array, Tree, jax.Array, jax.Array]:
    """Return (gradient of y, `total` with that of `ends` added, sum of losses, their number) of head(ends, y, targets).

    The gradient of the head's matrix goes into the sum product by product: see `add_outputs`. trainable: which of
    `ends` have gradients, as of a `Stack`; sums of all others are None.
    """

    def grads(ends: Tree, y: jax.Array, targets: jax.Array) -> tuple[Any, Tree]:
        run = lambda trained, y: head(with_trained(trained, ends), y, targets)  # noqa: E731
        loss, pull, number = jax.vjp(run, trained_part(ends, trainable), y, has_aux=True)
        ends_grad, y_grad = pull(np.ones(loss.shape, loss.dtype))  # known when it is traced
        return (y_grad, loss, number), ends_grad

    closed, (own, _) = jax.make_jaxpr(grads, return_shape=True)(ends, y, targets)
    (y_grad, loss, number), total = add_last_outputs(flatten(closed), (ends, y, targets), own, total)
    return y_grad, total, loss, number
