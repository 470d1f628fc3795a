"""The programs that a request would run, in every form that a compiler gives them: jaxpr, StableHLO, HLO."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax

from ppctl.errors import ConfigError
from ppctl.executors.collectives import Collective, collectives
from ppctl.executors.compiler_preset import temp_bytes
from ppctl.executors.mpmd.listing import Entry, entries
from ppctl.executors.mpmd.plan import Op, last_uses
from ppctl.executors.placement import runs_text
from ppctl.executors.spmd.memory import shard_bytes
from ppctl.schedule.text import WORDS
from ppctl.training.engines.mpmd import Mpmd
from ppctl.training.engines.one_program import OneProgram
from ppctl.training.engines.post_validation import PostValidated
from ppctl.training.job import Parts

FORMS = ("jaxpr", "stablehlo", "hlo")


@dataclass(frozen=True)
class Compiled:
    """A program that is traced; what else there is of it is made when asked for."""

    name: str
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
        return collectives(self.hlo)

    @property
    def temp_bytes(self) -> int:
        return temp_bytes(self.compiled)

    def text(self, form: str) -> str:
        """The program in one of FORMS."""
        if form == "jaxpr":
            return f"{self.traced.jaxpr}\n"
        return self.lowered.as_text() if form == "stablehlo" else self.hlo


class Transfers(NamedTuple):
    """The values that go from rank to rank in a step of executor=mpmd."""

    sender: int
    receiver: int
    number: int
    bytes: int  # that one device gives


class Inspected(NamedTuple):
    """The programs of a step. The last two are of executor=mpmd."""

    programs: list[Compiled]
    dispatch: list[Entry]
    transfers: list[Transfers]


def programs_of(parts: Parts) -> Inspected:
    """The programs of a train step, traced; of executor=mpmd those of the stage and task that were asked for."""
    engine: Any = parts.engine
    if isinstance(engine, OneProgram):
        traced = engine.trace_train_step()
        ranks = tuple(range(parts.config.mesh.pp))
        step = Compiled("step", ranks, 1, traced, traced.lower, lambda: step.lowered.compile())
        return Inspected([step], [], [])
    if isinstance(engine, PostValidated):
        return _of_ranks(parts, engine.engine, "try")
    return _of_ranks(parts, engine, "step")


def compile_all(programs: Sequence[Compiled]) -> None:
    """Compile what is not compiled yet, side by side."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda program: program.compiled, programs))


def _of_ranks(parts: Parts, engine: Mpmd, what: str) -> Inspected:
    ops, kept = engine.plan(what)
    given, machine = engine.given_shapes(), engine.machine
    shapes = machine.shapes(ops, given)
    plan = list(zip(ops, last_uses(ops, {*kept, *given}), strict=True))
    wanted = _chosen(parts, ops)
    if wanted is not None:
        plan = [(op, freed) for op, freed in plan if op in wanted]
    users: dict[Any, list[Op]] = {}
    for op, _ in plan:
        if op.program is not None:
            users.setdefault(op.program, []).append(op)
    programs = [
        Compiled(
            _name(these),
            ranks := tuple(sorted({op.rank for op in these})),
            max(sum(op.rank == rank for op in these) for rank in ranks),
            machine.traced[program][0],
            partial(machine.lower, program),
            lambda program=program, these=these: machine.compiled_first(these)[program],
        )
        for program, these in users.items()
    ]
    sent: dict[tuple[int, int], list[int]] = {}
    for op, _ in plan:
        if op.sender is not None and op.sender != op.rank:
            sent.setdefault((op.sender, op.rank), []).append(shard_bytes(shapes[op.reads[0]]))
    transfers = [Transfers(*ends, len(sizes), sum(sizes)) for ends, sizes in sorted(sent.items())]
    return Inspected(programs, entries(plan), transfers)


def _name(ops: Sequence[Op]) -> str:
    """Return what tells a program from others: its kind, and the stages or ranks that run it."""
    op = ops[0]
    assert op.program is not None, "a move has no program"
    if op.task is not None:
        stages = sorted({each.task.stage for each in ops if each.task is not None})
        return f"{WORDS[op.task.kind]} of stage {runs_text(stages)}"
    return f"{op.program.kind} of rank {runs_text(sorted({each.rank for each in ops}))}"


def _kind(op: Op) -> str:
    """Return what inspect.task calls a program."""
    assert op.program is not None, "a move has no program"
    return op.program.kind if op.task is None else op.task.kind


def _chosen(parts: Parts, ops: Sequence[Op]) -> set[Op] | None:
    """The entries that run what inspect.stage and inspect.task ask for; None: all. ConfigError where there is none."""
    asked, schedule = parts.config.inspect, parts.schedule
    if asked.stage is None and asked.task is None:
        return None
    if asked.stage is not None and asked.stage >= schedule.num_stages:
        raise ConfigError(
            f"inspect.stage={asked.stage}: {schedule.name} on {schedule.num_ranks} ranks has stages 0 to "
            f"{schedule.num_stages - 1}."
        )
    run = [op for op in ops if op.program is not None]
    if asked.stage is not None:
        rank = schedule.rank_of[asked.stage]
        run = [op for op in run if (op.rank == rank if op.task is None else op.task.stage == asked.stage)]
    found = run if asked.task is None else [op for op in run if _kind(op) == asked.task]
    if not found:
        where = "" if asked.stage is None else f" of stage {asked.stage} and its rank"
        last = schedule.num_stages - 1
        left = asked.task == "F" and parts.config.executor.remat == "full" and asked.stage == last
        why = " With executor.remat=full the last stage's forward is left to its backward." if left else ""
        kinds = ", ".join(dict.fromkeys(map(_kind, run)))
        raise ConfigError(f"inspect.task={asked.task} is no program{where}.{why} Use one of {kinds}.")
    return set(found)
