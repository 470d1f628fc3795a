"""The spmd executor: a schedule as ONE XLA program, a scan over ticks with at most one ring permute each way a tick.

All mesh axes are manual: parameters are gathered over fsdp explicitly, gradients are summed on each device over all
microbatches and reduced over dp and fsdp once a step. A rank without a task in a tick skips it. Program size does not
depend on the number of microbatches; live activations are the slots of `schedule.ticks`, whatever their number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ppctl.errors import ConfigError
from ppctl.executors.layout import Layout, scatter_sums
from ppctl.executors.mesh import AXES, DATA_AXES
from ppctl.executors.spmd.body import Device, Options
from ppctl.executors.spmd.fb_ticks import run_fb_ticks
from ppctl.executors.spmd.op_ticks import run_op_ticks
from ppctl.executors.stage.stage import LayerSlots
from ppctl.model.stack import Stack
from ppctl.schedule.ticks import Ticks

Tree = Any


def spmd(
    stack: Stack, layout: Layout, ticks: Ticks, options: Options
) -> Callable[[Tree, Tree], tuple[jax.Array, Tree]]:
    """Return the function (params, batch) -> (loss, gradients) that runs these ticks on the layout's mesh.

    params: parameters in staged form (`Layout.to_staged`). batch: {"inputs", "targets"}, global arrays [batch, ...].
    The loss is the mean over the batch; gradients have the parameters' layout, sharding and dtype. With ticks of
    forwards alone (`schedule.ticks.forward_only`) the gradients are None.

    ConfigError, before anything is traced, where the ticks were lowered for another remat than the options have, or
    for another placement than the layout's, and for options that the program of these ticks does not have.
    """
    _check_options(layout, ticks, options)
    run = run_fb_ticks if ticks.program == "fb" else run_op_ticks
    num_microbatches = ticks.schedule.num_microbatches
    table = np.asarray(ticks.table, np.int32).transpose(1, 0, 2)  # [rank, tick, column]

    def loss_and_grads(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        specs = layout.staged_specs(params)

        def local(
            params: Tree, batch: Tree, table: jax.Array, counts: jax.Array, numbers: jax.Array
        ) -> tuple[jax.Array, Tree]:
            microbatches = jax.tree.map(lambda a: a.reshape(num_microbatches, -1, *a.shape[1:]), batch)
            layer_slots = [
                _layer_slots(stack, layout, v, counts[v, 0], numbers[v, 0]) for v in range(layout.num_chunks)
            ]
            device = Device(stack, ticks, options, params, specs, microbatches, layer_slots)
            loss, number, grads = device.results(run(device, table[0]))
            loss, number = jax.lax.psum((loss, number), AXES)
            if grads is None:
                return loss / number, None
            grads = {
                "ends": scatter_sums(grads["ends"], specs["ends"], AXES),
                "layers": scatter_sums(grads["layers"], specs["layers"], DATA_AXES),
            }
            return loss / number, jax.tree.map(lambda g: g / number.astype(g.dtype), grads)

        return jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=(specs, P(DATA_AXES), P("pp"), P(None, "pp"), P(None, "pp")),
            out_specs=(P(), specs if ticks.has_backward else None),
            check_vma=False,
        )(params, batch, jnp.asarray(table), jnp.asarray(layout.counts), jnp.asarray(layout.numbers))

    return loss_and_grads


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
    return LayerSlots(None if layout.is_even else count, numbers, layout.among(v))
