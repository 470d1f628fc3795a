"""Bytes that one device's spmd program makes, from shapes, without state, batch and temporaries.

Sums of gradients and slots live through the whole loop. So do the layers that it reads: cut out of
the stacked parameters, gathered over fsdp, in the compute dtype. If the loop gathers layers, the
layers that are whole at the same time count, and their shards.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ppctl.executors.model_shapes import Model
from ppctl.executors.parameter_layout import Layout
from ppctl.executors.tree_bytes import shard_shapes, tree_bytes
from ppctl.model.trainable_parameters import trained_part
from ppctl.schedule.tick_lowering import Ticks

Tree = Any


def spmd_bytes(
    model: Model, layout: Layout, ticks: Ticks, gather: str, layers: Tree
) -> dict[str, int]:
    """Return the bytes on one device of "weights", "gradients", "activations" and "transfers".

    gather: as in `Options`; layers: all layers in staged form, sharded.
    """
    return model.traced(lambda: _bytes(model, layout, ticks, gather, layers))


def _bytes(model: Model, layout: Layout, ticks: Ticks, gather: str, layers: Tree) -> dict[str, int]:
    # 1. parameters and sums of gradients
    num_layers, parts = int(layout.counts.max()), ("embed_head", "layers")  # of a chunk, padded
    held = layout.num_chunks * num_layers
    embed_head, layer = (model.held[part] for part in parts)
    trained, trained_layer = (trained_part(model.held[p], model.stack.trains(p)) for p in parts)
    sums = tree_bytes((trained, *[trained_layer] * held))
    at_once = held if gather == "step" else min(2, num_layers)
    computed = tree_bytes(_in(model.dtype, (embed_head, *[layer] * at_once)))
    if gather == "layer":
        computed += tree_bytes(_in(model.dtype, shard_shapes(layers)))
    # 2. slots
    slots, x = ticks.num_slots, tree_bytes(model.x)
    with_pending = bool(slots.get("pending"))
    stash_bytes, pending_bytes = waiting_bytes(model, num_layers, with_pending=with_pending)
    kept = slots["stash"] * stash_bytes + slots.get("pending", 0) * pending_bytes
    arriving = sum(slots.get(kind, 0) for kind in ("act", "grad", "value")) * x
    return {"weights": computed, "gradients": sums, "activations": kept, "transfers": arriving}


def waiting_bytes(model: Model, num_layers: int, *, with_pending: bool) -> tuple[int, int]:
    """Return the bytes of a microbatch's stash and pending values of num_layers layers on a device.

    For layers that XLA divides (executor=mpmd) both count whole.
    """
    stage, w = model.stage, _in(model.dtype, [model.layer] * num_layers)
    pending = tree_bytes(stage.pending_shapes(w)) if with_pending else 0
    return tree_bytes(stage.stash_shapes(w)), pending


def _in(dtype: Any, tree: Tree) -> Tree:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.dtype(dtype)), tree)
