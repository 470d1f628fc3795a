"""The host's plan: which program runs where in which order, what it reads and writes, and when a value is last used.

A plan is data, made once from a schedule; a step only follows it. Values have names:

w, ends_in, ends_out        a stage's parameters, those of the embedding and of the head, as the tasks take them
inputs, targets, m          the batch, and the number of a microbatch
x, gx; y, gy                input and output of a stage for one microbatch, and their gradients
stash, pending              what a forward keeps for its backward, what I leaves to W
acc, acc_in, acc_out        sums of gradients: a stage's, the embedding's, the head's
sum                         a stage's sum of gradients over the devices of its rank, which keep a shard each
losses                      sums of the losses and of their number
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from ppctl.schedule.ir import Schedule, Task
from ppctl.schedule.partition.partition import Partition

TASKS = ("E", "F", "B", "I", "W")  # the programs of tasks; others run once a step
Key = tuple  # (name, numbers by which values of this name differ)


class ProgramId(NamedTuple):
    """The identity of a program: equal ones are traced and lowered once. Kind E is a forward that keeps nothing."""

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


class Role(NamedTuple):
    """The size of a stage, and whether embedding or head belong to it."""

    num_layers: int
    is_first: bool
    is_last: bool
    first_layer: int | None = None  # where layers differ: the number of its first one


def roles(partition: Partition, *, are_alike: bool) -> tuple[Role, ...]:
    """Return the role of each stage. Of layers that are alike it does not matter which ones a stage holds."""
    last = len(partition) - 1
    return tuple(
        Role(len(layers), s == 0, s == last, None if are_alike else layers.start) for s, layers in enumerate(partition)
    )


def task_program(kind: str, role: Role, keeps_input: bool) -> ProgramId | None:
    """Return the program of a task, or None where there is nothing to run.

    keeps_input (remat=full): the stash is the stage's input, and the backward runs the stage again; so the last stage's
    forward is left to its backward, with the head, and the first one's input is embedded again.
    """
    embedding = ("ends_in", "inputs", "m") if role.is_first else ("x",)
    head = ("ends_out", "targets", "m", "losses") if role.is_last else ()
    with_grad = ("acc_out",) if role.is_last else ()
    reads: tuple[str, ...] = ("w",)
    writes: tuple[str, ...] = ()
    if kind == "F" and keeps_input:
        if role.is_last:
            return None
        kind = "E"
    if kind == "E":
        reads += embedding + head
        writes += ("losses",) if role.is_last else ("y",)
    elif kind == "F":
        reads += embedding + head + with_grad
        writes += ("stash", "gy", "losses", "acc_out") if role.is_last else ("stash", "y")
    elif kind == "W":
        reads += ("pending", "acc")
        writes += ("acc",)
    else:
        reads += embedding + head + with_grad if keeps_input else ("stash",)
        if not (keeps_input and role.is_last):
            reads += ("gy",)
        if role.is_first:
            reads += ("ends_in", "inputs", "m", "acc_in")
        reads += ("acc",) if kind == "B" else ()
        writes += ("acc",) if kind == "B" else ("pending",)
        writes += ("acc_in",) if role.is_first else ("gx",)
        writes += ("losses", "acc_out") if keeps_input and role.is_last else ()
    return ProgramId(kind, tuple(dict.fromkeys(reads)), writes, role)


def task_entries(
    schedule: Schedule, order: Iterable[Task], role: Sequence[Role], *, keeps_input: bool
) -> list[PlanEntry]:
    """Return the tasks of `schedule` in `order`, and the moves of what one rank writes and another reads.

    role: of each stage.
    A move comes before its sender's next task or its reader, whichever is first. `order` has tasks by their start, so
    tasks that the receiver begins while the value is still being made come before the move and need not wait for it. A
    schedule of forwards alone keeps nothing.
    """
    rank_of = schedule.rank_of
    has_backward = any(task.kind != "F" for tasks in schedule.ranks for task in tasks)
    entries: list[PlanEntry] = []
    pending: list[PlanEntry] = []  # moves that are not in `entries` yet
    for task in order:
        s, kind, m = task
        program = task_program(kind if has_backward else "E", role[s], keeps_input)
        if program is None:
            continue
        rank = rank_of[s]
        moves = {}  # name written -> (rank that reads it, key there)
        if s < schedule.num_stages - 1:
            moves["y"] = rank_of[s + 1], ("x", s + 1, m)
        if s > 0:
            moves["gx"] = rank_of[s - 1], ("gy", s - 1, m)

        def key(name: str, s: int = s, m: int = m, rank: int = rank) -> Key:
            if name == "m":
                return (name, rank, m)
            if name in ("w", "acc"):
                return (name, s)
            return (name, s, m) if name in ("x", "y", "gx", "gy", "stash", "pending") else (name,)

        here = {name: there for name, (reader, there) in moves.items() if reader == rank}
        reads = tuple(map(key, program.reads))
        writes = tuple(here.get(name, key(name)) for name in program.writes)
        due = [each for each in pending if each.sender == rank or each.writes[0] in reads]
        pending = [each for each in pending if each not in due]
        entries += [*due, PlanEntry(program, rank, reads, writes, task)]
        for name, (reader, there) in moves.items():
            if reader != rank and name in program.writes:
                pending.append(transfer_entry(rank, key(name), reader, there, task))
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
