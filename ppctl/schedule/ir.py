"""The schedule as data: tasks, the values they read and write, and the order each rank runs them in.

The dependency rule (`reads`, `writes`) is stated here and nowhere else: validation, transfers, ticks and memory follow
from it. Vocabulary: stage 0..S-1 in model order; rank = index along mesh axis pp; a rank holds V stages (chunks).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from ppctl.errors import ScheduleError

Kind = Literal["F", "B", "I", "W"]  # forward; full backward; input-gradient backward; weight-gradient backward
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")

_CELL = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")


class Task(NamedTuple):
    """One cell of work: `kind` of `stage` for `microbatch`. Prints and parses as PyTorch's pipelining does.

    >>> str(Task(2, "F", 0)), Task.parse("0B3")
    ('2F0', Task(stage=0, kind='B', microbatch=3))
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(cell: str) -> Task:
        """The task that `cell` names. ScheduleError with the grammar when it names none."""
        match = _CELL.fullmatch(cell.strip())
        if match is None:
            raise ScheduleError(
                f"cell {cell[:40]!r} is not <stage><kind><microbatch> with kind one of {', '.join(KINDS)}, such as 2F0."
            )
        stage, kind, microbatch = match.groups()
        return Task(int(stage), kind, int(microbatch))  # type: ignore[arg-type]


class Value(NamedTuple):
    """A value that tasks read and write. name: act | stash | grad | pending | wgrad."""

    name: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.name}({self.stage},{self.microbatch})"


def reads(task: Task, num_stages: int) -> tuple[Value, ...]:
    """The values that must exist before `task` runs.

    >>> [str(v) for v in reads(Task(1, "B", 0), num_stages=4)]
    ['stash(1,0)', 'grad(2,0)']
    """
    stage, kind, m = task
    if kind == "F":
        return (Value("act", stage - 1, m),) if stage > 0 else ()
    if kind == "W":
        return (Value("pending", stage, m),)
    stash = Value("stash", stage, m)
    return (stash, Value("grad", stage + 1, m)) if stage + 1 < num_stages else (stash,)


def writes(task: Task, num_stages: int) -> tuple[Value, ...]:
    """The values that exist once `task` has run. The last stage's act is the loss, stage 0's grad is dropped."""
    stage, kind, m = task
    if kind == "F":
        return (Value("act", stage, m), Value("stash", stage, m))
    if kind == "B":
        return (Value("grad", stage, m), Value("wgrad", stage, m))
    if kind == "I":
        return (Value("grad", stage, m), Value("pending", stage, m))
    return (Value("wgrad", stage, m),)


@dataclass(frozen=True)
class Schedule:
    """Every rank's program: `ranks[r]` are rank r's tasks in the order it runs them; `rank_of[s]` holds stage s."""

    name: str
    ranks: tuple[tuple[Task, ...], ...]
    rank_of: tuple[int, ...]
    num_microbatches: int

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank in model order: its chunks 0..V-1."""
        return tuple(tuple(s for s, rank in enumerate(self.rank_of) if rank == r) for r in range(self.num_ranks))

    @cached_property
    def chunk_of(self) -> tuple[int, ...]:
        """For each stage, which of its rank's chunks it is."""
        return tuple(self.stages_of[rank].index(s) for s, rank in enumerate(self.rank_of))

    @property
    def num_chunks(self) -> int:
        """The largest number of stages on one rank."""
        return max(map(len, self.stages_of))

    @cached_property
    def counts(self) -> tuple[tuple[tuple[str, int, int], ...], ...]:
        """For each rank (kind, stage, how many tasks)."""
        found = (Counter((task.kind, task.stage) for task in tasks) for tasks in self.ranks)
        return tuple(tuple((*which, number) for which, number in counter.items()) for counter in found)

    @property
    def is_split(self) -> bool:
        """Return whether any backward is split into I and W."""
        return any(kind == "I" for rank in self.counts for kind, _, _ in rank)
