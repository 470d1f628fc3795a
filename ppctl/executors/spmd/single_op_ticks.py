"""Single-op ticks, one task of any kind: the program of split backwards and turning placements (V).

A tick branches round every kind but its task's. Its one output, an activation or a gradient, stays
on the rank or hops to either neighbour; the program has only the kinds and hops of the schedule.

Tried and rejected: one switch over the kinds. If a branch reads slots that another branch writes,
the compiler copies all slots in every tick: on CPU that doubled the step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.executors.spmd.device_program import (
    PART_SCOPES,
    SCOPES,
    Device,
    Kept,
    Place,
    read_slot,
    with_layers,
    with_own,
    write_arrival,
    write_slot,
)
from ppctl.executors.stage.layer_programs import zeros_like
from ppctl.schedule.ir import KINDS, Kind
from ppctl.schedule.tick_table import HOPS

Tree = Any


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
    """The body of a scan over ticks of a device.

    Each kind's task is a function (columns of the tick, output, carry) -> (output, carry).
    """

    def __init__(self, device: Device):
        self.device, self.stage = device, device.stage
        self.names = {name: column for column, name in enumerate(device.ticks.columns)}
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
        if device.has_parts:
            with jax.named_scope(PART_SCOPES["E"]):
                is_first = (at["kind"] == self.kinds["F"]) & (at["first"] > 0)
                x = device.embed_part(at)
                carry = carry | {"values": write_arrival(carry["values"], at["act"], x, is_first)}
        for kind, number in self.kinds.items():
            with jax.named_scope(SCOPES[kind]):
                run = partial(self.tasks[kind], at, out)
                out, carry = device.run_if(at["kind"] == number, run, lambda out=out: out, carry)
        if device.has_parts:
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
        if device.ticks.has_backward and not self.stage.keeps_input:
            carry["stash"] = write_slot(carry["stash"], at["stash"], stash)
        if device.has_parts:
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
            gx, slots, new = self.stage.input_grad(*device.chunk(v), *args)
            return gx, (slots, with_own(own, new))

        held, zero = (carry["pending"], carry["sums"][:3]), zeros_like(device.x)
        gx, (carry["pending"], own) = device.add_on_chunk(place.chunk, run, zero, held)
        carry["sums"] = device.embedded(place, gx, with_own(carry["sums"], own))
        return gx, carry

    def weight_grad(self, at: dict, out: jax.Array, carry: Tree) -> tuple[jax.Array, Tree]:
        carry, device, place = dict(carry), self.device, _place(at)
        pending = read_slot(carry["pending"], at["pending"])

        def run(v: int, sums: Tree) -> tuple[None, Tree]:
            layers = self.stage.weight_grad(*device.chunk(v), pending, sums[3][v])
            return None, with_layers(sums, v, layers)

        _, carry["sums"] = device.add_on_chunk(place.chunk, run, None, carry["sums"])
        return out, carry

    def _stash_and_cotangent(self, at: dict, carry: Tree) -> tuple[Tree, Callable]:
        values = carry["values"]  # activations and gradients
        kept = Kept(values, at["act"], carry["stash"], at["stash"])
        return self.device.stash_and_cotangent(_place(at), kept, values, at["grad"])


def _place(at: dict[str, jax.Array]) -> Place:
    return Place(*(at[name] for name in Place._fields))
