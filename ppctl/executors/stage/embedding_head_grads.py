"""Gradients of the embedding and of the head, as every executor but the reference takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ppctl.executors.stage.jaxpr_tools import add_last_outputs, flatten
from ppctl.model.trainable_parameters import trained_part, with_trained

Tree = Any


def add_embedding_grad(
    embed: Callable[[Tree, jax.Array], jax.Array],
    embed_head: Tree,
    inputs: jax.Array,
    gx: jax.Array,
    total: Tree,
    trainable: Tree = True,
) -> Tree:
    """Return `total` with the gradient of `embed_head` added, from that of x = embed(...).

    The gradient of an embedding table goes into the sum row by row: see `add_outputs`.
    trainable: as in `Stack`; sums of frozen parameters are None.
    """
    if not jax.tree.leaves(total):
        return total

    def grad(embed_head: Tree, inputs: jax.Array, gx: jax.Array) -> Tree:
        run = lambda trained: embed(with_trained(trained, embed_head), inputs)  # noqa: E731
        return jax.vjp(run, trained_part(embed_head, trainable))[1](gx)[0]

    program = flatten(jax.make_jaxpr(grad)(embed_head, inputs, gx))
    return add_last_outputs(program, (embed_head, inputs, gx), (), total)[1]


def add_head_grads(
    head: Callable[[Tree, jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
    embed_head: Tree,
    y: jax.Array,
    targets: jax.Array,
    total: Tree,
    trainable: Tree = True,
) -> tuple[jax.Array, Tree, jax.Array, jax.Array]:
    """Return (gradient of y, `total` with that of `embed_head` added, sum of losses, their number).

    The losses are those of head(embed_head, y, targets). The gradient of the head's matrix goes
    into the sum product by product: see `add_outputs`. trainable: as in `Stack`.
    """

    def grads(embed_head: Tree, y: jax.Array, targets: jax.Array) -> tuple[Any, Tree]:
        run = lambda trained, y: head(with_trained(trained, embed_head), y, targets)  # noqa: E731
        loss, pull, number = jax.vjp(run, trained_part(embed_head, trainable), y, has_aux=True)
        embed_head_grad, y_grad = pull(np.ones(loss.shape, loss.dtype))  # a constant of the trace
        return (y_grad, loss, number), embed_head_grad

    closed, (own, _) = jax.make_jaxpr(grads, return_shape=True)(embed_head, y, targets)
    args = embed_head, y, targets
    (y_grad, loss, number), total = add_last_outputs(flatten(closed), args, own, total)
    return y_grad, total, loss, number
