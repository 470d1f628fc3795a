"""A plan as people read it: for each rank its programs, transfers and deletions, in the order of dispatch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ppctl.executors.mpmd.plan import Key, Op
from ppctl.schedule.text import task_name


class Entry(NamedTuple):
    """One entry of a plan, its values by name: x(1,0) is the input of stage 1 for microbatch 0."""

    number: int  # its place in the order of dispatch, over all ranks
    what: str  # fwd_1__0 | prepare | ... | transfer
    rank: int
    sender: int | None  # of a transfer
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    deletes: tuple[str, ...]  # what nothing reads afterwards


def entries(plan: Iterable[tuple[Op, Sequence[Key]]]) -> list[Entry]:
    """The entries of a plan, each with the values that are freed after it."""
    found = []
    for number, (op, freed) in enumerate(plan):
        what = "transfer" if op.program is None else op.program.kind if op.task is None else task_name(op.task)
        reads, writes, deletes = (tuple(map(value_text, keys)) for keys in (op.reads, op.writes, freed))
        found.append(Entry(number, what, op.rank, op.sender, reads, writes, deletes))
    return found


def value_text(key: Key) -> str:
    """A value by its name and numbers.

    >>> value_text(("x", 1, 0)), value_text(("losses",))
    ('x(1,0)', 'losses')
    """
    name, *numbers = key
    return f"{name}({','.join(map(str, numbers))})" if numbers else name


def listing(found: Sequence[Entry], stages_of: Sequence[Sequence[int]]) -> str:
    """For each rank a heading and a line for each entry that it takes part in; a transfer stands at both ends."""
    width = len(str(found[-1].number)) if found else 1
    lines = []
    for rank, stages in enumerate(stages_of):
        mine = [entry for entry in found if rank in (entry.rank, entry.sender)]
        if not mine:
            continue
        held = f"stage{'s' * (len(stages) > 1)} {' '.join(map(str, stages))}"
        lines.append(f"rank {rank}, {held}: {len(mine)} entries")
        lines += [f"  {entry.number:{width}}  {_line(entry, rank)}" for entry in mine]
    return "\n".join(lines) + "\n"


def _line(entry: Entry, rank: int) -> str:
    deletes = f"; delete {' '.join(entry.deletes)}" if entry.deletes else ""
    if entry.sender is None:
        return f"{entry.what:12} {' '.join(entry.reads)} -> {' '.join(entry.writes)}{deletes}"
    value, there = entry.reads[0], entry.writes[0]
    if entry.sender == entry.rank:
        return f"{'transfer':12} {value} -> {there}, here{deletes}"
    if rank == entry.sender:
        return f"{'transfer':12} {value} to rank {entry.rank}, as {there}{deletes}"
    return f"{'transfer':12} {there} from rank {entry.sender}"
