"""The programs of a step, in every form that a compiler gives them: jaxpr, StableHLO, HLO."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax

from ppctl.executors.collectives import Collective, collectives
from ppctl.executors.compiler_preset import temp_bytes
from ppctl.executors.mpmd.listing import ListedEntry, listed_entries
from ppctl.executors.mpmd.plan import Key, PlanEntry, last_uses
from ppctl.executors.mpmd.runtime import Runtime
from ppctl.executors.placement import runs_text
from ppctl.executors.spmd.memory import shard_bytes
from ppctl.schedule.ir import PART_KINDS
from ppctl.schedule.text import WORDS

FORMS = ("jaxpr", "stablehlo", "hlo")
Choose = Callable[[Sequence[PlanEntry]], Collection[PlanEntry] | None]  # of a plan's entries those to show; None: all


@dataclass(frozen=True)
class StepProgram:
    """A traced program of a step. Its lowered and compiled forms are made when they are asked for."""

    name: str
    mesh: Mapping[str, int]  # axes of the devices that run it together
    ranks: tuple[int, ...]  # that run it
    runs: int  # of a rank in a step, at most
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
        """The collectives of the compiled program, with their bytes and how often a run has them."""
        return collectives(self.hlo, self.mesh)

    @property
    def temp_bytes(self) -> int:
        """Bytes of temporaries on one device."""
        return temp_bytes(self.compiled)

    def text(self, form: str) -> str:
        """Return the program in one of FORMS."""
        if form == "jaxpr":
            return f"{self.traced.jaxpr}\n"
        return self.lowered.as_text() if form == "stablehlo" else self.hlo


class Transfers(NamedTuple):
    """The values that go from rank to rank in a step of executor=mpmd."""

    sender: int
    receiver: int
    number: int
    bytes: int  # that one device gives


class StepPrograms(NamedTuple):
    """The programs of a step. The last two are of executor=mpmd."""

    programs: list[StepProgram]
    dispatch: list[ListedEntry]
    transfers: list[Transfers]


def compile_all(programs: Sequence[StepProgram]) -> None:
    """Compile what is not compiled yet, side by side."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda program: program.compiled, programs))


def one_program(
    traced: jax.stages.Traced, mesh: Mapping[str, int], compiled: Callable[[jax.stages.Lowered], jax.stages.Compiled]
) -> StepPrograms:
    """Return the programs of a step that is one program of all ranks."""
    step = StepProgram("step", mesh, tuple(range(mesh["pp"])), 1, traced, traced.lower, lambda: compiled(step.lowered))
    return StepPrograms([step], [], [])


def dispatched_programs(
    runtime: Runtime, plan: tuple[list[PlanEntry], list[Key]], given: dict[Key, Any], choose: Choose | None
) -> StepPrograms:
    """Return the programs and transfers of a plan that the host dispatches; given: shapes of what it starts from."""
    ops, kept = plan
    shapes = runtime.shapes(ops, given)
    listed = list(zip(ops, last_uses(ops, {*kept, *given}), strict=True))
    wanted = None if choose is None else choose(ops)
    if wanted is not None:
        listed = [(op, freed) for op, freed in listed if op in wanted]
    users: dict[Any, list[PlanEntry]] = {}
    for op, _ in listed:
        if op.program is not None:
            users.setdefault(op.program, []).append(op)
    programs = [
        StepProgram(
            _name(these),
            runtime.submeshes[0].shape,
            ranks := tuple(sorted({op.rank for op in these})),
            max(sum(op.rank == rank for op in these) for rank in ranks),
            runtime.traced[program][0],
            partial(runtime.lower, program),
            lambda program=program, these=these: runtime.compiled_first(these)[program],
        )
        for program, these in users.items()
    ]
    sent: dict[tuple[int, int], list[int]] = {}
    for op, _ in listed:
        if op.sender is not None and op.sender != op.rank:
            sent.setdefault((op.sender, op.rank), []).append(shard_bytes(shapes[op.reads[0]]))
    transfers = [Transfers(*ranks, len(sizes), sum(sizes)) for ranks, sizes in sorted(sent.items())]
    return StepPrograms(programs, listed_entries(listed), transfers)


def _name(ops: Sequence[PlanEntry]) -> str:
    """Return a program's kind, and the stages or ranks that run it: no other program has both."""
    op = ops[0]
    assert op.program is not None, "a move has no program"
    if op.task is not None:
        stages = sorted({each.task.stage for each in ops if each.task is not None})
        place = "part" if op.task.kind in PART_KINDS else "stage"
        return f"{WORDS[op.task.kind]} of {place} {runs_text(stages)}"
    if op.program.kind == "reduce":
        return f"reduce of stage {runs_text(sorted({stage for each in ops for _, stage in each.reads}))}"
    return f"{op.program.kind} of rank {runs_text(sorted({each.rank for each in ops}))}"
