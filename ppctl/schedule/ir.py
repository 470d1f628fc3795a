"""The schedule as data: tasks, the values that they read and write, and each rank's order of tasks.

The dependency rule (`reads`, `writes`) is stated here and nowhere else: validation, transfers,
ticks and memory follow from it. Terms: stage 0..S-1 in model order; rank = index along mesh axis
pp; a rank holds V stages (chunks).

Vocabulary parallelism (arXiv 2411.05288) divides embedding and head over the ranks by vocabulary.
Rank r holds part r and runs four tasks for each microbatch:

    E  looks up the embeddings of the part's tokens
    S  computes the part's logits and their softmax sums
    T  computes, from the sums of all parts, the gradients of the part's logits and head weights,
       and its share of the gradient of the last stage's output
    G  computes the gradient of the part's embedding

With a whole vocabulary the first stage embeds, and the last stage computes the logits and the loss.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

from ppctl.errors import ScheduleError

Kind = Literal["F", "B", "I", "W", "E", "S", "T", "G"]
# values that a task of each kind writes
STAGE_WRITES: dict[Kind, tuple[str, ...]] = {
    "F": ("act", "stash"),  # forward
    "B": ("grad", "wgrad"),  # full backward
    "I": ("grad", "pending"),  # input-gradient backward
    "W": ("wgrad",),  # weight-gradient backward
}
PART_WRITES: dict[Kind, tuple[str, ...]] = {
    "E": ("embedded",),  # embedding
    "S": ("sums", "logits"),  # logits and their sums
    "T": ("head_grad", "head_wgrad"),  # gradients of logits
    "G": ("embedding_wgrad",),  # gradients of the embedding
}
KINDS, PART_KINDS = tuple(STAGE_WRITES), tuple(PART_WRITES)
ALL_KINDS = KINDS + PART_KINDS
WRITES = STAGE_WRITES | PART_WRITES
PART_VALUES = tuple(name for names in PART_WRITES.values() for name in names)
MOST_TASKS = 500_000  # tasks that are laid out or simulated: each takes 10 to 100 microseconds

_CELL = re.compile(rf"([0-9]{{1,9}})([{''.join(ALL_KINDS)}])([0-9]{{1,9}})")


class Task(NamedTuple):
    """A unit of work on one microbatch; its text form (2F0) is that of PyTorch's pipelining.

    >>> str(Task(2, "F", 0)), Task.parse("0B3")
    ('2F0', Task(stage=0, kind='B', microbatch=3))
    """

    stage: int  # index in model order; for E, S, T and G the vocabulary part, which is its rank
    kind: Kind  # F forward, B backward, I input gradients, W weight gradients; E, S, T, G of a part
    microbatch: int  # index from 0

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(cell: str) -> Task:
        """Parse a cell such as 2F0. ScheduleError, with the grammar, for any other text."""
        match = _CELL.fullmatch(cell.strip())
        if match is None:
            grammar = f"<stage><kind><microbatch> with kind one of {', '.join(ALL_KINDS)}"
            raise ScheduleError(f"cell {cell[:40]!r} is not {grammar}, such as 2F0.")
        stage, kind, microbatch = match.groups()
        return Task(int(stage), kind, int(microbatch))  # type: ignore[arg-type]


class Value(NamedTuple):
    """A value that tasks read and write, named in WRITES. `stage` may be a vocabulary part."""

    name: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.name}({self.stage},{self.microbatch})"


def reads(task: Task, num_stages: int, vocab_parts: int = 0) -> tuple[Value, ...]:
    """Return the values that must exist before `task` runs.

    vocab_parts: number of parts of a divided vocabulary; 0: embedding and head are whole.

    >>> [str(v) for v in reads(Task(1, "B", 0), num_stages=4)]
    ['stash(1,0)', 'grad(2,0)']
    >>> [str(v) for v in reads(Task(3, "B", 0), num_stages=4, vocab_parts=2)]
    ['stash(3,0)', 'head_grad(0,0)', 'head_grad(1,0)']
    """
    stage, kind, m = task

    def of_all_parts(name: str) -> tuple[Value, ...]:
        return tuple(Value(name, part, m) for part in range(vocab_parts))

    match kind:
        case "F":
            return (Value("act", stage - 1, m),) if stage > 0 else of_all_parts("embedded")
        case "B" | "I":
            is_last = stage + 1 == num_stages
            grads = of_all_parts("head_grad") if is_last else (Value("grad", stage + 1, m),)
            return (Value("stash", stage, m), *grads)
        case "W":
            return (Value("pending", stage, m),)
        case "E":
            return ()
        case "S":
            return (Value("act", num_stages - 1, m),)
        case "T":
            return (Value("logits", stage, m), *of_all_parts("sums"))
        case "G":
            return (Value("grad", 0, m),)


def writes(task: Task) -> tuple[Value, ...]:
    """Return the values that `task` writes.

    With a whole vocabulary the last stage's act is the loss, and no task reads stage 0's grad.
    """
    return tuple(Value(name, task.stage, task.microbatch) for name in WRITES[task.kind])


@dataclass(frozen=True)
class Schedule:
    """The program of every rank, as immutable data."""

    name: str  # label in tables and errors
    ranks: tuple[tuple[Task, ...], ...]  # tasks of each rank in program order
    rank_of: tuple[int, ...]  # rank of each stage
    num_microbatches: int  # microbatches in a step
    part_ranks: tuple[int, ...] = ()  # rank of each vocabulary part; (): the vocabulary is whole
    # function from a schedule to its notebook chart as HTML; set in ppctl/__init__.py
    html: ClassVar[Callable[[Schedule], str] | None] = None

    def _repr_html_(self) -> str | None:
        """Return the chart for notebooks as HTML; None if no function `html` is set."""
        return None if Schedule.html is None else Schedule.html(self)

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)

    @property
    def vocab_parts(self) -> int:
        """Return the number of vocabulary parts; 0 if embedding and head are whole."""
        return len(self.part_ranks)

    def ranks_of(self, name: str) -> tuple[int, ...]:
        """Return the rank of each stage, or of each vocabulary part if `name` belongs to parts.

        name: a task kind, such as "F", or the name of a value, such as "act".
        """
        return self.part_ranks if name in PART_KINDS or name in PART_VALUES else self.rank_of

    def rank_at(self, task: Task | Value) -> int:
        """Return the rank that runs a task or writes a value."""
        name = task.kind if isinstance(task, Task) else task.name
        return self.ranks_of(name)[task.stage]

    def reads(self, task: Task) -> tuple[Value, ...]:
        """Return the values that must exist before `task` runs."""
        return reads(task, self.num_stages, self.vocab_parts)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """Return the stages of each rank in model order: its chunks 0..V-1."""
        stages = [
            [s for s, at in enumerate(self.rank_of) if at == r] for r in range(len(self.ranks))
        ]
        return tuple(map(tuple, stages))

    @cached_property
    def chunk_of(self) -> tuple[int, ...]:
        """Return the index of each stage among the chunks of its rank."""
        return tuple(self.stages_of[rank].index(s) for s, rank in enumerate(self.rank_of))

    def chunk_at(self, task: Task) -> int:
        """Return the index of a task's stage among its rank's chunks; 0 for vocabulary parts."""
        return 0 if task.kind in PART_KINDS else self.chunk_of[task.stage]

    @property
    def num_chunks(self) -> int:
        """Return the largest number of stages on one rank."""
        return max(map(len, self.stages_of))

    @cached_property
    def counts(self) -> tuple[tuple[tuple[str, int, int], ...], ...]:
        """Return (kind, stage, number of tasks) for each kind and stage of each rank."""
        counters = (Counter((task.kind, task.stage) for task in tasks) for tasks in self.ranks)
        return tuple(tuple((*which, n) for which, n in each.items()) for each in counters)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Return the kinds of all tasks."""
        return frozenset(kind for rank in self.counts for kind, _, _ in rank)

    @property
    def has_backward(self) -> bool:
        """Return whether any task is a B, I or W."""
        return not self.kinds.isdisjoint("BIW")

    @property
    def is_split(self) -> bool:
        """Return whether any backward is split into I and W."""
        return "I" in self.kinds


def split_backward(schedule: Schedule) -> Schedule:
    """Return `schedule` with each B replaced by an I and, right after it, its W.

    >>> whole = Schedule("mine", ((Task(0, "B", 0),),), (0,), 1)
    >>> [str(task) for task in split_backward(whole).ranks[0]]
    ['0I0', '0W0']
    """
    ranks = tuple(
        tuple(t._replace(kind=k) for t in tasks for k in ("IW" if t.kind == "B" else t.kind))
        for tasks in schedule.ranks
    )
    return replace(schedule, ranks=ranks)
