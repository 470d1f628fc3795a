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
from ppctl.executors.layout import Layout, scatter
from ppctl.executors.mesh import AXES, DATA_AXES
from ppctl.executors.spmd.body import Device, Options
from ppctl.executors.spmd.fb_ticks import run_pairs
from ppctl.executors.spmd.op_ticks import run_singles
from ppctl.executors.stage.stage import Rows
from ppctl.model.stack import Stack
from ppctl.schedule.ticks import Ticks

Tree = Any


def spmd(
    stack: Stack, layout: Layout, ticks: Ticks, options: Options
) -> Callable[[Tree, Tree], tuple[jax.Array, Tree]]:
    """(loss, gradients) of staged parameters and a global batch {"inputs", "targets"}: [batch, ...] each.

    The loss is the mean over the batch; gradients have the parameters' layout, sharding and dtype. With ticks of
    forwards alone (`schedule.ticks.forward_only`) the gradients are None. `ticks` must have been lowered with
    `options.lowering`.
    ConfigError for options that the program of `ticks` does not have.
    """
    if ticks.program == "single" and not options.skip_idle:
        raise ConfigError(
            f"executor.idle=compute masks what idle ranks compute in ticks of an F, then a B; {ticks.schedule.name} "
            "runs in ticks of one task of any kind. Use executor.idle=skip, or schedule=interleaved."
        )
    run = run_pairs if ticks.program == "pair" else run_singles
    num_microbatches = ticks.schedule.num_microbatches
    table = np.asarray(ticks.table, np.int32).transpose(1, 0, 2)  # [rank, tick, column]

    def loss_and_grads(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        specs = layout.staged_specs(params)

        def local(
            params: Tree, batch: Tree, table: jax.Array, counts: jax.Array, numbers: jax.Array
        ) -> tuple[jax.Array, Tree]:
            microbatches = jax.tree.map(lambda a: a.reshape(num_microbatches, -1, *a.shape[1:]), batch)
            rows = [_rows(stack, layout, v, counts[v, 0], numbers[v, 0]) for v in range(layout.num_chunks)]
            device = Device(stack, ticks, options, params, specs, microbatches, rows)
            loss, number, grads = device.results(run(device, table[0]))
            loss, number = jax.lax.psum((loss, number), AXES)
            if grads is None:
                return loss / number, None
            grads = {
                "ends": scatter(grads["ends"], specs["ends"], AXES),
                "layers": scatter(grads["layers"], specs["layers"], DATA_AXES),
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


def _rows(stack: Stack, layout: Layout, v: int, count: jax.Array, numbers: jax.Array) -> Rows | None:
    """What the rows of chunk v are on this rank, which holds so many layers with these numbers."""
    if stack.are_alike:
        return None if layout.is_even else Rows(count)
    return Rows(None if layout.is_even else count, numbers, layout.among(v))
