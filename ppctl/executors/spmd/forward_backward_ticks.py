"""Forward-backward ticks, an F and then a B: the program of looped schedules of whole backwards.

Each tick has one ring permute each way. A rank without a task in a tick branches round it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from ppctl.executors.spmd.device_program import (
    PART_SCOPES,
    SCOPES,
    Device,
    Kept,
    Place,
    read_slot,
    write_arrival,
    write_slot,
)
from ppctl.executors.stage.layer_programs import zeros_like

Tree = Any


def run_fb_ticks(device: Device, table: jax.Array) -> Tree:
    """Return the sums of a device after all ticks; table [tick, column].

    Carried from tick to tick: `acts` and `grads`, slots for values from a neighbour; `stash`, slots
    for stashes (empty with remat=full); `sums`.
    """
    program = _ForwardBackwardTicks(device)
    carry = {
        "acts": device.slots_of_x("act"),
        "grads": device.slots_of_x("grad"),
        "stash": device.stash_slots(),
        "sums": device.zero_sums(),
    }
    names = {name: column for column, name in enumerate(device.ticks.columns)}
    carry, _ = jax.lax.scan(partial(program.tick, names), carry, table)
    return carry["sums"]


def _place(at: dict[str, jax.Array], prefix: str) -> Place:
    return Place(*(at[f"{prefix}_{name}"] for name in Place._fields))


class _ForwardBackwardTicks:
    """The body of a scan over ticks of a device."""

    def __init__(self, device: Device):
        self.device, self.stage = device, device.stage

    def tick(self, names: dict[str, int], carry: Tree, columns: jax.Array) -> tuple:
        """Run one tick: a forward, a backward, a hop each way."""
        at = {name: columns[column] for name, column in names.items()}
        device, zero = self.device, zeros_like(self.device.x)
        # 1. the forward
        if device.has_parts:
            carry = self._embed_part(at, carry)
        with jax.named_scope(SCOPES["F"]):
            y, carry = device.run_if(at["f"], partial(self._forward, at), lambda: zero, carry)
        if device.has_parts:
            carry = self._head_part(at, y, carry)
        act = 1, at["act_arrives"], at["act_slot"]
        if not device.ticks.has_backward:
            return carry | {"acts": self._arrive(carry["acts"], y, *act)}, None
        # 2. the backward
        with jax.named_scope(SCOPES["B"]):
            gx, carry = device.run_if(at["b"], partial(self._backward, at), lambda: zero, carry)
        if device.has_parts:
            with jax.named_scope(PART_SCOPES["G"]):
                is_first = (at["b"] > 0) & (at["b_first"] > 0)
                sums = device.embedding_grad_part(at, gx, is_first, carry["sums"])
                carry = carry | {"sums": sums}
        # 3. transfers: a value may arrive in a slot that this tick's backward has just freed
        acts = self._arrive(carry["acts"], y, *act)
        grads = self._arrive(carry["grads"], gx, -1, at["grad_arrives"], at["grad_slot"])
        return carry | {"acts": acts, "grads": grads}, None

    def _embed_part(self, at: dict, carry: Tree) -> Tree:
        """Return the carry with the input of the first stage's forward in this tick."""
        with jax.named_scope(PART_SCOPES["E"]):
            x, is_first = self.device.embed_part(at), (at["f"] > 0) & (at["f_first"] > 0)
            return carry | {"acts": write_arrival(carry["acts"], at["f_act"], x, is_first)}

    def _head_part(self, at: dict, y: jax.Array, carry: Tree) -> Tree:
        """Return the carry with the gradient of the last stage's output and this rank's sums."""
        with jax.named_scope(PART_SCOPES["T"]):
            is_last = (at["f"] > 0) & (at["f_last"] > 0)
            gy, sums = self.device.head_part(at, y, is_last, carry["sums"])
            if not self.device.ticks.has_backward:
                return carry | {"sums": sums}
            grads = write_arrival(carry["grads"], at["f_grad"], gy, is_last)
            return carry | {"sums": sums, "grads": grads}

    def _arrive(
        self, slots: jax.Array, value: jax.Array, step: int, arrives: jax.Array, slot: jax.Array
    ) -> jax.Array:
        """Return the slots after `value` of every rank moved `step` ranks round the ring."""
        if not slots.shape[0]:
            return slots
        return write_arrival(slots, slot, self.device.hop(value, step), arrives)

    def _forward(self, at: dict, carry: Tree) -> tuple[jax.Array, Tree]:
        carry, device, place = dict(carry), self.device, _place(at, "f")
        y, stash = device.forward(place, carry["acts"], at["f_act"])
        if device.ticks.has_backward and not self.stage.keeps_input:
            carry["stash"] = write_slot(carry["stash"], at["f_stash"], stash)
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
        gx, carry["sums"] = device.backward(place, stash, cotangent, carry["sums"])
        return gx, carry
