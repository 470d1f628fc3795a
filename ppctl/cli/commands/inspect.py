"""`ppctl inspect`: show the programs of a run: ticks or tasks, collectives, jaxpr, StableHLO, HLO.

Nothing is run. A summary counts the collectives in the compiled programs; the program is the table
of ticks that one XLA program reads (executor=spmd), or the list that the host dispatches
(executor=mpmd).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from ppctl.cli.subcommands.inspect_programs import chosen
from ppctl.config import Config
from ppctl.errors import ConfigError
from ppctl.executors.mpmd.plan_listing import listing, runs_text
from ppctl.reports import terminal_output as terminal
from ppctl.reports.terminal_output import OutputConsole, show_table, size_text
from ppctl.schedule.tick_lowering import Ticks
from ppctl.schedule.tick_text import TickTask, tick_tasks, tick_text
from ppctl.training.pipeline.engines import step_programs
from ppctl.training.pipeline.engines.step_programs import FORMS, StepProgram, StepPrograms
from ppctl.training.pipeline.job import DEFAULT_DTYPE, TrainingJob, assemble

FILE_WIDTH = 200  # columns of a summary in a file
COLUMNS = (  # of the summary's table
    *("program", "on ranks", "runs a rank", "collective", "over"),
    *("instructions", "times a run", "bytes a time", "bytes a run"),
)


def inspect(config: Config, *, as_json: bool) -> int:
    """Print the views of inspect.what, or write them below inspect.out; return 0."""
    # 1. the programs and the requested views
    request = config.inspect
    job = assemble(config, default_dtype=DEFAULT_DTYPE)
    found = job.pipe.engine.programs(partial(chosen, config, job.pipe.schedule))
    usual = ["summary", "program", *(FORMS if request.out else ())]
    wanted = [request.what] if request.what else usual
    if not config.executor.IS_PIPELINED and "program" in wanted:
        wanted.remove("program")
    if request.what in FORMS and request.out is None and not as_json and len(found.programs) > 1:
        names = ", ".join(program.name for program in found.programs)
        raise ConfigError(
            f"inspect.what={request.what} is the text of one program, and there are "
            f"{len(found.programs)} ({names}). Choose with inspect.task, such as 2F, or write "
            "all with inspect.out=DIR."
        )
    # 2. their texts
    out = None if request.out is None else _new_directory(request.out)
    if "summary" in wanted or "hlo" in wanted:
        step_programs.compile_all(found.programs)
    files = None
    if out is not None:
        files = terminal.write_files(f"inspect.out={out}", out, _texts(wanted, job, found))
    if as_json:
        terminal.show_json(document(job, found, wanted, files))
    elif out is None:
        for what in wanted:
            _show(what, job, found)
    elif "summary" in wanted:
        show_summary(OutputConsole(), job, found)
    return 0


def document(
    job: TrainingJob, found: StepPrograms, wanted: Sequence[str], files: list[str] | None
) -> dict[str, Any]:
    """Return the JSON document; the names of written `files` replace their texts."""
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
    if files is not None:
        return shown | {"files": files}
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


def _show(what: str, job: TrainingJob, found: StepPrograms) -> None:
    if what == "summary":
        show_summary(OutputConsole(), job, found)
    elif what == "program":
        print(program_text(job, found), end="")
    else:
        print(found.programs[0].text(what), end="")


def show_summary(console: Console, job: TrainingJob, found: StepPrograms) -> None:
    """Print a step's communication: collectives in the programs, and transfers between them."""
    config, schedule = job.config, job.pipe.schedule
    which = "no pipeline" if not config.executor.IS_PIPELINED else schedule.name
    head = (
        f"{config.executor.name}: {which}, {schedule.num_microbatches} microbatches, "
        f"mesh={config.mesh.text} ({', '.join(config.mesh.axes_text.split())}) on {_devices(job)}"
    )
    console.print(head, markup=False, highlight=False, soft_wrap=True)
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


# --- files --------------------------------------------------------------------------------------


def _new_directory(name: str) -> Path:
    """Create inspect.out. ConfigError if it cannot be created or is not empty."""
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
        is_empty = next(path.iterdir(), None) is None
    except OSError as error:
        fault = f"inspect.out={name} cannot be a directory: {error.strerror}."
        raise ConfigError(f"{fault} Name another one.") from None
    if not is_empty:
        fault = f"inspect.out={name} holds files, which are not overwritten."
        raise ConfigError(f"{fault} Name a new directory.")
    return path


def _texts(wanted: Sequence[str], job: TrainingJob, found: StepPrograms) -> dict[str, str]:
    """Return the text of each file of inspect.out."""
    texts = {}
    for what in wanted:
        if what == "summary":
            texts["summary.txt"] = _summary_text(job, found)
        elif what == "program":
            texts["program.txt"] = program_text(job, found)
        else:
            for each in found.programs:
                texts[f"{each.name.replace(' ', '_')}.{what}.txt"] = each.text(what)
    return texts


def _summary_text(job: TrainingJob, found: StepPrograms) -> str:
    text = StringIO()
    show_summary(Console(file=text, width=FILE_WIDTH, color_system=None), job, found)
    return text.getvalue()
