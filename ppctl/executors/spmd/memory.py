"""Bytes that one device's spmd program makes and holds, from shapes: without state, batch and compiler temporaries.

Sums of gradients and slots live through the whole loop, and so do the layers that it reads: cut out of the stacked
parameters, gathered over fsdp, in the dtype of compute. Where layers are gathered inside the loop, those that are whole
at the same time count, and what they are gathered from.
"""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.executors.layout import Layout
from ppctl.executors.mpmd.tasks import Model
from ppctl.model.trainable import trained_part
from ppctl.schedule.ticks import Ticks

Tree = Any


def spmd_bytes(model: Model, layout: Layout, ticks: Ticks, gather: str, layers: Tree) -> dict[str, int]:
    """Return the bytes of each part on one device: "weights", "gradients", "activations", "transfers".

    gather: as `Options` have it; layers: all layers in staged form, sharded.
    """
    return model.traced(lambda: _bytes(model, layout, ticks, gather, layers))


def _bytes(model: Model, layout: Layout, ticks: Ticks, gather: str, layers: Tree) -> dict[str, int]:
    num_layers = int(layout.counts.max())  # of a chunk, padded
    held, layer, ends = layout.num_chunks * num_layers, model.held["layers"], model.held["ends"]
    trained_ends, trained_layer = (
        trained_part(model.held[part], model.stack.trains(part)) for part in ("ends", "layers")
    )
    sums = tree_bytes((trained_ends, *[trained_layer] * held))
    # of a tick those of a chunk, as they are gathered and as they are cut out
    at_once = {"step": held, "tick": min(held, 2 * num_layers), "layer": min(2, num_layers)}[gather]
    computed = tree_bytes(_in(model.dtype, (ends, *[layer] * at_once)))
    if gather == "layer":
        computed += tree_bytes(_in(model.dtype, shard_shapes(layers)))
    slots, x = ticks.num_slots, tree_bytes(model.x)
    stash_bytes, pending_bytes = waiting_bytes(model, num_layers, with_pending=bool(slots.get("pending")))
    kept = slots["stash"] * stash_bytes + slots.get("pending", 0) * pending_bytes
    arriving = sum(slots.get(kind, 0) for kind in ("act", "grad", "value")) * x
    return {"weights": computed, "gradients": sums, "activations": kept, "transfers": arriving}


def waiting_bytes(model: Model, num_layers: int, *, with_pending: bool) -> tuple[int, int]:
    """Return the bytes on one device of a microbatch's stash and of what I hands to W, for so many layers."""
    stage, w = model.stage, _in(model.dtype, [model.layer] * num_layers)
    if model.divided is None:
        return tree_bytes(stage.stash_shapes(w)), tree_bytes(stage.pending_shapes(w)) if with_pending else 0

    def of_layer(what: str) -> int:
        """Bytes of one layer, or as those that differ wait packed."""
        if len(stage.layers) > 1:
            packing = getattr(stage.packings, what)
            shapes, dims = packing.shapes, packing.dims
        else:
            shapes, dims = getattr(stage.layers[0], what), getattr(stage.layers[0], f"{what}_dims")
        sizes = (1 if dim is None else model.axes.tp for dim in dims)
        return sum(tree_bytes(a) // size for a, size in zip(shapes, sizes, strict=True))

    keeps = model.remat.keeps_residuals
    stash = num_layers * of_layer("saved") if keeps else tree_bytes(stage.stash_shapes(w))
    return stash, num_layers * of_layer("pending") if with_pending else 0


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
