"""`ppctl inspect`: show the programs of a run: ticks or tasks, collectives, jaxpr, StableHLO, HLO.

Nothing is run. A summary counts the collectives in the compiled programs; the program is the table
of ticks that one XLA program reads (executor=spmd), or the list that the host dispatches
(executor=mpmd).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console

from ppctl.config import Config
from ppctl.errors import ConfigError
from ppctl.executors.mpmd.dispatch_plan import PlanEntry
from ppctl.executors.mpmd.plan_listing import listing, runs_text
from ppctl.reports.terminal_output import (
    OutputConsole,
    show_json,
    show_lines,
    show_table,
    size_text,
)
from ppctl.schedule.ir import Schedule
from ppctl.schedule.remat import Remat
from ppctl.schedule.tick_lowering import Ticks, TickTask, tick_tasks, tick_text
from ppctl.training.pipeline.engines import step_programs
from ppctl.training.pipeline.engines.step_programs import FORMS, StepProgram, StepPrograms
from ppctl.training.pipeline.job import DEFAULT_DTYPE, TrainingJob, assemble

COLUMNS = (  # of the summary's table
    *("program", "on ranks", "runs a rank", "collective", "over"),
    *("instructions", "times a run", "bytes a time", "bytes a run"),
)


def inspect(config: Config, *, as_json: bool) -> int:
    """Print the views of inspect.what; return 0."""
    job = assemble(config, default_dtype=DEFAULT_DTYPE)
    found = job.pipe.engine.programs(partial(chosen, config, job.pipe.schedule))
    usual = ["summary", *(["program"] if config.executor.ENGINE.is_pipelined else [])]
    wanted = usual if config.inspect.what is None else [config.inspect.what]
    if "summary" in wanted or "hlo" in wanted:
        step_programs.compile_all(found.programs)
    if as_json:
        show_json(document(job, found, wanted))
        return 0
    for what in wanted:
        if what == "summary":
            show_summary(OutputConsole(), job, found)
        elif what == "program":
            print(program_text(job, found), end="")
        else:
            for each in found.programs:
                head = f"# {each.name}\n" if len(found.programs) > 1 else ""
                print(head + each.text(what), end="")
    return 0


def document(job: TrainingJob, found: StepPrograms, wanted: Sequence[str]) -> dict[str, Any]:
    """Return the JSON document."""
    config, schedule = job.config, job.pipe.schedule
    shown: dict[str, Any] = {
        "executor": config.executor.name,
        "schedule": schedule.name,
        "num_microbatches": schedule.num_microbatches,
        "mesh": config.mesh.text,
        "devices": _devices(job),
    }
    if "summary" in wanted:
        shown["programs"] = [_program(each) for each in found.programs]
        shown["transfers"] = [each._asdict() for each in found.transfers]
    if "program" in wanted:
        ticks, dispatch = job.pipe.ticks, [each._asdict() for each in found.dispatch]
        shown |= {"dispatch": dispatch} if ticks is None else _ticks(ticks)
    for form in FORMS:
        if form in wanted:
            shown[form] = {each.name: each.text(form) for each in found.programs}
    return shown


def _program(program: StepProgram) -> dict[str, Any]:
    names = ("name", "ranks", "runs", "temp_bytes")
    collectives = [asdict(each) for each in program.collectives]
    return {name: getattr(program, name) for name in names} | {"collectives": collectives}


def _ticks(ticks: Ticks) -> dict[str, Any]:
    def cell(tasks: Sequence[TickTask]) -> list[dict[str, Any]]:
        return [{"task": str(one.task), "is_run": one.is_run, "to": one.to} for one in tasks]

    rows = [list(map(cell, row)) for row in tick_tasks(ticks)]
    return {"ticks": rows, "num_slots": ticks.num_slots}


def _devices(job: TrainingJob) -> str:
    return f"{job.pipe.mesh.size} x {job.pipe.mesh.devices.flat[0].device_kind}"


# --- the terminal -------------------------------------------------------------------------------


def show_summary(console: Console, job: TrainingJob, found: StepPrograms) -> None:
    """Print a step's communication: collectives in the programs, and transfers between them."""
    config, schedule = job.config, job.pipe.schedule
    which = "no pipeline" if not config.executor.ENGINE.is_pipelined else schedule.name
    head = (
        f"{config.executor.name}: {which}, {schedule.num_microbatches} microbatches, "
        f"mesh={config.mesh.text} ({', '.join(config.mesh.axes_text.split())}) on {_devices(job)}"
    )
    show_lines(console, head)
    title = "collectives of a step (bytes: of their results, on one device)"
    show_table(console, title, COLUMNS, (row for each in found.programs for row in _rows(each)))
    if found.transfers:
        names = ("from rank", "to rank", "values", "bytes a device")
        transfers = ((t.sender, t.receiver, t.number, size_text(t.bytes)) for t in found.transfers)
        rows = (tuple(map(str, each)) for each in transfers)
        show_table(console, "transfers of a step", names, rows)


def _rows(program: StepProgram) -> Iterator[tuple[str, ...]]:
    """Yield a row for each kind of collective and its axes, the program's name in the first."""
    head = program.name, runs_text(program.ranks), str(program.runs)
    if not program.collectives:
        yield *head, "none", "", "", "", "", ""
    for each in program.collectives:
        at_most = "<= " * each.is_at_most
        times = "?" if each.times is None else f"{at_most}{each.times}"
        all_bytes = "?" if each.all_bytes is None else f"{at_most}{size_text(each.all_bytes)}"
        what = each.kind, " ".join(each.axes), str(each.instructions)
        yield *head, *what, times, size_text(each.bytes), all_bytes
        head = "", "", ""


def program_text(job: TrainingJob, found: StepPrograms) -> str:
    """Return the table of ticks, or the list that the host dispatches."""
    ticks, schedule = job.pipe.ticks, job.pipe.schedule
    if ticks is None:
        return f"what the host dispatches in a step\n{listing(found.dispatch, schedule.stages_of)}"
    slots = ", ".join(f"{number} of {kind}" for kind, number in ticks.num_slots.items() if number)
    is_fb = ticks.program == "fb"
    which = "an F, then a B, and a hop each way" if is_fb else "one task of any kind"
    head = f"one scan over {ticks.num_ticks} ticks, each {which}"
    return f"{head}; slots of a rank: {slots or 'none'}\n{tick_text(ticks)}"


# --- the choice of inspect.task -----------------------------------------------------------------


def _kind(op: PlanEntry) -> str:
    """Return a program's kind in inspect.task."""
    assert op.program is not None, "a move has no program"
    return op.program.kind if op.task is None else op.task.kind


def chosen(config: Config, schedule: Schedule, ops: Sequence[PlanEntry]) -> set[PlanEntry] | None:
    """Return the entries that inspect.task names; None: all. ConfigError for no such program."""
    # 1. those of the stage
    stage, kind = config.inspect.stage_and_kind
    if stage is None and kind is None:
        return None
    if stage is not None and stage >= schedule.num_stages:
        raise ConfigError(
            f"inspect.task={config.inspect.task}: {schedule.name} on {schedule.num_ranks} ranks "
            f"has stages 0 to {schedule.num_stages - 1}."
        )
    run = [op for op in ops if op.program is not None]
    if stage is not None:
        rank = schedule.rank_of[stage]
        run = [op for op in run if (op.rank == rank if op.task is None else op.task.stage == stage)]
    # 2. those of the kind
    found = run if kind is None else [op for op in run if _kind(op) == kind]
    if not found:
        why, is_last = "", stage == schedule.num_stages - 1
        if kind == "F" and is_last and Remat.of(config.executor.remat).keeps_input_only:
            why = " With executor.remat=full the last stage's forward is left to its backward."
        where = "" if stage is None else f" of stage {stage} and its rank"
        kinds = ", ".join(dict.fromkeys(map(_kind, run)))
        raise ConfigError(
            f"inspect.task={config.inspect.task} is no program{where}.{why} Use one of {kinds}."
        )
    return set(found)
