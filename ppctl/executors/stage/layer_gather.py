"""Sharded layers, each gathered one layer ahead of its use, so that the gather overlaps compute.

At most two layers are whole at the same time. For unrolled layers a barrier delays the gather of
layer k + 1 until layer k has arrived and layer k - 1 is done. Otherwise compilers merge gathers of
several layers, or gathers of forward and backward. For scanned layers the loop carries the next
layer, and the barrier keeps compilers from gathering the layer after it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any
Gather = Callable[[Tree], Tree]  # from a layer's shards to the layer


def fold_gathered(
    body: Callable,
    carry: Tree,
    w: Any,
    others: Sequence[Any],
    gather: Gather,
    *,
    reverse: bool = False,
    first: Tree = None,
) -> tuple[Tree, Any, Tree]:
    """Return (last carry, per-layer results, last layer) of the body over gathered layers.

    carry, y = body(carry, (number, gathered layer, *others)). w: the shards of layers, a list or
    stacked; others and results have the same form. first: the first layer to run, if already
    gathered. The last layer is returned gathered: it is the `first` of a fold in reverse.
    """
    if not isinstance(w, list):
        return _scanned(body, carry, w, others, gather, reverse, first)
    # 1. the first layer
    order = list(range(len(w)))[:: -1 if reverse else 1]
    results: list[Any] = [None] * len(w)
    whole = gather(w[order[0]]) if first is None else first
    for k, following, before in zip(order, [*order[1:], None], [None, *order[:-1]], strict=True):
        # 2. gather the next layer, once this layer has arrived and the layer before is done
        ahead = whole
        if following is not None:
            done = carry if carry is not None or before is None else results[before]
            shards, whole, done = jax.lax.optimization_barrier((w[following], whole, done))
            ahead = gather(shards)
            if carry is not None:
                carry = done
            elif before is not None:
                results[before] = done
        # 3. run this layer
        carry, results[k] = body(carry, (k, whole, *(other[k] for other in others)))
        whole = ahead
    return carry, results, whole


def _scanned(
    body: Callable,
    carry: Tree,
    w: Tree,
    others: Sequence[Any],
    gather: Gather,
    reverse: bool,
    first: Tree,
) -> tuple[Tree, Any, Tree]:
    """Return `fold_gathered` of stacked layers.

    The last iteration has no next layer: it gathers the same layer again, for the third result.
    """
    num_layers = jax.tree.leaves(w)[0].shape[0]
    take = lambda a, k: jax.lax.dynamic_index_in_dim(a, k, keepdims=False)  # noqa: E731
    shards_of = lambda k: jax.tree.map(lambda a: take(a, k), w)  # noqa: E731
    step = -1 if reverse else 1

    def turn(state: tuple[Tree, Tree], item: tuple) -> tuple[tuple[Tree, Tree], Any]:
        carry, whole = state
        shards = shards_of(jnp.clip(item[0] + step, 0, num_layers - 1))
        shards, whole, carry = jax.lax.optimization_barrier((shards, whole, carry))
        ahead = gather(shards)
        carry, result = body(carry, (item[0], whole, *item[1:]))
        return (carry, ahead), result

    whole = gather(shards_of(num_layers - 1 if reverse else 0)) if first is None else first
    xs = jnp.arange(num_layers), *others
    (carry, whole), results = jax.lax.scan(turn, (carry, whole), xs, reverse=reverse)
    return carry, results, whole
