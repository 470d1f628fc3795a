"""Bytes that one device's spmd program makes and holds, from shapes: without state, batch and compiler temporaries.

Sums of gradients and slots live through the whole loop, and so do the layers that it reads: cut out of the stacked
parameters, gathered over fsdp, in the dtype of compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.executors.auto_axes import dim_of, is_spec
from ppctl.executors.layout import Layout
from ppctl.executors.mpmd.tasks import Model
from ppctl.executors.stage.divided_dims import divided_dims
from ppctl.schedule.ticks import Ticks

Tree = Any


def spmd_bytes(model: Model, layout: Layout, ticks: Ticks) -> dict[str, int]:
    """Return the bytes of each part on one device: "weights", "gradients", "activations", "transfers"."""
    return model.traced(lambda: _bytes(model, layout, ticks))


def _bytes(model: Model, layout: Layout, ticks: Ticks) -> dict[str, int]:
    num_layers = int(layout.counts.max())  # of a chunk, padded
    held = model.held["ends"], *[model.held["layers"]] * (layout.num_chunks * num_layers)
    whole, computed = tree_bytes(held), tree_bytes(_in(model.dtype, held))
    slots, x = ticks.num_slots, tree_bytes(model.x)
    stash_bytes, pending_bytes = _waiting(model, num_layers, with_pending=bool(slots.get("pending")))
    kept = slots["stash"] * stash_bytes + slots.get("pending", 0) * pending_bytes
    arriving = sum(slots.get(kind, 0) for kind in ("act", "grad", "value")) * x
    return {"weights": computed, "gradients": whole, "activations": kept, "transfers": arriving}


def _waiting(model: Model, num_layers: int, *, with_pending: bool) -> tuple[int, int]:
    """Return the bytes on one device of a microbatch's stash, and of what I hands to W, of a stage of so many layers.

    Where XLA divides, layers that differ wait packed in one array, which is whole on every device.
    """
    stage, w = model.stage, _in(model.dtype, [model.layer] * num_layers)
    if not (model.auto and model.stack.are_alike):
        return tree_bytes(stage.stash_shapes(w)), tree_bytes(stage.pending_shapes(w)) if with_pending else 0
    of_layer = [dim_of(spec) for spec in jax.tree.leaves(model.auto_specs["layers"], is_leaf=is_spec)]
    of_w = of_layer * num_layers
    stash, dims, stash_bytes = _divided(model, lambda w, x: stage.forward(w, None, x)[1], (w, model.x), [*of_w, None])
    if not with_pending:
        return stash_bytes, 0
    pending = lambda w, stash, gy: stage.input_grad(w, None, stash, lambda _: (gy, None))[1]  # noqa: E731
    return stash_bytes, _divided(model, pending, (w, stash, model.x), [*of_w, *dims, None])[2]


def _divided(
    model: Model, function: Callable[..., Tree], args: tuple, dims: Sequence[int | None]
) -> tuple[Tree, list[int | None], int]:
    """Return (shapes of function(*args), the dim of each leaf that XLA divides, bytes on one device)."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    found, tp = divided_dims(closed.jaxpr, dims), model.axes.tp
    leaves = jax.tree.leaves(shapes)
    is_divided = [dim is not None and a.shape[dim] % tp == 0 for a, dim in zip(leaves, found, strict=True)]
    sizes = (tree_bytes(a) // (tp if each else 1) for a, each in zip(leaves, is_divided, strict=True))
    return shapes, found, sum(sizes)


def tree_bytes(tree: Tree) -> int:
    """Return the bytes of a tree of arrays or shapes, whole."""
    return sum(prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def shard_bytes(tree: Tree) -> int:
    """Return the bytes of a tree of sharded arrays or shapes on one device."""
    return sum(prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def shard_shapes(tree: Tree) -> Tree:
    """Return the shapes of one device's share of a tree of sharded arrays or shapes."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.sharding.shard_shape(a.shape), a.dtype), tree)


def _in(dtype: Any, tree: Tree) -> Tree:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.dtype(dtype)), tree)
