"""The host's plan: which program runs where in which order, what it reads and writes, and when a value is last used.

A plan is data, made once from a schedule; a step only follows it. `mpmd.task_plan` names the values of tasks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from ppctl.schedule.ir import Task

Key = tuple  # (name, numbers by which values of this name differ)


class ProgramId(NamedTuple):
    """The identity of a program: equal ones are traced and lowered once."""

    kind: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    shape: Any  # all else by which programs of a kind differ, hashable


class PlanEntry(NamedTuple):
    """One entry of a plan: a program on a rank, or a move to it (program is None) of the one value read."""

    program: ProgramId | None
    rank: int
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    task: Task | None = None
    sender: int | None = None  # of a move: the rank that the value is on

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part."""
        return (self.rank,) if self.sender is None else (self.sender, self.rank)


def transfer_entry(sender: int, key: Key, rank: int, there: Key, task: Task | None = None) -> PlanEntry:
    """Return the entry by which the value `key` of a rank becomes `there` on another."""
    return PlanEntry(None, rank, (key,), (there,), task, sender)


class Step(NamedTuple):
    """A program on a rank, before moves are put between programs.

    readers: of each value written the ranks that read it, and its key there; where this rank is among them, the value
    has that key from the start.
    """

    program: ProgramId
    rank: int
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    readers: tuple[tuple[tuple[int, Key], ...], ...] = ()  # (): nobody reads any
    task: Task | None = None


def with_moves(steps: Iterable[Step]) -> list[PlanEntry]:
    """Return programs in this order, with the moves of what one rank writes and another reads.

    A move comes before its sender's next program or its reader, whichever is first. Programs of tasks come by their
    start, so those that the receiver begins while the value is still being made come before the move and need not wait
    for it.
    """
    entries: list[PlanEntry] = []
    pending: list[PlanEntry] = []  # moves that are not in `entries` yet
    for step in steps:
        due = [each for each in pending if each.sender == step.rank or each.writes[0] in step.reads]
        pending = [each for each in pending if each not in due]
        readers = [dict(each) for each in step.readers] or [{}] * len(step.writes)
        writes = tuple(there.get(step.rank, key) for key, there in zip(step.writes, readers, strict=True))
        entries += [*due, PlanEntry(step.program, step.rank, step.reads, writes, step.task)]
        for key, there in zip(writes, readers, strict=True):
            moves = ((reader, at) for reader, at in there.items() if reader != step.rank)
            pending += [transfer_entry(step.rank, key, reader, at, step.task) for reader, at in moves]
    return entries + pending


def with_reductions(entries: Sequence[PlanEntry], program: Sequence[ProgramId]) -> list[PlanEntry]:
    """Return a plan's tasks with the reduction of each stage's sums of gradients, as soon as they are complete.

    program: of each stage, that reduces ("acc", stage) to ("sum", stage). A reduction comes right before its rank's
    next task, after the moves of what the last one has written: the others need not wait for it.
    """
    last = {key: i for i, entry in enumerate(entries) for key in entry.writes if key[0] == "acc"}
    due: dict[int, list[PlanEntry]] = {}
    for (_, stage), i in last.items():
        rank = entries[i].rank
        later = (j for j in range(i + 1, len(entries)) if entries[j].rank == rank and entries[j].program is not None)
        entry = PlanEntry(program[stage], rank, (("acc", stage),), (("sum", stage),))
        due.setdefault(next(later, len(entries)), []).append(entry)
    found: list[PlanEntry] = []
    for i in range(len(entries) + 1):
        found += [*due.get(i, ()), *entries[i : i + 1]]
    return found


def last_uses(entries: Sequence[PlanEntry], keep: Collection[Key]) -> list[tuple[Key, ...]]:
    """Return for each entry the values that nothing reads after it, `keep` excepted: they are freed there.

    >>> copy = ProgramId("copy", ("a",), ("b",), None)
    >>> last_uses([PlanEntry(copy, 0, (("a",),), (("b",),)), PlanEntry(copy, 0, (("b",),), (("c",),))], keep={("c",)})
    [(('a',),), (('b',),)]
    """
    live = set(keep)
    found: list[tuple[Key, ...]] = []
    for entry in reversed(entries):
        touched = dict.fromkeys(entry.reads + entry.writes)
        found.append(tuple(key for key in touched if key not in live))
        live = (live - set(entry.writes)) | set(entry.reads)
    return found[::-1]
