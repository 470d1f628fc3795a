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
from ppctl.schedule.ticks import Ticks

Tree = Any


def spmd_bytes(model: Model, layout: Layout, ticks: Ticks, gather: str, layers: Tree) -> dict[str, int]:
    """Return the bytes of each part on one device: "weights", "gradients", "activations", "transfers".

    gather: as `Options` have it; layers: all layers in staged form, sharded.
    """
    return model.traced(lambda: _bytes(model, layout, ticks, gather, layers))


def _bytes(model: Model, layout: Layout, ticks: Ticks, gather: str, layers: Tree) -> dict[str, int]:
    num_layers = int(layout.counts.max())  # of a chunk, padded
    held = layout.num_chunks * num_layers
    whole = tree_bytes((model.ends, *[model.layer] * held))
    # of a tick those of a chunk, as they are gathered and as they are cut out
    at_once = {"step": held, "tick": min(held, 2 * num_layers), "layer": min(2, num_layers)}[gather]
    computed = tree_bytes(_in(model.dtype, (model.ends, *[model.layer] * at_once)))
    if gather == "layer":
        computed += tree_bytes(_in(model.dtype, shard_shapes(layers)))
    slots, x = ticks.num_slots, tree_bytes(model.x)
    stage, w = model.stage, _in(model.dtype, [model.layer] * num_layers)
    kept = slots["stash"] * tree_bytes(stage.stash_shapes(w))
    if slots.get("pending"):
        kept += slots["pending"] * tree_bytes(stage.pending_shapes(w))
    arriving = sum(slots.get(kind, 0) for kind in ("act", "grad", "value")) * x
    return {"weights": computed, "gradients": whole, "activations": kept, "transfers": arriving}


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
