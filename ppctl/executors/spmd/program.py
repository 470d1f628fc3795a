"""The spmd executor: a schedule as ONE XLA program, a scan over ticks with at most one ring permute each way a tick.

All mesh axes are manual: parameters are gathered over fsdp explicitly, gradients are summed on each device over all
microbatches and reduced over dp and fsdp once a step. A rank without a task in a tick skips it. Program size does not
depend on the number of microbatches; live activations are the slots of `schedule.ticks`, whatever their number.

Tried and rejected: to reduce a chunk's gradients between two scans, as soon as its last microbatch is done. XLA's
scheduler for GPUs moves no collective over a loop: compiled for H100s both reductions came after the second scan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ppctl.errors import ConfigError
from ppctl.executors.auto_axes import dim_of, is_spec, shifted
from ppctl.executors.layout import Layout, scatter_sums
from ppctl.executors.mesh import AXES, DATA_AXES, RANK_AXES
from ppctl.executors.spmd.body import Device, Options
from ppctl.executors.spmd.fb_ticks import run_fb_ticks
from ppctl.executors.spmd.op_ticks import run_op_ticks
from ppctl.executors.stage.layers import DividedWeights
from ppctl.executors.stage.stage import LayerSlots
from ppctl.model.stack import Stack, divisor
from ppctl.model.trainable import trained_part
from ppctl.schedule.ticks import Ticks

Tree = Any


def spmd(
    stack: Stack, layout: Layout, ticks: Ticks, options: Options
) -> Callable[[Tree, Tree], tuple[jax.Array, Tree]]:
    """Return the function (params, batch) -> (loss, gradients) that runs these ticks on the layout's mesh.

    params: parameters in staged form (`Layout.to_staged`). batch: {"inputs", "targets"}, global arrays [batch, ...].
    The loss is the mean over the batch; gradients have the parameters' layout, sharding and dtype, and are None for
    those that are frozen. With ticks of forwards alone (`schedule.ticks.forward_only`) the function returns (loss,
    number of losses that it is the mean of).

    ConfigError, before anything is traced, where the ticks were lowered for another remat than the options have, or
    for another placement than the layout's, and for options that the program of these ticks does not have.
    """
    _check_options(layout, ticks, options)

    def loss_and_grads(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        specs = layout.staged_specs(params)
        grad_specs, own_specs = trained_part(specs, stack.trainable), layout.manual_specs(specs)
        axes, rank_axes = layout.manual(AXES), layout.manual(RANK_AXES)

        def local(params: Tree, batch: Tree, *rank: jax.Array) -> tuple[jax.Array, Tree]:
            def reduced(grads: Tree, specs: Tree) -> Tree:
                return {
                    "ends": scatter_sums(grads["ends"], specs["ends"], axes),
                    "layers": scatter_sums(grads["layers"], specs["layers"], rank_axes),
                }

            results = _results(Device, stack, layout, ticks, options, params, specs, batch, *rank, reduced=reduced)
            loss, number, grads = results
            loss, number = jax.lax.psum((loss, number), axes)
            mean = loss / divisor(number)
            if grads is None:
                return mean, number
            number = divisor(number)
            return mean, jax.tree.map(lambda g: g / number.astype(g.dtype), grads)

        return jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=(own_specs, P(DATA_AXES), P("pp"), P(None, "pp"), P(None, "pp")),
            out_specs=(P(), layout.manual_specs(grad_specs) if ticks.has_backward else P()),
            axis_names=set(AXES) - set(layout.auto),
            check_vma=False,
        )(params, batch, *_of_ranks(layout, ticks))

    return loss_and_grads


def spmd_of_rank(
    stack: Stack, layout: Layout, ticks: Ticks, options: Options
) -> Callable[..., tuple[jax.Array, jax.Array, Tree]]:
    """Return what a device of one rank does in these ticks, run alone: (params, batch, *of the rank) -> results.

    params: the rank's, in staged form [V, 1, K, ...] and whole, whatever fsdp. batch: the device's own. of the rank:
    what `rank_arrays` gives. Results: sum of losses, their number, sums of gradients. Nothing is sent: what a rank
    hands on is what arrives, nearly.
    """

    def alone(params: Tree, batch: Tree, *rank: jax.Array) -> tuple[jax.Array, jax.Array, Tree]:
        specs = jax.tree.map(lambda _: P(), params)
        return _results(_Alone, stack, layout, ticks, options, params, specs, batch, *rank)

    return alone


def rank_arrays(layout: Layout, ticks: Ticks, rank: int) -> tuple[jax.Array, ...]:
    """Return what tells a rank from the others: its ticks, its layers of each chunk and their numbers."""
    table, counts, numbers = _of_ranks(layout, ticks)
    return table[rank : rank + 1], counts[:, rank : rank + 1], numbers[:, rank : rank + 1]


def _of_ranks(layout: Layout, ticks: Ticks) -> tuple[jax.Array, ...]:
    """Return (table [rank, tick, column], layers [chunk, rank], numbers of layers [chunk, rank, layer slot])."""
    table = np.asarray(ticks.table, np.int32).transpose(1, 0, 2)
    return jnp.asarray(table), jnp.asarray(layout.counts), jnp.asarray(layout.numbers)


class _Alone(Device):
    """A device whose neighbours are not there."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.noise = 0.01 * jax.random.normal(jax.random.key(0), self.x.shape, self.x.dtype)

    def hop(self, value: jax.Array, step: int) -> jax.Array:
        """Return the value with noise: what arrives is finite, and not zero where this rank was idle."""
        return jnp.clip(value + self.noise, -1, 1)


def _results(
    kind: type[Device],
    stack: Stack,
    layout: Layout,
    ticks: Ticks,
    options: Options,
    params: Tree,
    specs: Tree,
    batch: Tree,
    table: jax.Array,
    counts: jax.Array,
    numbers: jax.Array,
    *,
    reduced: Callable[[Tree, Tree], Tree] = lambda grads, _: grads,
) -> tuple[jax.Array, jax.Array, Tree]:
    """Return what a device of one rank has after all ticks: (sum of losses, their number, sums of gradients).

    reduced: makes the sums of all replicas of such a device's gradients and their specs.
    """
    microbatches = jax.tree.map(lambda a: a.reshape(ticks.schedule.num_microbatches, -1, *a.shape[1:]), batch)
    layer_slots = [_layer_slots(stack, layout, v, counts[v, 0], numbers[v, 0]) for v in range(layout.num_chunks)]
    divided = None
    if layout.auto:
        of_layers = jax.tree.leaves(specs["layers"], is_leaf=is_spec)
        dims = tuple(shifted(dim_of(spec), -len(layout.numbers.shape)) for spec in of_layers)
        divided = DividedWeights(dims, layout.mesh.shape["tp"])
    device = kind(stack, ticks, options, params, specs, microbatches, layer_slots, divided)
    run = run_fb_ticks if ticks.program == "fb" else run_op_ticks
    return device.results(run(device, table[0]), reduced, layout.mesh.shape["fsdp"] > 1)


def _check_options(layout: Layout, ticks: Ticks, options: Options) -> None:
    """Raise ConfigError where ticks do not fit the layout or the options."""
    if ticks.remat is not options.remat:
        raise ConfigError(
            f"the ticks were lowered for remat={ticks.remat}, but options.remat={options.remat}. Lower the schedule "
            f'with ticks(schedule, costs, remat="{options.remat}"), or use Options(remat="{ticks.remat}").'
        )
    if ticks.schedule.rank_of != layout.rank_of:
        raise ConfigError(
            f"the ticks were lowered for stages on ranks {_ranks_text(ticks.schedule.rank_of)}, but the layout puts "
            f"them on ranks {_ranks_text(layout.rank_of)}. Use Layout(mesh, partition, schedule.rank_of) of the "
            f"schedule that was lowered, {ticks.schedule.name}."
        )
    if ticks.program == "op" and not options.skip_idle:
        raise ConfigError(
            f"executor.idle=compute masks what idle ranks compute in ticks of an F, then a B; {ticks.schedule.name} "
            "runs in ticks of one task of any kind. Use executor.idle=skip, or schedule=interleaved."
        )


def _ranks_text(rank_of: tuple[int, ...]) -> str:
    return " ".join(map(str, rank_of))


def _layer_slots(stack: Stack, layout: Layout, v: int, count: jax.Array, numbers: jax.Array) -> LayerSlots | None:
    """The layer slots of chunk v on this rank, which holds so many layers with these numbers."""
    if stack.are_alike:
        return None if layout.is_even else LayerSlots(count)
    return LayerSlots(None if layout.is_even else count, numbers, layout.among(v), is_one_of=layout.num_chunks > 1)
