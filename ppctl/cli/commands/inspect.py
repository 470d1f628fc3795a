"""`ppctl inspect`: show the programs that would run: ticks or tasks of each rank, collectives, jaxpr, StableHLO, HLO.

Nothing is run. A summary counts the collectives in the compiled programs; the program is the table of ticks that one
XLA program reads (executor=spmd), or the list that the host dispatches (executor=mpmd).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from ppctl.cli.commands.inspect_programs import chosen
from ppctl.config import Config, Spmd
from ppctl.errors import ConfigError
from ppctl.executors.mpmd.listing import listing
from ppctl.executors.placement import runs_text
from ppctl.reports.terminal import OutputConsole, show_json, show_table, size_text, write_files
from ppctl.schedule.tick_text import tick_tasks, tick_text
from ppctl.training.engines.programs import FORMS, StepProgram, StepPrograms, compile_all
from ppctl.training.job import DEFAULT_DTYPE, TrainingJob, assemble

FILE_WIDTH = 200  # columns of a summary that goes to a file


def inspect(config: Config, *, as_json: bool) -> int:
    """Show what inspect.what names, or write it below inspect.out; return 0."""
    request = config.inspect
    job = assemble(config, default_dtype=DEFAULT_DTYPE)
    found = job.pipe.engine.programs(partial(chosen, config, job.pipe.schedule))
    wanted = [request.what] if request.what else ["summary", "program", *(FORMS if request.out else ())]
    if not config.executor.IS_PIPELINED and "program" in wanted:
        wanted.remove("program")
    if request.what in FORMS and request.out is None and not as_json and len(found.programs) > 1:
        names = ", ".join(program.name for program in found.programs)
        raise ConfigError(
            f"inspect.what={request.what} is the text of one program, and there are {len(found.programs)} ({names}). "
            "Choose with inspect.stage and inspect.task, or write all with inspect.out=DIR."
        )
    out = None if request.out is None else _new_directory(request.out)
    if "summary" in wanted or "hlo" in wanted:
        compile_all(found.programs)
    files = None if out is None else write_files(f"inspect.out={out}", out, _texts(wanted, job, found))
    if as_json:
        show_json(document(job, found, wanted, files))
    elif out is None:
        for what in wanted:
            _show(what, job, found)
    elif "summary" in wanted:
        show_summary(OutputConsole(), job, found)
    return 0


def document(job: TrainingJob, found: StepPrograms, wanted: Sequence[str], files: list[str] | None) -> dict[str, Any]:
    """Return the JSON document. `files` that were written stand for the texts in them."""
    config = job.config
    shown: dict[str, Any] = {
        "executor": config.executor.name,
        "schedule": job.pipe.schedule.name,
        "num_microbatches": job.pipe.schedule.num_microbatches,
        "mesh": config.mesh.text,
        "devices": f"{job.pipe.mesh.size} x {job.pipe.mesh.devices.flat[0].device_kind}",
    }
    if "summary" in wanted:
        shown["programs"] = [
            {
                "name": program.name,
                "ranks": program.ranks,
                "runs": program.runs,
                "temp_bytes": program.temp_bytes,
                "collectives": [asdict(each) for each in program.collectives],
            }
            for program in found.programs
        ]
        shown["transfers"] = [each._asdict() for each in found.transfers]
    if "program" in wanted:
        shown |= {"dispatch": [each._asdict() for each in found.dispatch]} if job.pipe.ticks is None else _ticks(job)
    if files is not None:
        return shown | {"files": files}
    texts = {form: {each.name: each.text(form) for each in found.programs} for form in FORMS if form in wanted}
    return shown | texts


def _ticks(job: TrainingJob) -> dict[str, Any]:
    ticks = job.pipe.ticks
    assert ticks is not None, "executor=spmd has them"
    rows = [
        [[{"task": str(one.task), "is_run": one.is_run, "to": one.to} for one in cell] for cell in row]
        for row in tick_tasks(ticks)
    ]
    return {"ticks": rows, "num_slots": ticks.num_slots}


# --- the terminal ----------------------------------------------------------------------------------------------------


def _show(what: str, job: TrainingJob, found: StepPrograms) -> None:
    if what == "summary":
        show_summary(OutputConsole(), job, found)
    elif what == "program":
        print(program_text(job, found), end="")
    else:
        print(found.programs[0].text(what), end="")


def show_summary(console: Console, job: TrainingJob, found: StepPrograms) -> None:
    """Print the communication of a step: collectives in the programs, and transfers between them."""
    config, schedule = job.config, job.pipe.schedule
    which = "no pipeline" if not config.executor.IS_PIPELINED else schedule.name
    console.print(
        f"{config.executor.name}: {which}, {schedule.num_microbatches} microbatches, mesh={config.mesh.text} "
        f"({', '.join(config.mesh.axes_text.split())}) on {job.pipe.mesh.size} x "
        f"{job.pipe.mesh.devices.flat[0].device_kind}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    show_table(
        console,
        "collectives of a step (bytes: of their results, on one device)",
        (
            "program",
            "on ranks",
            "runs a rank",
            "collective",
            "over",
            "instructions",
            "times a run",
            "bytes a time",
            "bytes a run",
        ),
        (row for program in found.programs for row in _rows(program)),
    )
    if found.transfers:
        show_table(
            console,
            "transfers of a step",
            ("from rank", "to rank", "values", "bytes a device"),
            ((str(t.sender), str(t.receiver), str(t.number), size_text(t.bytes)) for t in found.transfers),
        )


def _rows(program: StepProgram) -> Iterator[tuple[str, ...]]:
    """Yield a row for each kind of collective and its axes, the program's name in the first."""
    head = program.name, runs_text(program.ranks), str(program.runs)
    if not program.collectives:
        yield *head, "none", "", "", "", "", ""
    for each in program.collectives:
        times = "?" if each.times is None else f"{'<= ' * each.is_at_most}{each.times}"
        all_bytes = "?" if each.all_bytes is None else f"{'<= ' * each.is_at_most}{size_text(each.all_bytes)}"
        yield *head, each.kind, " ".join(each.axes), str(each.instructions), times, size_text(each.bytes), all_bytes
        head = "", "", ""


def program_text(job: TrainingJob, found: StepPrograms) -> str:
    """Return what ranks run: the table of ticks, or the list that the host dispatches."""
    ticks, schedule = job.pipe.ticks, job.pipe.schedule
    if ticks is None:
        return f"what the host dispatches in a step\n{listing(found.dispatch, schedule.stages_of)}"
    slots = ", ".join(f"{number} of {kind}" for kind, number in ticks.num_slots.items() if number)
    which = "an F, then a B, and a hop each way" if ticks.program == "fb" else "one task of any kind"
    head = f"one scan over {ticks.num_ticks} ticks, each {which}; slots of a rank: {slots or 'none'}"
    executor = job.config.executor
    if ticks.program == "fb" and isinstance(executor, Spmd) and executor.idle == "compute":
        scans = [f"{rows.start}-{rows.stop - 1}" for rows, _, _ in ticks.segments(apart=True)]
        head = head.replace("one scan", f"{len(scans)} scans (ticks {', '.join(scans)})")
    return f"{head}\n{tick_text(ticks)}"


# --- files -----------------------------------------------------------------------------------------------------------


def _new_directory(name: str) -> Path:
    """The directory inspect.out, made. ConfigError where it cannot be, or holds anything."""
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
        is_empty = next(path.iterdir(), None) is None
    except OSError as error:
        raise ConfigError(f"inspect.out={name} cannot be a directory: {error.strerror}. Name another one.") from None
    if not is_empty:
        raise ConfigError(f"inspect.out={name} holds files, which are not overwritten. Name a new directory.")
    return path


def _texts(wanted: Sequence[str], job: TrainingJob, found: StepPrograms) -> dict[str, str]:
    """Return the text of each file that goes to inspect.out."""
    texts = {}
    for what in wanted:
        if what == "summary":
            texts["summary.txt"] = _summary_text(job, found)
        elif what == "program":
            texts["program.txt"] = program_text(job, found)
        else:
            texts |= {f"{each.name.replace(' ', '_')}.{what}.txt": each.text(what) for each in found.programs}
    return texts


def _summary_text(job: TrainingJob, found: StepPrograms) -> str:
    text = StringIO()
    show_summary(Console(file=text, width=FILE_WIDTH, color_system=None), job, found)
    return text.getvalue()
