"""The programs of a step at every stage of compilation (jaxpr, StableHLO, HLO), and its memory."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax

from ppctl.executors.compiler_options import temp_bytes
from ppctl.executors.hlo_text import Collective, collectives
from ppctl.executors.model_shapes import shard_bytes
from ppctl.executors.mpmd.compiled_programs import CompiledPrograms
from ppctl.executors.mpmd.dispatch_plan import Key, PlanEntry, ProgramId
from ppctl.executors.mpmd.plan_values import value_kind
from ppctl.schedule.ir import PART_KINDS, Task
from ppctl.schedule.partition.partition import ranks_text
from ppctl.schedule.schedule_text import WORDS

FORMS = ("jaxpr", "stablehlo", "hlo")


@dataclass(frozen=True)
class StepProgram:
    """A traced program of a step, lowered and compiled on demand."""

    name: str
    mesh: Mapping[str, int]  # axis sizes of the devices that run it together
    ranks: tuple[int, ...]  # ranks that run it
    runs: int  # largest number of runs on a rank in a step
    traced: jax.stages.Traced
    lower: Callable[[], jax.stages.Lowered]
    compile: Callable[[], jax.stages.Compiled]

    @cached_property
    def lowered(self) -> jax.stages.Lowered:
        return self.lower()

    @cached_property
    def compiled(self) -> jax.stages.Compiled:
        return self.compile()

    @cached_property
    def hlo(self) -> str:
        return self.compiled.as_text() or ""

    @cached_property
    def collectives(self) -> list[Collective]:
        """The collectives of the compiled program, with bytes and run counts."""
        return collectives(self.hlo, self.mesh)

    @property
    def temp_bytes(self) -> int:
        """Bytes of temporaries on one device."""
        return temp_bytes(self.compiled)

    def text(self, form: str) -> str:
        """Return the program as text in one of FORMS."""
        if form == "jaxpr":
            return f"{self.traced.jaxpr}\n"
        return self.lowered.as_text() if form == "stablehlo" else self.hlo


class Transfers(NamedTuple):
    """The values that one rank sends to another in a step of executor=mpmd."""

    sender: int
    receiver: int
    number: int
    bytes: int  # bytes from one device in a step


class StepPrograms(NamedTuple):
    """The programs of a step, and for executor=mpmd the transfers between them."""

    programs: list[StepProgram]
    transfers: list[Transfers]


def compile_all(programs: Sequence[StepProgram]) -> None:
    """Compile the programs that are not compiled yet, in parallel."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda program: program.compiled, programs))


def dispatched_programs(
    compiled: CompiledPrograms, ops: Sequence[PlanEntry], given: dict[Key, Any]
) -> StepPrograms:
    """Return the programs and transfers of a plan; given: the shapes of its inputs."""
    # 1. the programs
    shapes = compiled.shapes(ops, given)
    users: dict[Any, list[PlanEntry]] = {}
    for op in ops:
        if op.program is not None:
            users.setdefault(op.program, []).append(op)
    programs = [
        StepProgram(
            _name(these),
            compiled.submeshes[these[0].rank].shape,
            ranks := tuple(sorted({op.rank for op in these})),
            max(sum(op.rank == rank for op in these) for rank in ranks),
            compiled.traced[program][0],
            partial(compiled.lower, program),
            lambda program=program, these=these: compiled.compiled_first(these)[program],
        )
        for program, these in users.items()
    ]
    # 2. the transfers
    sent: dict[tuple[int, int], list[int]] = {}
    for op in ops:
        if op.sender is not None and op.sender != op.rank:
            sent.setdefault((op.sender, op.rank), []).append(shard_bytes(shapes[op.reads[0]]))
    transfers = [Transfers(*ranks, len(sizes), sum(sizes)) for ranks, sizes in sorted(sent.items())]
    return StepPrograms(programs, transfers)


def _name(ops: Sequence[PlanEntry]) -> str:
    """Return the name of a program: its kind, and the stages or ranks that run it."""
    op = ops[0]
    assert op.program is not None, "a move has no program"
    if op.task is not None:
        pairs = [(each.task, each.second) for each in ops]
        return " with ".join(
            _name_of([*filter(None, tasks)]) for tasks in zip(*pairs, strict=True) if tasks[0]
        )
    if op.program.kind == "reduce":
        return f"reduce of stage {ranks_text(sorted({s for each in ops for _, s in each.reads}))}"
    return f"{op.program.kind} of rank {ranks_text(sorted({each.rank for each in ops}))}"


def _name_of(tasks: Sequence[Task]) -> str:
    stages, kind = sorted({task.stage for task in tasks}), tasks[0].kind
    place = "part" if kind in PART_KINDS else "stage"
    return f"{WORDS[kind]} of {place} {ranks_text(stages)}"


PARTS = (
    *("parameters", "optimizer", "weights", "gradients", "activations", "transfers", "batch"),
    "temporaries",
)
# program, or None for the program of a whole step -> bytes of temporaries on one device
Temporaries = Callable[[ProgramId | None], int]


@dataclass(frozen=True)
class Footprint:
    """The memory of a step's compiled programs."""

    temp_bytes: int  # bytes of temporaries on the device that needs most
    total_bytes: tuple[int, ...]  # bytes of one device of each rank, all parts; 0: remote rank
    text: str  # text of the compiled program; "" for a step of many programs


def by_part(held: Mapping[str, int]) -> dict[str, int]:
    """Return bytes by part, in the order of PARTS, from bytes by value name.

    >>> by_part({"params": 8, "stash": 2, "temporaries": 1})["activations"]
    2
    """
    found: dict[str, int] = dict.fromkeys(PARTS[:-1], 0)
    for name, size in held.items():
        part = name if name == "temporaries" else value_kind(name).memory
        found[part] = found.get(part, 0) + size
    return found
