"""The body of the scan over the ticks of a device.

Forward-backward ticks ("fb") run an F and then a B, for looped schedules of unsplit backwards: one
ring permute each way, and separate slots for activations and gradients. Single-op ticks run one
task of any kind, for split backwards and V-shaped placements: the output stays on the rank or hops
to either neighbour. The program has only the kinds and hops of the schedule.

Tried and rejected: one switch over the kinds. If a branch reads slots that another branch writes,
the compiler copies all slots in every tick: on CPU that doubled the step time.
"""

from collections.abc import Callable
from functools import partial, reduce
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.executors.spmd.device_program import (
    SCOPES,
    Device,
    read_slot,
    slots_of,
    write_arrival,
    write_slot,
)
from ppctl.executors.stage.layer_programs import zeros_like
from ppctl.schedule.ir import KINDS, Kind
from ppctl.schedule.tick_table import FB_HOPS, HOPS, task_columns

Tree = Any
At = dict[str, jax.Array]  # columns of a tick, by their names in single-op ticks


class Chain:
    """Orders a tick's collectives by data: each waits for the results of the ones before.

    XLA for CPUs starts the collectives of a device one after the other. But a branch that waits for
    a thread counts as started, so a later collective of the program may start before those in the
    branch, on some devices. Such devices wait for each other forever. XLA for other devices keeps
    the order of the program.
    """

    def __init__(self, is_needed: bool):
        self.is_needed = is_needed
        self._never: jax.Array | None = None  # False, which only a reader of the last results knows

    def add(self, results: Tree) -> None:
        """Let what follows wait for these arrays: the results of one branch."""
        leaves = jax.tree.leaves(results)
        if self.is_needed and leaves:
            first = leaves[0].ravel()[0]
            self._never = jnp.isnan(first) & jnp.isinf(first)

    def flag(self, active: jax.Array) -> jax.Array:
        """Return `active`, the condition of a branch, which then waits."""
        return active if self._never is None else active & ~self._never

    def value(self, value: jax.Array) -> jax.Array:
        """Return `value`, which then waits."""
        return value if self._never is None else jnp.where(self._never, 0, value)


class VocabularyPasses:
    """The embedding, head and embedding-gradient passes of a tick, with a divided vocabulary.

    kinds: number of each stage task's kind in the table. act: name of the slots of activations.
    """

    def __init__(self, device: Device, kinds: dict[Kind, int], is_fb: bool, act: str):
        self.device, self.kinds, self.is_fb, self.act = device, kinds, is_fb, act

    def _is_at(self, at: dict[str, At], kinds: str, place: str) -> jax.Array:
        """Return whether this tick runs a task of these kinds for the "first" or "last" stage."""
        runs = (
            (at[kind]["kind"] == number) & (at[kind][place] > 0)
            for kind, number in self.kinds.items()
            if kind in kinds
        )
        return reduce(or_, runs)

    def embed(self, at: dict[str, At], carry: Tree) -> Tree:
        """Return the carry after E, which writes the input of this tick's first-stage forward."""
        device, m, slot = self.device, at["F"]["embedded"], at["F"]["act"]
        run = lambda: jax.lax.psum(device.embed(m - 1), "pp")  # noqa: E731
        with jax.named_scope(SCOPES["E"]):
            x = jax.lax.cond(m > 0, run, lambda: zeros_like(device.x))
            arrival = slot, x, self._is_at(at, "F", "first")
            return carry | {self.act: write_arrival(carry[self.act], *arrival)}

    def head(self, at: dict[str, At], outs: Tree, carry: Tree, chain: Chain) -> tuple[Tree, Tree]:
        """Return (outputs, carry) after S and T in one pass: two would wait for all ranks twice."""
        device, y, m = self.device, outs[self.act], at["F"]["head"]
        trains, is_last = device.ticks.has_backward, self._is_at(at, "F", "last")

        def run(ends: Tree) -> tuple[jax.Array, Tree]:
            gy, ends = device.add_head(jax.lax.psum(jnp.where(is_last, y, 0), "pp"), m - 1, ends)
            return jax.lax.psum(gy, "pp") if trains else y, ends

        with jax.named_scope(SCOPES["T"]):
            gy, ends = device.run_if(chain.flag(m > 0), run, lambda: y, carry["ends"])
            carry = carry | {"ends": ends}
            chain.add(ends)
            if not self.is_fb:  # the last stage's rank sends gy to itself
                outs = {"value": jnp.where(is_last, gy, y)}
            elif trains:
                carry["grad"] = write_arrival(carry["grad"], at["F"]["grad"], gy, is_last)
        return outs, carry

    def embedding_grad(self, at: dict[str, At], gx: jax.Array, carry: Tree, chain: Chain) -> Tree:
        m, is_first = at["F"]["embedding_grad"], self._is_at(at, "BI", "first")
        whole = lambda: jax.lax.psum(jnp.where(is_first, gx, 0), "pp")  # noqa: E731
        with jax.named_scope(SCOPES["G"]):
            ends = self.device.add_embedding(chain.flag(m > 0), whole, m - 1, carry["ends"])
            chain.add(ends[2])
            return carry | {"ends": ends}


class TickBody:
    """The body of the scan. Tasks are functions (tick's columns, output, carry) -> (output, carry).

    The carry holds slots of arrived values ("act" and "grad" in fb ticks, else "value"), slots
    `stash` (None with remat=full) and `pending` (from I to W), and the device's sums `ends` (losses
    and gradients of embedding and head) and `layers` (gradients of layers).
    """

    def __init__(self, device: Device, hop: Callable[[jax.Array, int], jax.Array]):
        # 1. the slots of values that arrive
        ticks = device.ticks
        self.device, self.stage, self.is_fb = device, device.stage, ticks.program == "fb"
        self.hop = hop  # (value, step) -> value of the rank `step` places before
        self.act, self.grad = ("act", "grad") if self.is_fb else ("value", "value")
        self.has_parts = bool(ticks.schedule.vocab_parts)
        # 2. the kinds of tasks that occur, each with its number in the table, and the hops
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
        self.passes = VocabularyPasses(device, self.kinds, self.is_fb, self.act)
        hops = FB_HOPS if self.is_fb else HOPS
        arrives = lambda hop: 1 in occurring(columns[f"{hop}_arrives"])  # noqa: E731
        self.hops = {hop: step for hop, step in hops.items() if arrives(hop)}
        self.tasks: dict[Kind, Callable] = {
            "F": self.forward,
            "B": self.backward,
            "I": self.input_grad,
            "W": self.weight_grad,
        }

    def run(self) -> tuple[Tree, Tree]:
        """Return the device's sums after all ticks: (`ends`, `layers`)."""
        device = self.device
        carry = slots_of(device)
        carry["ends"], carry["layers"] = device.zero_sums()
        carry, _ = jax.lax.scan(self.tick, carry, device.table)
        return carry["ends"], carry["layers"]

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
        chain = Chain(device.model.communicates and device.model.platform == "cpu")
        if self.has_parts:
            carry = self.passes.embed(at, carry)
            chain.add(carry[self.act])
        for kind, number in self.kinds.items():
            slots = self.act if kind == "F" else self.grad
            with jax.named_scope(SCOPES[kind]):
                run, out = partial(self.tasks[kind], at[kind], outs[slots]), outs[slots]
                is_run = chain.flag(at[kind]["kind"] == number)
                outs[slots], carry = device.run_if(is_run, run, lambda out=out: out, carry)
                chain.add(carry["layers"] if kind == "W" else outs[slots])
            if self.has_parts and self.is_fb and kind == "F":
                outs, carry = self.passes.head(at, outs, carry, chain)
        if self.has_parts and not self.is_fb:
            outs, carry = self.passes.head(at, outs, carry, chain)
        if self.has_parts and device.ticks.has_backward:
            carry = self.passes.embedding_grad(at, outs[self.grad], carry, chain)
        # 2. transfers: a value may arrive in a slot that a task of this tick has just freed
        carry, flags = dict(carry), at[next(iter(at))]
        for hop, step in self.hops.items():
            slots = hop if self.is_fb else "value"
            value = self.hop(chain.value(outs[slots]), step) if step else outs[slots]
            arrival = flags[f"{hop}_slot"], value, flags[f"{hop}_arrives"]
            carry[slots] = write_arrival(carry[slots], *arrival)
        return carry, None

    # embedding and head on the first and the last stage

    def _input(self, at: At, carry: Tree) -> jax.Array:
        """Return a stage's input: embedded tokens if the stage embeds, else the arrived value."""
        slots, embed = carry[self.act], lambda: self.device.embed(at["microbatch"])
        arrived = lambda: read_slot(slots, at["act"])  # noqa: E731
        if self.has_parts:
            return arrived()
        return jax.lax.cond(at["first"], embed, arrived) if slots.shape[0] else embed()

    def _head(
        self, at: At, y: jax.Array, otherwise: Callable | None, ends: Tree
    ) -> tuple[jax.Array, Tree]:
        """Return (gradient of y, new `ends`) on the last stage, else (otherwise(), `ends`)."""
        run = lambda ends: self.device.add_head(y, at["microbatch"], ends)  # noqa: E731
        return (
            run(ends) if otherwise is None else self.device.run_if(at["last"], run, otherwise, ends)
        )

    # tasks

    def forward(self, at: At, out: jax.Array, carry: Tree) -> tuple[jax.Array, Tree]:
        device, x, carry = self.device, self._input(at, carry), dict(carry)
        run = lambda v: self.stage.forward(*device.chunk(v, at["microbatch"]), x)  # noqa: E731
        y, stash = device.on_chunk(at["chunk"], run)
        trains = device.ticks.has_backward
        if trains and not self.stage.keeps_input:
            carry["stash"] = write_slot(carry["stash"], at["stash"], stash)
        if self.has_parts or (trains and self.stage.keeps_input):
            return y, carry
        if trains and self.is_fb:
            slot = lambda: read_slot(carry["grad"], at["grad"])  # noqa: E731
            gy, carry["ends"] = self._head(at, y, slot, carry["ends"])
            carry["grad"] = write_slot(carry["grad"], at["grad"], gy)
            return y, carry
        gy, carry["ends"] = self._head(at, y, lambda: y, carry["ends"])
        # gy is y, except on the last stage: its output is gy, which its rank sends to itself
        return gy if trains else y, carry

    def backward(self, at: At, out: jax.Array, carry: Tree) -> tuple[jax.Array, Tree]:
        def run(v: int, layers: list, stash: Tree, cotangent: Callable) -> tuple:
            chunk = self.device.chunk(v, at["microbatch"])
            gx, total, ends = self.stage.backward(*chunk, stash, cotangent, layers[v])
            return gx, _replaced(layers, v, total), ends

        return self._in_backward(at, carry, "layers", run)

    def input_grad(self, at: At, out: jax.Array, carry: Tree) -> tuple[jax.Array, Tree]:
        keep = lambda slots, pending: write_slot(slots, at["pending"], pending)  # noqa: E731

        def run(v: int, slots: Tree, stash: Tree, cotangent: Callable) -> tuple:
            chunk = self.device.chunk(v, at["microbatch"])
            return self.stage.input_grad(*chunk, stash, cotangent, slots, keep)

        return self._in_backward(at, carry, "pending", run)

    def weight_grad(self, at: At, out: jax.Array, carry: Tree) -> tuple[jax.Array, Tree]:
        pending = read_slot(carry["pending"], at["pending"])

        def run(v: int, layers: list) -> tuple[None, list]:
            args = *self.device.chunk(v, at["microbatch"]), pending, layers[v]
            return None, _replaced(layers, v, self.stage.weight_grad(*args))

        _, layers = self.device.add_on_chunk(at["chunk"], run, None, carry["layers"])
        return out, carry | {"layers": layers}

    def _in_backward(
        self, at: At, carry: Tree, name: str, run: Callable[..., tuple]
    ) -> tuple[jax.Array, Tree]:
        """Return (gx, carry) after run(v, carry[name], stash, cotangent) -> (gx, value, ends).

        name: the entry that `run` updates to value: "layers" or "pending".
        """
        # 1. the stash, and a function that returns (gy, new `ends`, or () if unchanged)
        device, grads = self.device, carry[self.grad]
        arrived = lambda: read_slot(grads, at["grad"])  # noqa: E731
        recomputes = self.stage.keeps_input
        stash = self._input(at, carry) if recomputes else read_slot(carry["stash"], at["stash"])
        # without slots there is a single stage, where no gradient arrives
        otherwise = arrived if grads.shape[0] else None

        def cotangent(ends: Tree, y: jax.Array | None) -> tuple[jax.Array, Tree]:
            if y is None or self.has_parts:
                return arrived(), ()
            return self._head(at, y, otherwise, ends)

        # 2. the chunk's backward, then the embedding's
        def of_chunk(v: int, held: tuple) -> tuple[jax.Array, tuple]:
            value, ends = held
            gx, value, new = run(v, value, stash, partial(cotangent, ends))
            return gx, (value, new or ends)

        held = carry[name], carry["ends"]
        gx, (value, ends) = device.add_on_chunk(at["chunk"], of_chunk, zeros_like(device.x), held)
        if not self.has_parts:
            ends = device.add_embedding(at["first"], lambda: gx, at["microbatch"], ends)
        return gx, carry | {name: value, "ends": ends}


def _replaced(layers: list, v: int, total: Tree) -> list:
    """Return the sums of all chunks with those of chunk v replaced by `total`."""
    return [total if i == v else each for i, each in enumerate(layers)]
