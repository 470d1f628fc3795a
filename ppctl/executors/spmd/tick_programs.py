"""The body of the scan over the ticks of a device.

Forward-backward ticks ("fb"), an F and then a B, for looped schedules of whole backwards: one ring
permute each way, and slots for activations and gradients apart. Single-op ticks, one task of any
kind, for split backwards and turning placements (V): the one output, an activation or a gradient,
stays on the rank or hops to either neighbour. The program has only the kinds and hops of the
schedule. A rank without a task branches round it.

Tried and rejected: one switch over the kinds. If a branch reads slots that another branch writes,
the compiler copies all slots in every tick: on CPU that doubled the step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.executors.spmd.device_program import PART_SCOPES, SCOPES, Device, Place
from ppctl.executors.spmd.slots import read_slot, with_layers, with_own, write_arrival, write_slot
from ppctl.executors.stage.layer_programs import zeros_like
from ppctl.schedule.ir import KINDS, Kind
from ppctl.schedule.tick_table import FB_HOPS, HOPS, task_columns

Tree = Any
At = dict[str, jax.Array]  # a tick's columns by name, a task's as single-op ticks name them


class TickBody:
    """Its tasks are functions (columns of the tick, output, carry) -> (output, carry).

    Carried from tick to tick: slots for activations and gradients that arrive, "act" and "grad", or
    "value" for both; `stash`, slots for stashes (None with remat=full); `pending`, slots from I to
    W; `sums`.
    """

    def __init__(self, device: Device):
        # 1. the slots of values that arrive
        ticks = device.ticks
        self.device, self.stage, self.is_fb = device, device.stage, ticks.program == "fb"
        self.act, self.grad = ("act", "grad") if self.is_fb else ("value", "value")
        # 2. the kinds and hops that occur, each with its number in the table
        columns = {name: column for column, name in enumerate(ticks.columns)}
        lines = [line for tick in ticks.table for line in tick]
        occurring = lambda column: {line[column] for line in lines}  # noqa: E731
        self.columns: dict[Kind, dict[str, int]] = {}
        self.kinds: dict[Kind, int] = {}
        kinds: tuple[Kind, ...] = ("F", "B") if self.is_fb else KINDS
        for place, kind in enumerate(kinds, start=1):
            of_task, number = task_columns(ticks.program, kind), 1 if self.is_fb else place
            if number in occurring(of_task["kind"]):
                self.columns[kind], self.kinds[kind] = columns | of_task, number
        hops = FB_HOPS if self.is_fb else HOPS
        arrives = lambda hop: 1 in occurring(columns[f"{hop}_arrives"])  # noqa: E731
        self.hops = {hop: step for hop, step in hops.items() if arrives(hop)}
        self.tasks: dict[Kind, Callable] = {
            "F": self.forward,
            "B": self.backward,
            "I": self.input_grad,
            "W": self.weight_grad,
        }

    def run(self, table: jax.Array) -> Tree:
        """Return the sums of the device after all ticks; table [tick, column]."""
        device = self.device
        carry = {slots: device.slots_of_x(slots) for slots in dict.fromkeys((self.act, self.grad))}
        carry |= {"stash": device.stash_slots(), "pending": device.pending_slots()}
        carry, _ = jax.lax.scan(self.tick, carry | {"sums": device.zero_sums()}, table)
        return carry["sums"]

    def tick(self, carry: Tree, columns: jax.Array) -> tuple[Tree, None]:
        """Run one tick: the task of its kind, or an F and then a B, and the hops of outputs."""
        # 1. the tasks, between the passes of a divided vocabulary
        device, zero = self.device, zeros_like(self.device.x)
        values = [*columns]
        at: dict[str, At] = {
            kind: {name: values[column] for name, column in named.items()}
            for kind, named in self.columns.items()
        }
        outs: dict[str, Any] = dict.fromkeys((self.act, self.grad), zero)
        if device.vocab_parts:
            carry = self._embed_part(at, carry)
        for kind, number in self.kinds.items():
            slots = self.act if kind == "F" else self.grad
            with jax.named_scope(SCOPES[kind]):
                run, out = partial(self.tasks[kind], at[kind], outs[slots]), outs[slots]
                is_run = at[kind]["kind"] == number
                outs[slots], carry = device.run_if(is_run, run, lambda out=out: out, carry)
            if device.vocab_parts and self.is_fb and kind == "F":
                outs, carry = self._head_part(at, outs, carry)
        if device.vocab_parts and not self.is_fb:
            outs, carry = self._head_part(at, outs, carry)
        if device.vocab_parts and device.ticks.has_backward:
            carry = self._embedding_grad_part(at, outs[self.grad], carry)
        # 2. transfers: a value may arrive in a slot that a task of this tick has just freed
        carry, flags = dict(carry), at[next(iter(at))]
        for hop, step in self.hops.items():
            slots = hop if self.is_fb else "value"
            value = device.hop(outs[slots], step) if step else outs[slots]
            arrival = flags[f"{hop}_slot"], value, flags[f"{hop}_arrives"]
            carry[slots] = write_arrival(carry[slots], *arrival)
        return carry, None

    # passes of the parts of a divided vocabulary

    def _is_at(self, at: dict[str, At], kinds: str, place: str) -> jax.Array:
        """Return whether a task of one of these kinds runs, of the "first" or the "last" stage."""
        runs = (
            (at[kind]["kind"] == number) & (at[kind][place] > 0)
            for kind, number in self.kinds.items()
            if kind in kinds
        )
        return reduce(or_, runs)

    def _embed_part(self, at: dict[str, At], carry: Tree) -> Tree:
        """Return the carry with the input of the first stage's forward in this tick."""
        with jax.named_scope(PART_SCOPES["E"]):
            x, is_first = self.device.embed_part(at["F"]), self._is_at(at, "F", "first")
            return carry | {self.act: write_arrival(carry[self.act], at["F"]["act"], x, is_first)}

    def _head_part(self, at: dict[str, At], outs: Tree, carry: Tree) -> tuple[Tree, Tree]:
        """Return (outputs, carry) with the gradient of the last stage's output, and the sums."""
        with jax.named_scope(PART_SCOPES["T"]):
            y, is_last = outs[self.act], self._is_at(at, "F", "last")
            gy, sums = self.device.head_part(at["F"], y, is_last, carry["sums"])
            carry = carry | {"sums": sums}
            if not self.is_fb:  # the last stage's rank sends it to itself
                return {"value": jnp.where(is_last, gy, y)}, carry
            if not self.device.ticks.has_backward:
                return outs, carry
            grads = write_arrival(carry["grad"], at["F"]["grad"], gy, is_last)
            return outs, carry | {"grad": grads}

    def _embedding_grad_part(self, at: dict[str, At], gx: jax.Array, carry: Tree) -> Tree:
        with jax.named_scope(PART_SCOPES["G"]):
            args = at["F"], gx, self._is_at(at, "BI", "first"), carry["sums"]
            return carry | {"sums": self.device.embedding_grad_part(*args)}

    # tasks

    def forward(self, at: At, out: jax.Array, carry: Tree) -> tuple[jax.Array, Tree]:
        carry, device, place = dict(carry), self.device, _place(at)
        y, stash = device.forward(place, carry[self.act], at["act"])
        keeps_stash = device.ticks.has_backward and not self.stage.keeps_input
        if keeps_stash:
            carry["stash"] = write_slot(carry["stash"], at["stash"], stash)
        if device.vocab_parts:
            return y, carry
        if not device.ticks.has_backward:
            carry["sums"] = device.loss(place, y, carry["sums"])
        elif keeps_stash and self.is_fb:
            slot = lambda: read_slot(carry["grad"], at["grad"])  # noqa: E731
            gy, carry["sums"] = device.head(place, y, slot, carry["sums"])
            carry["grad"] = write_slot(carry["grad"], at["grad"], gy)
        elif keeps_stash:  # the last stage sends its gradient
            y, carry["sums"] = device.head(place, y, lambda: y, carry["sums"])
        return y, carry

    def backward(self, at: At, out: jax.Array, carry: Tree) -> tuple[jax.Array, Tree]:
        carry, device, place = dict(carry), self.device, _place(at)
        stash, cotangent = self._stash_and_cotangent(at, carry)

        def run(v: int, sums: Tree) -> tuple[jax.Array, Tree]:
            args = stash, cotangent(sums), sums[3][v]
            gx, layers, own = self.stage.backward(*device.chunk(v, place.microbatch), *args)
            return gx, with_layers(with_own(sums, own), v, layers)

        zero = zeros_like(device.x)
        gx, sums = device.add_on_chunk(place.chunk, run, zero, carry["sums"])
        return gx, carry | {"sums": device.embedded(place, gx, sums)}

    def input_grad(self, at: At, out: jax.Array, carry: Tree) -> tuple[jax.Array, Tree]:
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

    def weight_grad(self, at: At, out: jax.Array, carry: Tree) -> tuple[jax.Array, Tree]:
        carry, device, place = dict(carry), self.device, _place(at)
        pending = read_slot(carry["pending"], at["pending"])

        def run(v: int, sums: Tree) -> tuple[None, Tree]:
            chunk = device.chunk(v, place.microbatch)
            layers = self.stage.weight_grad(*chunk, pending, sums[3][v])
            return None, with_layers(sums, v, layers)

        _, carry["sums"] = device.add_on_chunk(place.chunk, run, None, carry["sums"])
        return out, carry

    def _stash_and_cotangent(self, at: At, carry: Tree) -> tuple[Tree, Callable]:
        """Return (stash, function from the sums to the cotangent) for backwards of `Stage`.

        Their aux is the new first three sums, () if these do not change.
        """
        device, place, grads = self.device, _place(at), carry[self.grad]
        arrived = lambda: read_slot(grads, at["grad"])  # noqa: E731
        if not self.stage.keeps_input:
            return read_slot(carry["stash"], at["stash"]), lambda _: lambda _: (arrived(), ())
        stash = device.input(place, carry[self.act], at["act"])
        if device.vocab_parts:
            return stash, lambda _: lambda _: (arrived(), ())
        otherwise = arrived if grads.shape[0] else None  # no gradient arrives at a single stage
        return stash, lambda sums: lambda y: device.head(place, y, otherwise, sums[:3])


def _place(at: At) -> Place:
    return Place(*(at[name] for name in Place._fields))
