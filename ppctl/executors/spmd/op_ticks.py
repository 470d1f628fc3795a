"""Single-op ticks, of one task of any kind: the program of split backwards and of placements that turn, such as a V.

A tick branches round every kind that is not its task's. Its one output, an activation or a gradient, stays on the rank
or takes a hop to either neighbour; only the kinds and hops that the schedule needs are in the program.

Tried and rejected: one switch over the kinds. A branch that reads slots which another branch writes makes the compiler
copy all of them in every tick: on CPU that doubled the step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.executors.spmd.body import (
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
from ppctl.executors.stage.layers import zeros_like
from ppctl.schedule.ir import KINDS, Kind
from ppctl.schedule.op_ticks import HOPS

Tree = Any


def run_op_ticks(device: Device, table: jax.Array) -> Tree:
    """Return the sums of a device after all ticks; table [tick, column].

    Carried from tick to tick: `values`, slots for activations and gradients that arrive; `stash`, slots for the
    stashes of forwards (None with remat=full); `pending`, slots from input gradients to weight gradients; `sums`.
    """
    names = {name: column for column, name in enumerate(device.ticks.columns)}
    occurring = {name: {line[column] for tick in device.ticks.table for line in tick} for name, column in names.items()}
    kinds: dict[Kind, int] = {kind: number for number, kind in enumerate(KINDS, start=1) if number in occurring["kind"]}
    hops = {hop: step for hop, step in HOPS.items() if 1 in occurring[f"{hop}_arrives"]}
    tasks = _SingleOpTicks(device).tasks

    def tick(carry: Tree, columns: jax.Array) -> tuple[Tree, None]:
        at = {name: columns[column] for name, column in names.items()}
        out = zeros_like(device.x)
        if device.has_parts:
            with jax.named_scope(PART_SCOPES["E"]):
                is_first = (at["kind"] == kinds["F"]) & (at["first"] > 0)
                carry = carry | {"values": write_arrival(carry["values"], at["act"], device.embed_part(at), is_first)}
        for kind, number in kinds.items():
            with jax.named_scope(SCOPES[kind]):
                run = partial(tasks[kind], at, out)
                out, carry = device.run_if(at["kind"] == number, run, lambda out=out: out, carry)
        if device.has_parts:
            out, carry = parts_behind(at, out, carry)
        # transfers last: a value may arrive in a slot that this tick's task has just freed
        for hop, step in hops.items():
            value = device.hop(out, step) if step else out
            carry["values"] = write_arrival(carry["values"], at[f"{hop}_slot"], value, at[f"{hop}_arrives"])
        return carry, None

    def parts_behind(at: dict[str, jax.Array], out: jax.Array, carry: Tree) -> tuple[jax.Array, Tree]:
        """Return (output, carry) after the ranks' parts of the head and of the embedding's gradient."""
        is_forward = at["kind"] == kinds["F"]
        with jax.named_scope(PART_SCOPES["T"]):
            is_last = is_forward & (at["last"] > 0)
            gy, sums = device.head_part(at, out, is_last, carry["sums"])
            out = jnp.where(is_last, gy, out)  # which the last stage's rank sends to itself
        if device.ticks.has_backward:
            with jax.named_scope(PART_SCOPES["G"]):
                is_first = (at["kind"] > 0) & ~is_forward & (at["kind"] != kinds.get("W", -1)) & (at["first"] > 0)
                sums = device.embedding_grad_part(at, out, is_first, sums)
        return out, carry | {"sums": sums}

    carry = {
        "values": device.slots_of_x("value"),
        "stash": device.stash_slots(),
        "pending": device.pending_slots(),
        "sums": device.zero_sums(),
    }
    carry, _ = jax.lax.scan(tick, carry, table)
    return carry["sums"]


class _SingleOpTicks:
    """A function (columns of the tick, output, carry) -> (output, carry) for each kind of task."""

    def __init__(self, device: Device):
        self.device, self.stage = device, device.stage
        self.tasks: dict[Kind, Callable] = {
            "F": self.forward,
            "B": self.backward,
            "I": self.input_grad,
            "W": self.weight_grad,
        }

    def forward(self, at: dict, out: jax.Array, carry: Tree) -> tuple[jax.Array, Tree]:
        carry, device, place = dict(carry), self.device, _place(at)
        y, stash = device.forward(place, carry["values"], at["act"])
        if device.ticks.has_backward and not self.stage.keeps_input:
            carry["stash"] = write_slot(carry["stash"], at["stash"], stash)
        if device.has_parts:
            return y, carry
        if not device.ticks.has_backward:
            carry["sums"] = device.loss(place, y, carry["sums"])
        elif not self.stage.keeps_input:
            y, carry["sums"] = device.head(place, y, lambda: y, carry["sums"])  # the last stage sends its gradient
        return y, carry

    def backward(self, at: dict, out: jax.Array, carry: Tree) -> tuple[jax.Array, Tree]:
        carry, device, place = dict(carry), self.device, _place(at)
        gx, carry["sums"] = device.backward(place, *self._stash_and_cotangent(at, carry), carry["sums"])
        return gx, carry

    def input_grad(self, at: dict, out: jax.Array, carry: Tree) -> tuple[jax.Array, Tree]:
        carry, device, place = dict(carry), self.device, _place(at)
        stash, cotangent = self._stash_and_cotangent(at, carry)
        keep = lambda slots, pending: write_slot(slots, at["pending"], pending)  # noqa: E731

        def run(v: int, held: tuple) -> tuple[jax.Array, tuple]:
            slots, own = held
            gx, slots, new = self.stage.input_grad(*device.chunk(v), stash, cotangent(own), slots, keep)
            return gx, (slots, with_own(own, new))

        held = carry["pending"], carry["sums"][:3]
        gx, (carry["pending"], own) = device.add_on_chunk(place.chunk, run, zeros_like(device.x), held)
        carry["sums"] = device.embedded(place, gx, with_own(carry["sums"], own))
        return gx, carry

    def weight_grad(self, at: dict, out: jax.Array, carry: Tree) -> tuple[jax.Array, Tree]:
        carry, device, place = dict(carry), self.device, _place(at)
        pending = read_slot(carry["pending"], at["pending"])

        def run(v: int, sums: Tree) -> tuple[None, Tree]:
            return None, with_layers(sums, v, self.stage.weight_grad(*device.chunk(v), pending, sums[3][v]))

        _, carry["sums"] = device.add_on_chunk(place.chunk, run, None, carry["sums"])
        return out, carry

    def _stash_and_cotangent(self, at: dict, carry: Tree) -> tuple[Tree, Callable]:
        values = carry["values"]  # activations and gradients
        kept = Kept(values, at["act"], carry["stash"], at["stash"])
        return self.device.stash_and_cotangent(_place(at), kept, values, at["grad"])


def _place(at: dict[str, jax.Array]) -> Place:
    return Place(*(at[name] for name in Place._fields))
