"""The two programs of ticks: the bodies of a scan over the ticks of a device.

Forward-backward ticks, an F and then a B, for looped schedules of whole backwards: one ring permute
each way. Single-op ticks, one task of any kind, for split backwards and turning placements (V): the
one output, an activation or a gradient, stays on the rank or hops to either neighbour, and the
program has only the kinds and hops of the schedule. A rank without a task branches round it.

Tried and rejected: one switch over the kinds. If a branch reads slots that another branch writes,
the compiler copies all slots in every tick: on CPU that doubled the step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.executors.spmd.device_program import PART_SCOPES, SCOPES, Device, Place
from ppctl.executors.spmd.slots import read_slot, with_layers, with_own, write_arrival, write_slot
from ppctl.executors.stage.layer_programs import zeros_like
from ppctl.schedule.ir import KINDS, Kind
from ppctl.schedule.tick_table import HOPS

Tree = Any


def _columns(device: Device) -> dict[str, int]:
    """Return the column of each name in a line of the table."""
    return {name: column for column, name in enumerate(device.ticks.columns)}


def _place(at: dict[str, jax.Array], prefix: str = "") -> Place:
    return Place(*(at[f"{prefix}{name}"] for name in Place._fields))


def _kept(device: Device, at: dict[str, jax.Array], stash: Tree, name: str, carry: Tree) -> Tree:
    """Return the carry with a forward's stash in the slot of this name, if it is kept apart."""
    if not device.ticks.has_backward or device.stage.keeps_input:
        return carry
    return carry | {"stash": write_slot(carry["stash"], at[name], stash)}


def run_fb_ticks(device: Device, table: jax.Array) -> Tree:
    """Return the sums of a device after all ticks; table [tick, column].

    Carried from tick to tick: `acts` and `grads`, slots for values from a neighbour; `stash`, slots
    for stashes (empty with remat=full); `sums`.
    """
    carry = {
        "acts": device.slots_of_x("act"),
        "grads": device.slots_of_x("grad"),
        "stash": device.stash_slots(),
        "sums": device.zero_sums(),
    }
    carry, _ = jax.lax.scan(_ForwardBackwardTicks(device).tick, carry, table)
    return carry["sums"]


class _ForwardBackwardTicks:
    """A tick: a forward, a backward, a hop each way."""

    def __init__(self, device: Device):
        self.device, self.stage, self.names = device, device.stage, _columns(device)

    def tick(self, carry: Tree, columns: jax.Array) -> tuple[Tree, None]:
        """Run one tick."""
        at = {name: columns[column] for name, column in self.names.items()}
        device, zero = self.device, zeros_like(self.device.x)
        # 1. the forward
        if device.vocab_parts:
            carry = self._embed_part(at, carry)
        with jax.named_scope(SCOPES["F"]):
            y, carry = device.run_if(at["f"], partial(self._forward, at), lambda: zero, carry)
        if device.vocab_parts:
            carry = self._head_part(at, y, carry)
        act = 1, at["act_arrives"], at["act_slot"]
        if not device.ticks.has_backward:
            return carry | {"acts": self._arrive(carry["acts"], y, *act)}, None
        # 2. the backward
        with jax.named_scope(SCOPES["B"]):
            gx, carry = device.run_if(at["b"], partial(self._backward, at), lambda: zero, carry)
        if device.vocab_parts:
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
        carry, device, place = dict(carry), self.device, _place(at, "f_")
        y, stash = device.forward(place, carry["acts"], at["f_act"])
        carry = _kept(device, at, stash, "f_stash", carry)
        if device.vocab_parts:
            return y, carry
        if not device.ticks.has_backward:
            carry["sums"] = device.loss(place, y, carry["sums"])
        elif not self.stage.keeps_input:
            slot = lambda: read_slot(carry["grads"], at["f_grad"])  # noqa: E731
            gy, carry["sums"] = device.head(place, y, slot, carry["sums"])
            carry["grads"] = write_slot(carry["grads"], at["f_grad"], gy)
        return y, carry

    def _backward(self, at: dict, carry: Tree) -> tuple[jax.Array, Tree]:
        carry, device, place = dict(carry), self.device, _place(at, "b_")
        kept = carry["acts" if self.stage.keeps_input else "stash"], at["b_stash"]
        stash, cotangent = device.stash_and_cotangent(place, *kept, carry["grads"], at["b_grad"])
        gx, carry["sums"] = device.backward(place, stash, cotangent, carry["sums"])
        return gx, carry


def run_op_ticks(device: Device, table: jax.Array) -> Tree:
    """Return the sums of a device after all ticks; table [tick, column].

    Carried from tick to tick: `values`, slots for activations and gradients that arrive; `stash`,
    slots for stashes (None with remat=full); `pending`, slots from I to W; `sums`.
    """
    carry = {
        "values": device.slots_of_x("value"),
        "stash": device.stash_slots(),
        "pending": device.pending_slots(),
        "sums": device.zero_sums(),
    }
    carry, _ = jax.lax.scan(_SingleOpTicks(device).tick, carry, table)
    return carry["sums"]


class _SingleOpTicks:
    """A tick: one task, a function (columns of the tick, output, carry) -> (output, carry)."""

    def __init__(self, device: Device):
        self.device, self.stage, self.names = device, device.stage, _columns(device)
        lines = [line for tick in device.ticks.table for line in tick]
        occurring = lambda name: {line[self.names[name]] for line in lines}  # noqa: E731
        numbers = occurring("kind")
        self.kinds: dict[Kind, int] = {k: n for n, k in enumerate(KINDS, start=1) if n in numbers}
        self.hops = {hop: n for hop, n in HOPS.items() if 1 in occurring(f"{hop}_arrives")}
        self.tasks: dict[Kind, Callable] = {
            "F": self.forward,
            "B": self.backward,
            "I": self.input_grad,
            "W": self.weight_grad,
        }

    def tick(self, carry: Tree, columns: jax.Array) -> tuple[Tree, None]:
        """Run one tick: the task of its kind, and the hops of its output."""
        at = {name: columns[column] for name, column in self.names.items()}
        device, out = self.device, zeros_like(self.device.x)
        if device.vocab_parts:
            with jax.named_scope(PART_SCOPES["E"]):
                is_first = (at["kind"] == self.kinds["F"]) & (at["first"] > 0)
                x = device.embed_part(at)
                carry = carry | {"values": write_arrival(carry["values"], at["act"], x, is_first)}
        for kind, number in self.kinds.items():
            with jax.named_scope(SCOPES[kind]):
                run = partial(self.tasks[kind], at, out)
                out, carry = device.run_if(at["kind"] == number, run, lambda out=out: out, carry)
        if device.vocab_parts:
            out, carry = self._head_and_embedding_parts(at, out, carry)
        # transfers last: a value may arrive in a slot that this tick's task has just freed
        values = carry["values"]
        for hop, step in self.hops.items():
            value = device.hop(out, step) if step else out
            values = write_arrival(values, at[f"{hop}_slot"], value, at[f"{hop}_arrives"])
        return carry | {"values": values}, None

    def _head_and_embedding_parts(
        self, at: dict, out: jax.Array, carry: Tree
    ) -> tuple[jax.Array, Tree]:
        """Return (output, carry) after the parts of the head and of the embedding's gradient."""
        device, is_forward = self.device, at["kind"] == self.kinds["F"]
        with jax.named_scope(PART_SCOPES["T"]):
            is_last = is_forward & (at["last"] > 0)
            gy, sums = device.head_part(at, out, is_last, carry["sums"])
            out = jnp.where(is_last, gy, out)  # the last stage's rank sends it to itself
        if device.ticks.has_backward:
            with jax.named_scope(PART_SCOPES["G"]):
                is_grad = (at["kind"] > 0) & ~is_forward & (at["kind"] != self.kinds.get("W", -1))
                sums = device.embedding_grad_part(at, out, is_grad & (at["first"] > 0), sums)
        return out, carry | {"sums": sums}

    def forward(self, at: dict, out: jax.Array, carry: Tree) -> tuple[jax.Array, Tree]:
        carry, device, place = dict(carry), self.device, _place(at)
        y, stash = device.forward(place, carry["values"], at["act"])
        carry = _kept(device, at, stash, "stash", carry)
        if device.vocab_parts:
            return y, carry
        if not device.ticks.has_backward:
            carry["sums"] = device.loss(place, y, carry["sums"])
        elif not self.stage.keeps_input:  # the last stage sends its gradient
            y, carry["sums"] = device.head(place, y, lambda: y, carry["sums"])
        return y, carry

    def backward(self, at: dict, out: jax.Array, carry: Tree) -> tuple[jax.Array, Tree]:
        carry, device, place = dict(carry), self.device, _place(at)
        stash_and_cotangent = self._stash_and_cotangent(at, carry)
        gx, carry["sums"] = device.backward(place, *stash_and_cotangent, carry["sums"])
        return gx, carry

    def input_grad(self, at: dict, out: jax.Array, carry: Tree) -> tuple[jax.Array, Tree]:
        carry, device, place = dict(carry), self.device, _place(at)
        stash, cotangent = self._stash_and_cotangent(at, carry)
        keep = lambda slots, pending: write_slot(slots, at["pending"], pending)  # noqa: E731

        def run(v: int, held: tuple) -> tuple[jax.Array, tuple]:
            slots, own = held
            args = stash, cotangent(own), slots, keep
            gx, slots, new = self.stage.input_grad(*device.chunk(v, place.microbatch), *args)
            return gx, (slots, with_own(own, new))

        held, zero = (carry["pending"], carry["sums"][:3]), zeros_like(device.x)
        gx, (carry["pending"], own) = device.add_on_chunk(place.chunk, run, zero, held)
        carry["sums"] = device.embedded(place, gx, with_own(carry["sums"], own))
        return gx, carry

    def weight_grad(self, at: dict, out: jax.Array, carry: Tree) -> tuple[jax.Array, Tree]:
        carry, device, place = dict(carry), self.device, _place(at)
        pending = read_slot(carry["pending"], at["pending"])

        def run(v: int, sums: Tree) -> tuple[None, Tree]:
            chunk = device.chunk(v, place.microbatch)
            layers = self.stage.weight_grad(*chunk, pending, sums[3][v])
            return None, with_layers(sums, v, layers)

        _, carry["sums"] = device.add_on_chunk(place.chunk, run, None, carry["sums"])
        return out, carry

    def _stash_and_cotangent(self, at: dict, carry: Tree) -> tuple[Tree, Callable]:
        values = carry["values"]  # activations and gradients
        kept = (values, at["act"]) if self.stage.keeps_input else (carry["stash"], at["stash"])
        return self.device.stash_and_cotangent(_place(at), *kept, values, at["grad"])
