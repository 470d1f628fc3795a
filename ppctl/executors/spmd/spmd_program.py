"""The spmd executor: a schedule as ONE XLA program, a scan over ticks.

All mesh axes are manual: parameters are gathered over fsdp explicitly, and gradients of a leaf are
reduced once a step over the axes that do not divide it. Program size does not depend on the number
of microbatches, and live activations are the slots of `schedule.tick_lowering`.

Tried and rejected: reducing a chunk's gradients between two scans, after its last microbatch. XLA's
scheduler for GPUs moves no collective over a loop: compiled for H100s both reductions came after
the second scan.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ppctl.executors.model_shapes import Model, shard_bytes, shard_shapes, tree_bytes
from ppctl.executors.outer_layers import computed
from ppctl.executors.parameter_layout import BATCH, Layout, scatter_sums
from ppctl.executors.spmd.device_program import Device
from ppctl.executors.spmd.tick_programs import TickBody
from ppctl.executors.work.rank_bytes import RankSizes
from ppctl.model.layer_inputs import LOSS
from ppctl.model.layer_reports import divided_by
from ppctl.model.stack import divisor, metric_means, number_of
from ppctl.model.trainable_parameters import trained_part
from ppctl.schedule.mesh_axes import AXES, DATA_AXES, RANK_AXES
from ppctl.schedule.tick_lowering import Ticks

Tree = Any


def spmd(model: Model, layout: Layout, ticks: Ticks) -> Callable[[Tree, Tree], tuple[Any, Tree]]:
    """Return the function (params, batch) -> (losses, gradients) that runs ticks on layout's mesh.

    params are in staged form (`Layout.to_staged`), arrays of batch in that of `in_microbatches`.
    Results are those of `reference`, with gradients in the parameters' layout and sharding. For a
    schedule of only forwards (`tick_lowering.forward_only`) the function returns (loss, number of
    losses in the mean).
    """
    assert ticks.remat is model.remat, "ticks are lowered for the remat of their program"
    assert ticks.schedule.rank_of == layout.placement.rank_of, "ticks are lowered for the layout"
    stack, num_ranks = model.stack, ticks.schedule.num_ranks

    def ring(value: jax.Array, step: int) -> jax.Array:
        """Return the value from the rank `step` places before this one, round the ring."""
        pairs = [(r, (r + step) % num_ranks) for r in range(num_ranks)]
        return jax.lax.ppermute(value, "pp", pairs)

    def loss_and_grads(params: Tree, batch: Tree) -> tuple[Any, Tree]:
        specs = layout.staged_specs(params)
        trained_specs = trained_part(specs, stack.options.trainable)

        def local(params: Tree, batch: Tree, *rank: jax.Array) -> tuple[Any, Tree]:
            def reduced(grads: Tree, specs: Tree) -> Tree:
                return {
                    "embed_head": scatter_sums(grads["embed_head"], specs["embed_head"], AXES),
                    "layers": scatter_sums(grads["layers"], specs["layers"], RANK_AXES),
                }

            # 1. the ticks of this device
            total = partial(jax.lax.psum, axis_name=DATA_AXES)
            device = Device(model, layout, ticks, params, specs, batch, *rank, total=total)
            losses, number, grads = device.results(*TickBody(device, ring).run(), reduced)
            # 2. the means over the batch
            loss, number = jax.lax.psum((losses.pop(LOSS), number), AXES)
            losses = {LOSS: loss} | jax.lax.psum(losses, "pp")
            if grads is None:
                return losses[LOSS] / divisor(number), number_of(number)
            mean = lambda a: a / divisor(number).astype(a.dtype)  # noqa: E731
            grads = divided_by(grads, divisor(number), stack.options.updates)
            return jax.tree.map(mean, losses) | metric_means(number), grads

        return jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=(specs, BATCH, P("pp"), P(None, "pp"), P(None, "pp")),
            out_specs=(P(), trained_specs if ticks.has_backward else P()),
            check_vma=False,
        )(params, batch, *_of_ranks(layout, ticks))

    return loss_and_grads


def spmd_of_rank(
    model: Model, layout: Layout, ticks: Ticks
) -> Callable[..., tuple[Tree, jax.Array, Tree]]:
    """Return the function (params, batch, *`rank_arrays`) -> results of one rank, run by itself.

    params: the rank's parameters in staged form [V, 1, K, ...], not divided over fsdp. Results:
    (sums of losses, their number, sums of gradients). In place of other ranks' values, the rank
    receives its previous outputs plus noise.
    """

    def alone(params: Tree, batch: Tree, *rank: jax.Array) -> tuple[Tree, jax.Array, Tree]:
        specs = jax.tree.map(lambda _: P(), params)
        device = Device(model, layout, ticks, params, specs, batch, *rank)
        # an idle tick's output is zeros, so without noise the rank would receive zeros
        noise = 0.01 * jax.random.normal(jax.random.key(0), device.x.shape, device.x.dtype)
        own = lambda value, _: jnp.clip(value + noise, -1, 1)  # noqa: E731
        return device.results(*TickBody(device, own).run(), lambda grads, _: grads)

    return alone


def rank_arrays(layout: Layout, ticks: Ticks, rank: int) -> tuple[jax.Array, ...]:
    """Return a rank's arrays: its ticks, number of layers by chunk and layer numbers."""
    table, counts, numbers = _of_ranks(layout, ticks)
    return table[rank : rank + 1], counts[:, rank : rank + 1], numbers[:, rank : rank + 1]


def _of_ranks(layout: Layout, ticks: Ticks) -> tuple[jax.Array, ...]:
    """Return (table [rank, tick, column], counts [chunk, rank], numbers [chunk, rank, slot])."""
    table, placement = np.asarray(ticks.table, np.int32).transpose(1, 0, 2), layout.placement
    return jnp.asarray(table), jnp.asarray(placement.counts), jnp.asarray(placement.numbers)


def spmd_sizes(model: Model, layout: Layout, staged: Tree, *, splits: bool) -> RankSizes:
    """Return the sizes of a device's arrays, from shapes.

    staged: shapes of the staged state, with shardings. splits: whether backwards are split.
    """
    # 1. copies of parameters, and sums of gradients
    num_layers, parts = layout.placement.num_slots, ("embed_head", "layers")
    held = layout.placement.num_chunks * num_layers
    embed_head, layer = (model.held[part] for part in parts)
    trained, trained_layer = (trained_part(model.held[p], model.stack.trains(p)) for p in parts)
    by_layer = model.layer_specs is not None
    at_once = min(2, num_layers) if by_layer else held
    weights = tree_bytes(computed((embed_head, *[layer] * at_once), model.dtype))
    if by_layer:
        weights += tree_bytes(computed(shard_shapes(staged["params"]["layers"]), model.dtype))
    # 2. slots: whole arrays if XLA divides the stage, else one device's
    stage, w = model.stage, [model.computed_layer] * num_layers
    stash = model.traced(lambda: tree_bytes(stage.programs.stash_shapes(w)))
    pending = model.traced(lambda: tree_bytes(stage.programs.pending_shapes(w))) if splits else 0
    return replace(
        state_sizes(model, staged),
        weights=weights,
        gradients=tree_bytes((trained, *[trained_layer] * held)),
        stash=stash,
        pending=pending,
        x=tree_bytes(model.x),
    )


def state_sizes(model: Model, staged: Tree) -> RankSizes:
    """Return the sizes of a device's state and batch, from shapes."""
    state = shard_bytes(staged["params"]), shard_bytes(staged["optimizer"])
    return RankSizes(*state, batch=tree_bytes(model.microbatch) * model.num_microbatches)
