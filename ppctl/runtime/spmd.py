"""The spmd executor: a schedule as ONE XLA program, a scan over ticks with one ring permute each way a tick.

All mesh axes are manual: parameters are gathered over fsdp explicitly, gradients are summed on each device over all
microbatches and reduced over dp and fsdp once a step. A rank without a task in a tick skips it. Program size does not
depend on the number of microbatches; live activations are the slots of `schedule.ticks`, whatever their number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ppctl.mesh import AXES, DATA_AXES
from ppctl.model.stack import Stack
from ppctl.runtime.layout import Layout, gather, scatter
from ppctl.runtime.stage import Stage, zeros_like
from ppctl.schedule.ticks import COLUMNS, Ticks

Tree = Any

# names in the compiled program by which `profile` finds the operations of a tick's forward and backward
FORWARD_SCOPE, BACKWARD_SCOPE = "tick_forward", "tick_backward"


@dataclass(frozen=True)
class Options:
    """How the program is written; none of them changes what it computes."""

    remat: str = "full"  # none | layer | full
    skip_idle: bool = True  # a rank without a task branches round it; otherwise it computes and masks the result
    gather_each_tick: bool = False  # gather layers over fsdp in every tick instead of once a step
    unroll: int = 16  # a rank's layers are unrolled up to this many, scanned above
    dtype: Any = jnp.float32  # of compute

    @property
    def lowering(self) -> dict[str, bool]:
        """The arguments of `schedule.ticks` that these options need."""
        return {"keep_input": self.remat == "full", "head_in_forward": self.remat != "full"}


def spmd(
    stack: Stack, layout: Layout, ticks: Ticks, options: Options
) -> Callable[[Tree, Tree], tuple[jax.Array, Tree]]:
    """(loss, gradients) of staged parameters and a global batch {"inputs", "targets"}: [batch, ...] each.

    The loss is the mean over the batch; gradients have the parameters' layout, sharding and dtype. With ticks of
    forwards alone (`schedule.ticks.forward_only`) the gradients are None. `ticks` must have been lowered with
    `options.lowering`.
    """
    num_microbatches = ticks.schedule.num_microbatches
    table = np.asarray(ticks.table, np.int32).transpose(1, 0, 2)  # [rank, tick, column]

    def loss_and_grads(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        specs = layout.staged_specs(params)

        def local(params: Tree, batch: Tree, table: jax.Array, counts: jax.Array) -> tuple[jax.Array, Tree]:
            microbatches = jax.tree.map(lambda a: a.reshape(num_microbatches, -1, *a.shape[1:]), batch)
            device = _Device(
                stack, ticks, options, params, specs, microbatches, None if layout.is_even else counts[:, 0]
            )
            loss, number, grads = device.run(table[0])
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
            in_specs=(specs, P(DATA_AXES), P("pp"), P(None, "pp")),
            out_specs=(P(), specs if ticks.has_backward else None),
            check_vma=False,
        )(params, batch, jnp.asarray(table), jnp.asarray(layout.counts))

    return loss_and_grads


class _Device:
    """The tick program of one device, traced inside shard_map.

    Carried from tick to tick: `acts` and `grads`, slots for values that arrive from a neighbour; `stash`, slots for
    what forwards keep (empty with remat=full); `sums` of losses, their number, and gradients, a tree for each chunk.
    """

    def __init__(
        self, stack: Stack, ticks: Ticks, options: Options, params: Tree, specs: Tree, microbatches: Tree, counts: Any
    ):
        self.stack, self.ticks, self.options = stack, ticks, options
        self.params, self.specs, self.microbatches, self.counts = params, specs, microbatches, counts
        self.num_ranks, self.num_chunks = ticks.schedule.num_ranks, ticks.schedule.num_chunks
        self.ends = self._compute(gather(params["ends"], specs["ends"]))
        self.chunks = self._gather_chunks()
        self.x = jax.eval_shape(stack.embed, self.ends, self._microbatch("inputs", 0))
        w = self.chunks[0]
        w0 = w[0] if isinstance(w, list) else jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), w)
        self.stage = Stage(stack.layer, options.remat, w0, self.x)

    def run(self, table: jax.Array) -> tuple[jax.Array, jax.Array, Tree]:
        """(sum of losses, number of losses, sums of gradients) of this device over all microbatches."""
        carry = self._start()
        names = dict(zip(COLUMNS, range(len(COLUMNS)), strict=True))
        # for each tick, whether any rank runs a forward, and whether any runs a backward
        runs = [tuple(any(line[names[kind]] for line in row) for kind in "fb") for row in self.ticks.table]
        cuts = {0, len(runs)}
        if not self.options.skip_idle:  # what is masked costs as much as a task: warm-up and cool-down apart
            forwards, backwards = ([t for t, run in enumerate(runs) if run[kind]] for kind in (0, 1))
            cuts |= {*backwards[:1], *(t + 1 for t in forwards[-1:])}
        for low, high in pairwise(sorted(cuts)):
            tick = partial(self._tick, *map(any, zip(*runs[low:high], strict=True)), names)
            carry, _ = jax.lax.scan(tick, carry, table[low:high])
        loss, number, ends, layers = carry["sums"]
        if not self.ticks.has_backward:
            return loss, number, None
        if isinstance(layers[0], list):
            layers = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *chunk) for chunk in layers]
        layers = jax.tree.map(lambda *leaves: jnp.stack(leaves)[:, None], *layers)
        return loss, number, {"ends": ends, "layers": layers}

    # parameters and slots

    def _compute(self, tree: Tree) -> Tree:
        return jax.tree.map(lambda a: a.astype(self.options.dtype), tree)

    def _gather_chunks(self) -> list[Any]:
        """The layers of each chunk, whole and in the compute dtype: a list of layers, or stacked for a scan."""
        whole = self._compute(gather(self.params["layers"], self.specs["layers"]))  # [V, 1, K, ...]
        num_chunks, _, num_layers = jax.tree.leaves(whole)[0].shape[:3]
        take = lambda *index: jax.tree.map(lambda a: a[index], whole)  # noqa: E731
        if num_chunks * num_layers > self.options.unroll:
            return [take(v, 0) for v in range(num_chunks)]
        return [[take(v, 0, k) for k in range(num_layers)] for v in range(num_chunks)]

    def _chunk(self, v: int) -> Any:
        return (self._gather_chunks() if self.options.gather_each_tick else self.chunks)[v]

    def _count(self, v: int) -> Any:
        return None if self.counts is None else self.counts[v]

    def _on_chunk(self, chunk: jax.Array, run: Callable[[int], Any]) -> Any:
        """run(v) for the chunk that a tick names."""
        if self.num_chunks == 1:
            return run(0)
        return jax.lax.switch(chunk, [partial(run, v) for v in range(self.num_chunks)])

    def _microbatch(self, name: str, m: Any) -> Tree:
        return _read(self.microbatches[name], m)

    def _start(self) -> dict[str, Any]:
        slots = lambda count, tree: jax.tree.map(lambda a: jnp.zeros((count, *a.shape), a.dtype), tree)  # noqa: E731
        master = jax.tree.leaves(self.params)[0].dtype
        sums = lambda tree: jax.tree.map(lambda a: jnp.zeros(a.shape, master), tree)  # noqa: E731
        stash = None
        if self.ticks.num_stash_slots:
            keep = lambda: self.stage.forward(self.chunks[0], self._count(0), zeros_like(self.x))[1]  # noqa: E731
            stash = slots(self.ticks.num_stash_slots, jax.eval_shape(keep))
        head = jax.eval_shape(self.stack.head, self.ends, self.x, self._microbatch("targets", 0))
        gradients = (sums(self.ends), sums(self.chunks)) if self.ticks.has_backward else (None, None)
        return {
            "acts": slots(self.ticks.num_act_slots, self.x),
            "grads": slots(self.ticks.num_grad_slots, self.x),
            "stash": stash,
            "sums": (*zeros_like(head), *gradients),
        }

    # one tick

    def _tick(self, forward: bool, backward: bool, names: dict[str, int], carry: Tree, row: jax.Array) -> tuple:
        """One tick: a forward, a backward, a hop each way. The flags say whether any rank has one in this scan."""
        at = {name: row[column] for name, column in names.items()}
        zero = y = gx = zeros_like(self.x)
        if forward:
            with jax.named_scope(FORWARD_SCOPE):
                y, carry = self._run_if(at["f"], partial(self._forward, at), lambda carry: (zero, carry), carry)
        if backward:
            with jax.named_scope(BACKWARD_SCOPE):
                gx, carry = self._run_if(at["b"], partial(self._backward, at), lambda carry: (zero, carry), carry)
        # transfers last: a value may arrive in a slot that this tick's backward has just freed
        if forward:
            carry["acts"] = self._arrive(carry["acts"], y, 1, at["act_arrives"], at["act_slot"])
        if backward:
            carry["grads"] = self._arrive(carry["grads"], gx, -1, at["grad_arrives"], at["grad_slot"])
        return carry, None

    def _run_if(self, active: jax.Array, run: Callable, idle: Callable, carry: Tree) -> tuple[jax.Array, Tree]:
        return jax.lax.cond(active, run, idle, carry) if self.options.skip_idle else run(carry)

    def _if_active(self, active: jax.Array, new: Tree, old: Tree) -> Tree:
        """`new`, masked by `active` where idle ranks compute too."""
        return new if self.options.skip_idle else jax.tree.map(lambda n, o: jnp.where(active, n, o), new, old)

    def _arrive(self, slots: jax.Array, value: jax.Array, hop: int, arrives: jax.Array, slot: jax.Array) -> jax.Array:
        """Slots after `value` of every rank moved `hop` ranks round the ring."""
        if slots.shape[0] == 0:
            return slots
        ring = [(r, (r + hop) % self.num_ranks) for r in range(self.num_ranks)]
        value = jax.lax.ppermute(value, "pp", ring)
        return _write(slots, slot, jnp.where(arrives, value, _read(slots, slot)))

    def _input(self, at: dict, prefix: str, slots: jax.Array, slot: jax.Array) -> jax.Array:
        """The input of a stage: embedded tokens on the first, else the activation that arrived."""
        embed = lambda: self.stack.embed(self.ends, self._microbatch("inputs", at[f"{prefix}_microbatch"]))  # noqa: E731
        if slots.shape[0] == 0:
            return embed()
        return jax.lax.cond(at[f"{prefix}_first"], embed, lambda: _read(slots, slot))

    def _head(self, at: dict, prefix: str, y: jax.Array, gy: Callable, sums: Tree) -> tuple[jax.Array, Tree]:
        """(gradient of y, sums): of the loss if the stage is the last one, else gy() and sums as they were."""

        def run(sums: Tree) -> tuple[jax.Array, Tree]:
            targets = self._microbatch("targets", at[f"{prefix}_microbatch"])
            loss, pull, number = jax.vjp(lambda e, y: self.stack.head(e, y, targets), self.ends, y, has_aux=True)
            ends_grad, y_grad = pull(jnp.ones_like(loss))
            return y_grad, (sums[0] + loss, sums[1] + number, _add(sums[2], ends_grad), sums[3])

        if self.ticks.num_grad_slots == 0:  # a single stage: no gradient ever arrives
            return run(sums)
        return jax.lax.cond(at[f"{prefix}_last"], run, lambda sums: (gy(), sums), sums)

    def _loss(self, at: dict, y: jax.Array, sums: Tree) -> Tree:
        """Sums with the loss of y added if the stage is the last one; for forwards alone."""

        def run(sums: Tree) -> Tree:
            loss, number = self.stack.head(self.ends, y, self._microbatch("targets", at["f_microbatch"]))
            return (sums[0] + loss, sums[1] + number, *sums[2:])

        return jax.lax.cond(at["f_last"], run, lambda sums: sums, sums)

    def _forward(self, at: dict, carry: Tree) -> tuple[jax.Array, Tree]:
        carry = dict(carry)
        x = self._input(at, "f", carry["acts"], at["f_act"])
        y, stash = self._on_chunk(at["f_chunk"], lambda v: self.stage.forward(self._chunk(v), self._count(v), x))
        if not self.ticks.has_backward:
            carry["sums"] = self._loss(at, y, carry["sums"])
        elif not self.stage.keeps_input:
            old = _read(carry["stash"], at["f_stash"])
            carry["stash"] = _write(carry["stash"], at["f_stash"], self._if_active(at["f"], stash, old))
            slot = lambda: _read(carry["grads"], at["f_grad"])  # noqa: E731
            gy, carry["sums"] = self._head(at, "f", y, slot, carry["sums"])
            carry["grads"] = _write(carry["grads"], at["f_grad"], gy)
        return y, carry

    def _backward(self, at: dict, carry: Tree) -> tuple[jax.Array, Tree]:
        carry = dict(carry)
        arrived = lambda: _read(carry["grads"], at["b_grad"])  # noqa: E731
        if self.stage.keeps_input:
            stash = self._input(at, "b", carry["acts"], at["b_stash"])
            cotangent = lambda y: self._head(at, "b", y, arrived, carry["sums"])  # noqa: E731
        else:
            stash = _read(carry["stash"], at["b_stash"])
            cotangent = lambda _: (arrived(), carry["sums"])  # noqa: E731

        def run(v: int) -> tuple[jax.Array, Tree]:
            gx, dw, sums = self.stage.backward(self._chunk(v), self._count(v), stash, cotangent)
            dw = self._if_active(at["b"], dw, zeros_like(dw))
            layers = [_add(total, dw) if i == v else total for i, total in enumerate(sums[3])]
            return gx, (*sums[:3], layers)

        gx, sums = self._on_chunk(at["b_chunk"], run)

        def embed_grad(total: Tree) -> Tree:
            inputs = self._microbatch("inputs", at["b_microbatch"])
            return _add(total, jax.vjp(lambda e: self.stack.embed(e, inputs), self.ends)[1](gx)[0])

        ends = jax.lax.cond(at["b_first"], embed_grad, lambda total: total, sums[2])
        carry["sums"] = (*sums[:2], ends, sums[3])
        return gx, carry


def _read(slots: Tree, slot: Any) -> Tree:
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, slot, keepdims=False), slots)


def _write(slots: Tree, slot: jax.Array, value: Tree) -> Tree:
    return jax.tree.map(lambda a, v: jax.lax.dynamic_update_index_in_dim(a, v, slot, 0), slots, value)


def _add(total: Tree, update: Tree) -> Tree:
    return jax.tree.map(lambda t, u: t + u.astype(t.dtype), total, update)
