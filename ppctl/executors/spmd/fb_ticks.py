"""Forward-backward ticks, of an F and then a B: the program of looped schedules with whole backwards.

Each tick has one ring permute each way.

A rank without a task in a tick branches round it, or computes and masks the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.executors.spmd.body import PART_SCOPES, SCOPES, Device, Kept, Place, read_slot, write_arrival, write_slot
from ppctl.executors.stage.layers import zeros_like

Tree = Any


def run_fb_ticks(device: Device, table: jax.Array) -> Tree:
    """Return the sums of a device after all ticks; table [tick, column].

    Carried from tick to tick: `acts` and `grads`, slots for values that arrive from a neighbour; `stash`, slots for
    the stashes of forwards (empty with remat=full); `sums`.
    """
    program = _ForwardBackwardTicks(device)
    carry = {
        "acts": device.slots_of_x("act"),
        "grads": device.slots_of_x("grad"),
        "stash": device.stash_slots(),
        "sums": device.zero_sums(),
    }
    names = {name: column for column, name in enumerate(device.ticks.columns)}
    # a masked task costs as much as a task: warm-up and cool-down apart
    for which, forward, backward in device.ticks.segments(apart=not device.options.skip_idle):
        tick = partial(program.tick, forward, backward, names)
        carry, _ = jax.lax.scan(tick, carry, table[which.start : which.stop])
    return carry["sums"]


def _place(at: dict[str, jax.Array], prefix: str) -> Place:
    return Place(*(at[f"{prefix}_{name}"] for name in Place._fields))


class _ForwardBackwardTicks:
    """The body of a scan over ticks of a device."""

    def __init__(self, device: Device):
        self.device, self.stage = device, device.stage

    def tick(self, forward: bool, backward: bool, names: dict[str, int], carry: Tree, columns: jax.Array) -> tuple:
        """Run one tick: a forward, a backward, a hop each way. The flags say whether any rank has one in this scan."""
        at = {name: columns[column] for name, column in names.items()}
        zero = y = gx = zeros_like(self.device.x)
        has_parts = self.device.has_parts
        if forward:
            if has_parts:
                carry = self._embed_part(at, carry)
            with jax.named_scope(SCOPES["F"]):
                y, carry = self._run_if(at["f"], partial(self._forward, at), lambda: zero, carry)
            if has_parts:
                carry = self._head_part(at, y, carry)
        if backward:
            with jax.named_scope(SCOPES["B"]):
                gx, carry = self._run_if(at["b"], partial(self._backward, at), lambda: zero, carry)
            if has_parts:
                with jax.named_scope(PART_SCOPES["G"]):
                    is_first = (at["b"] > 0) & (at["b_first"] > 0)
                    carry = carry | {"sums": self.device.embedding_grad_part(at, gx, is_first, carry["sums"])}
        # transfers last: a value may arrive in a slot that this tick's backward has just freed
        if forward:
            carry["acts"] = self._arrive(carry["acts"], y, 1, at["act_arrives"], at["act_slot"])
        if backward:
            carry["grads"] = self._arrive(carry["grads"], gx, -1, at["grad_arrives"], at["grad_slot"])
        return carry, None

    def _embed_part(self, at: dict, carry: Tree) -> Tree:
        """Return the carry with what the first stage's forward of this tick reads."""
        with jax.named_scope(PART_SCOPES["E"]):
            x, is_first = self.device.embed_part(at), (at["f"] > 0) & (at["f_first"] > 0)
            return carry | {"acts": write_arrival(carry["acts"], at["f_act"], x, is_first)}

    def _head_part(self, at: dict, y: jax.Array, carry: Tree) -> Tree:
        """Return the carry with the gradient of the last stage's output, and the sums with this rank's part."""
        with jax.named_scope(PART_SCOPES["T"]):
            is_last = (at["f"] > 0) & (at["f_last"] > 0)
            gy, sums = self.device.head_part(at, y, is_last, carry["sums"])
            if not self.device.ticks.has_backward:
                return carry | {"sums": sums}
            return carry | {"sums": sums, "grads": write_arrival(carry["grads"], at["f_grad"], gy, is_last)}

    def _run_if(self, active: jax.Array, run: Callable, idle: Callable, carry: Tree) -> tuple[jax.Array, Tree]:
        return self.device.run_if(active, run, idle, carry) if self.device.options.skip_idle else run(carry)

    def _if_active(self, active: jax.Array, new: Tree, old: Tree) -> Tree:
        """Return `new`, masked by `active` where idle ranks compute too."""
        if self.device.options.skip_idle:
            return new
        return jax.tree.map(lambda n, o: jnp.where(active, n, o), new, old)

    def _arrive(self, slots: jax.Array, value: jax.Array, step: int, arrives: jax.Array, slot: jax.Array) -> jax.Array:
        """Return the slots after `value` of every rank moved `step` ranks round the ring."""
        return write_arrival(slots, slot, self.device.hop(value, step), arrives) if slots.shape[0] else slots

    def _forward(self, at: dict, carry: Tree) -> tuple[jax.Array, Tree]:
        carry, device, place = dict(carry), self.device, _place(at, "f")
        y, stash = device.forward(place, carry["acts"], at["f_act"])
        if device.ticks.has_backward and not self.stage.keeps_input:
            old = read_slot(carry["stash"], at["f_stash"])
            carry["stash"] = write_slot(carry["stash"], at["f_stash"], self._if_active(at["f"], stash, old))
        if device.has_parts:
            return y, carry
        if not device.ticks.has_backward:
            carry["sums"] = device.loss(place, y, carry["sums"])
        elif not self.stage.keeps_input:
            slot = lambda: read_slot(carry["grads"], at["f_grad"])  # noqa: E731
            gy, carry["sums"] = device.head(place, y, slot, carry["sums"])
            carry["grads"] = write_slot(carry["grads"], at["f_grad"], gy)
        return y, carry

    def _backward(self, at: dict, carry: Tree) -> tuple[jax.Array, Tree]:
        carry, device, place = dict(carry), self.device, _place(at, "b")
        kept = Kept(carry["acts"], at["b_stash"], carry["stash"], at["b_stash"])
        stash, cotangent = device.stash_and_cotangent(place, kept, carry["grads"], at["b_grad"])
        masked = partial(self._if_active, at["b"])
        gx, carry["sums"] = device.backward(place, stash, cotangent, carry["sums"], masked)
        return gx, carry
