"""The host's plan: the programs of each rank in order, their values, and each value's last use.

A plan is data, made once from a schedule. It is compiled to a `Walk`, which each step runs.
mpmd/plan_tasks.py names the values of tasks.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import jax

from ppctl.schedule.ir import Task

Tree = Any
Key = tuple  # (name of a value, then its rank or stage, and microbatch)
Call = Callable[..., Sequence]  # values read -> values written
Slots = tuple[int, ...]  # indices in the list of values of `Walk.run`


class ProgramId(NamedTuple):
    """The identity of a program: programs with equal ids are traced and lowered once."""

    kind: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    shape: Any  # hashable; everything else that distinguishes programs of a kind
    group: int = 0  # index of the group of ranks, all of equal sizes, that run it


class PlanEntry(NamedTuple):
    """An entry of a plan: a program on a rank, or (program=None) a move of one value to it.

    readers: for each written value, (rank, key on that rank) of each reader; (): no readers.
    `with_moves` makes a move for each reader on another rank. A reader on this rank gets no move:
    the program writes the value under the reader's key.
    """

    program: ProgramId | None
    rank: int
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    task: Task | None = None
    sender: int | None = None  # rank that a moved value comes from; None: a program
    readers: tuple[tuple[tuple[int, Key], ...], ...] = ()
    second: Task | None = None  # other task of a program that runs two

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part."""
        return (self.rank,) if self.sender is None else (self.sender, self.rank)


def transfer_entry(
    sender: int, key: Key, rank: int, there: Key, task: Task | None = None
) -> PlanEntry:
    """Return the move of value `key` from `sender` to `rank`, where its key is `there`."""
    return PlanEntry(None, rank, (key,), (there,), task, sender)


def with_moves(programs: Iterable[PlanEntry]) -> list[PlanEntry]:
    """Return the programs in this order, with the moves of values to their readers.

    A move comes right before its sender's next program or before its reader, whichever is first.
    So programs that the receiver starts before the value exists do not wait for the move.
    """
    entries: list[PlanEntry] = []
    pending: list[PlanEntry] = []  # moves not yet in `entries`
    for entry in programs:
        rank, task = entry.rank, entry.task
        due = [each for each in pending if each.sender == rank or each.writes[0] in entry.reads]
        pending = [each for each in pending if each not in due]
        readers = [dict(each) for each in entry.readers] or [{}] * len(entry.writes)
        writes = tuple(at.get(rank, key) for key, at in zip(entry.writes, readers, strict=True))
        entries += [*due, entry._replace(writes=writes, readers=())]
        for key, there in zip(writes, readers, strict=True):
            moves = [(reader, at) for reader, at in there.items() if reader != rank]
            pending += [transfer_entry(rank, key, reader, at, task) for reader, at in moves]
    return entries + pending


def last_uses(entries: Sequence[PlanEntry], keep: Collection[Key]) -> list[tuple[Key, ...]]:
    """Return for each entry the values to free: those without later readers, except `keep`.

    >>> copy = ProgramId("copy", ("a",), ("b",), None)
    >>> entries = [PlanEntry(copy, 0, ((a,),), ((b,),)) for a, b in ("ab", "bc")]
    >>> last_uses(entries, keep={("c",)})
    [(('a',),), (('b',),)]
    """
    live = set(keep)
    found: list[tuple[Key, ...]] = []
    for entry in reversed(entries):
        touched = dict.fromkeys(entry.reads + entry.writes)
        found.append(tuple(key for key in touched if key not in live))
        live.difference_update(entry.writes)
        live.update(entry.reads)
    return found[::-1]


@dataclass(frozen=True)
class Walk:
    """The compiled plan of a process; values on devices of other processes are None."""

    entries: tuple[PlanEntry, ...]
    steps: tuple[tuple[Call, Slots, Slots, Slots], ...]  # call, slots read, written and freed
    slots: Mapping[Key, int]  # index of each value in the list of values of `run`
    given: tuple[Key, ...]  # keys of the values that `run` takes
    kept: tuple[Key, ...]  # keys of the values that `run` returns
    shapes: Mapping[Key, Tree]  # shapes of the kept values
    # bytes by value name at the peak of each rank (`Runtime.memory_breakdown`); {}: remote rank
    held: tuple[Mapping[str, int], ...]

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Peak bytes of each rank on one device: values and temporaries, without `given`."""
        return tuple(sum(held.values()) for held in self.held)

    def run(self, given: Mapping[Key, Tree]) -> dict[Key, Tree]:
        """Dispatch all programs and return the kept values, without waiting for them."""
        values: list[Any] = [None] * len(self.slots)
        for key in self.given:
            values[self.slots[key]] = given[key]
        for call, reads, writes, freed in self.steps:
            results = call(*[values[i] for i in reads])
            for i, result in zip(writes, results, strict=True):
                values[i] = result
            results = None
            for i in freed:
                values[i] = None
        return {key: values[self.slots[key]] for key in self.kept}

    def timed(self, seconds: dict[Task, float]) -> Self:
        """Return a walk that waits for each program and stores times of tasks in `seconds`."""

        def waiting(entry: PlanEntry, call: Call) -> Call:
            def run(*values: Tree) -> Sequence:
                began = time.perf_counter()
                results = jax.block_until_ready(call(*values))
                if entry.program is not None and entry.task is not None:
                    seconds[entry.task] = time.perf_counter() - began
                return results

            return run

        pairs = zip(self.entries, self.steps, strict=True)
        steps = tuple((waiting(entry, call), *rest) for entry, (call, *rest) in pairs)
        return replace(self, steps=steps)

    @cached_property
    def programs(self) -> list[list[tuple[str, Task | None]]]:
        """Programs of each rank in order: (name of the compiled module, its task or None)."""
        found: list[list[tuple[str, Task | None]]] = [[] for _ in self.held]
        for entry in self.entries:
            if entry.program is not None:
                found[entry.rank].append((f"jit_{entry.program.kind}", entry.task))
        return found
