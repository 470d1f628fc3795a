"""A plan as text: for each rank its programs, transfers and deletions, in order of dispatch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ppctl.executors.mpmd.dispatch_plan import Key, PlanEntry
from ppctl.schedule.schedule_text import task_name


class ListedEntry(NamedTuple):
    """One entry of a plan, its values by name: x(1,0) is the input of stage 1 for microbatch 0."""

    number: int  # place in the order of dispatch, over all ranks
    what: str  # fwd_1__0 | prepare | ... | transfer
    rank: int
    sender: int | None  # sending rank of a transfer
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    deletes: tuple[str, ...]  # values that nothing reads afterwards


def listed_entries(plan: Iterable[tuple[PlanEntry, Sequence[Key]]]) -> list[ListedEntry]:
    """Return the entries of a plan, each with the values freed after it."""
    found = []
    for number, (entry, freed) in enumerate(plan):
        what = "transfer" if entry.program is None else entry.program.kind
        if entry.program is not None and entry.task is not None:
            what = task_name(entry.task)
        keys = entry.reads, entry.writes, freed
        reads, writes, deletes = (tuple(map(value_text, each)) for each in keys)
        found.append(ListedEntry(number, what, entry.rank, entry.sender, reads, writes, deletes))
    return found


def value_text(key: Key) -> str:
    """Return a value's name and numbers.

    >>> value_text(("x", 1, 0)), value_text(("losses",))
    ('x(1,0)', 'losses')
    """
    name, *numbers = key
    return f"{name}({','.join(map(str, numbers))})" if numbers else name


def listing(found: Sequence[ListedEntry], stages_of: Sequence[Sequence[int]]) -> str:
    """Return for each rank a heading and a line for each entry; transfers stand at both ranks."""
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


def _line(entry: ListedEntry, rank: int) -> str:
    deletes = f"; delete {' '.join(entry.deletes)}" if entry.deletes else ""
    if entry.sender is None:
        return f"{entry.what:12} {' '.join(entry.reads)} -> {' '.join(entry.writes)}{deletes}"
    value, there = entry.reads[0], entry.writes[0]
    if entry.sender == entry.rank:
        return f"{'transfer':12} {value} -> {there}, here{deletes}"
    if rank == entry.sender:
        return f"{'transfer':12} {value} to rank {entry.rank}, as {there}{deletes}"
    return f"{'transfer':12} {there} from rank {entry.sender}"


def runs_text(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, with their runs as such.

    >>> runs_text([0, 1, 2, 5, 7, 8]), runs_text([])
    ('0-2 5 7-8', '')
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
