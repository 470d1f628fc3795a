"""The host's plan: the programs of each rank in order, their values, and each value's last use.

A plan is data, made once from a schedule; a step only follows it. mpmd/plan_tasks.py names the
values of tasks.
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
    shape: Any  # hashable; all other differences between programs of a kind


class PlanEntry(NamedTuple):
    """An entry of a plan: a program on a rank, or (None) a move of one value to it."""

    program: ProgramId | None
    rank: int
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    task: Task | None = None
    sender: int | None = None  # the rank that a moved value is on

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part."""
        return (self.rank,) if self.sender is None else (self.sender, self.rank)


def transfer_entry(
    sender: int, key: Key, rank: int, there: Key, task: Task | None = None
) -> PlanEntry:
    """Return the move of the value `key` of a rank to another, where it is `there`."""
    return PlanEntry(None, rank, (key,), (there,), task, sender)


class Step(NamedTuple):
    """A program on a rank, before moves are put between programs.

    readers: for each written value, the ranks that read it, with its key there. If this rank is
    among them, the value has that key from the start.
    """

    program: ProgramId
    rank: int
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    readers: tuple[tuple[tuple[int, Key], ...], ...] = ()  # (): no readers
    task: Task | None = None


def with_moves(steps: Iterable[Step]) -> list[PlanEntry]:
    """Return programs in this order, with the moves of values between ranks.

    A move comes before its sender's next program or its reader, whichever is first. Programs of
    tasks come by their start. So those that the receiver begins before the value is made come
    before the move and need not wait for it.
    """
    entries: list[PlanEntry] = []
    pending: list[PlanEntry] = []  # moves that are not in `entries` yet
    for step in steps:
        rank, task = step.rank, step.task
        due = [each for each in pending if each.sender == rank or each.writes[0] in step.reads]
        pending = [each for each in pending if each not in due]
        readers = [dict(each) for each in step.readers] or [{}] * len(step.writes)
        writes = tuple(at.get(rank, key) for key, at in zip(step.writes, readers, strict=True))
        entries += [*due, PlanEntry(step.program, rank, step.reads, writes, task)]
        for key, there in zip(writes, readers, strict=True):
            moves = [(reader, at) for reader, at in there.items() if reader != rank]
            pending += [transfer_entry(rank, key, reader, at, task) for reader, at in moves]
    return entries + pending


def with_reductions(entries: Sequence[PlanEntry], program: Sequence[ProgramId]) -> list[PlanEntry]:
    """Return a plan's tasks with the reduction of each stage's sums once they are complete.

    program: of each stage, that reduces ("acc", stage) to ("sum", stage). A reduction comes right
    before its rank's next task, after the moves of its last task's values, which need not wait.
    """
    last = {key: i for i, entry in enumerate(entries) for key in entry.writes if key[0] == "acc"}
    due: dict[int, list[PlanEntry]] = {}
    for (_, stage), i in last.items():
        rank, rest = entries[i].rank, enumerate(entries[i + 1 :], i + 1)
        later = (j for j, each in rest if each.rank == rank and each.program is not None)
        entry = PlanEntry(program[stage], rank, (("acc", stage),), (("sum", stage),))
        due.setdefault(next(later, len(entries)), []).append(entry)
    found: list[PlanEntry] = []
    for i in range(len(entries) + 1):
        found += [*due.get(i, ()), *entries[i : i + 1]]
    return found


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
        live = (live - set(entry.writes)) | set(entry.reads)
    return found[::-1]
