"""`ppctl inspect`: show the programs that would run: ticks or tasks of each rank, collectives, jaxpr, StableHLO, HLO.

Nothing is run. A summary counts the collectives in the compiled programs; the program is the table of ticks that one
XLA program reads (executor=spmd), or the list that the host dispatches (executor=mpmd).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from ppctl.cli.commands.inspect_programs import FORMS, Compiled, Inspected, compile_all, programs_of
from ppctl.config import Config
from ppctl.errors import ConfigError
from ppctl.executors.mpmd.listing import listing
from ppctl.executors.placement import runs_text
from ppctl.reports.terminal import show_json, show_table, size_text, write_files
from ppctl.schedule.tick_text import ran, tick_text
from ppctl.training.job import DEFAULT_DTYPE, Parts, assemble

FILE_WIDTH = 200  # columns of a summary that goes to a file


def inspect(config: Config, *, as_json: bool) -> int:
    """The exit code 0, after showing what inspect.what asks for, or writing it below inspect.out."""
    asked = config.inspect
    parts = assemble(config, default_dtype=DEFAULT_DTYPE)
    found = programs_of(parts)
    wanted = [asked.what] if asked.what else ["summary", "program", *(FORMS if asked.out else ())]
    if config.executor.name == "reference" and "program" in wanted:
        wanted.remove("program")
    if asked.what in FORMS and asked.out is None and not as_json and len(found.programs) > 1:
        names = ", ".join(program.name for program in found.programs)
        raise ConfigError(
            f"inspect.what={asked.what} is the text of one program, and there are {len(found.programs)} ({names}). "
            "Choose with inspect.stage and inspect.task, or write all with inspect.out=DIR."
        )
    out = None if asked.out is None else _new_directory(asked.out)
    if "summary" in wanted or "hlo" in wanted:
        compile_all(found.programs)
    files = None if out is None else write_files(f"inspect.out={out}", out, _texts(wanted, parts, found))
    if as_json:
        show_json(document(parts, found, wanted, files))
    elif out is None:
        for what in wanted:
            _show(what, parts, found)
    elif "summary" in wanted:
        show_summary(Console(), parts, found)
    return 0


def document(parts: Parts, found: Inspected, wanted: Sequence[str], files: list[str] | None) -> dict[str, Any]:
    """Return what the request asks for, for scripts. `files` that were written stand for the texts in them."""
    config = parts.config
    shown: dict[str, Any] = {
        "executor": config.executor.name,
        "schedule": parts.schedule.name,
        "num_microbatches": parts.schedule.num_microbatches,
        "mesh": config.mesh.text,
        "devices": f"{parts.mesh.size} x {parts.mesh.devices.flat[0].device_kind}",
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
        shown |= {"dispatch": [each._asdict() for each in found.dispatch]} if parts.ticks is None else _ticks(parts)
    if files is not None:
        return shown | {"files": files}
    texts = {form: {each.name: each.text(form) for each in found.programs} for form in FORMS if form in wanted}
    return shown | texts


def _ticks(parts: Parts) -> dict[str, Any]:
    ticks = parts.ticks
    assert ticks is not None, "executor=spmd has them"
    rows = [
        [[{"task": str(one.task), "is_run": one.is_run, "to": one.to} for one in cell] for cell in row]
        for row in ran(ticks)
    ]
    return {"ticks": rows, "num_slots": ticks.num_slots}


# --- the terminal ----------------------------------------------------------------------------------------------------


def _show(what: str, parts: Parts, found: Inspected) -> None:
    if what == "summary":
        show_summary(Console(), parts, found)
    elif what == "program":
        print(program_text(parts, found), end="")
    else:
        print(found.programs[0].text(what), end="")


def show_summary(console: Console, parts: Parts, found: Inspected) -> None:
    """Print what the programs send to each other: collectives in them, and transfers between them."""
    config, schedule = parts.config, parts.schedule
    which = "no pipeline" if config.executor.name == "reference" else schedule.name
    console.print(
        f"{config.executor.name}: {which}, {schedule.num_microbatches} microbatches, mesh={config.mesh.text} "
        f"({', '.join(f'{axis}={size}' for axis, size in parts.mesh.shape.items())}) on {parts.mesh.size} x "
        f"{parts.mesh.devices.flat[0].device_kind}",
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


def _rows(program: Compiled) -> Iterator[tuple[str, ...]]:
    """A row for each kind of collective, the program's name in the first."""
    head = program.name, runs_text(program.ranks), str(program.runs)
    if not program.collectives:
        yield *head, "none", "", "", "", ""
    for each in program.collectives:
        times = "?" if each.times is None else f"{'<= ' * each.is_at_most}{each.times}"
        all_bytes = "?" if each.all_bytes is None else f"{'<= ' * each.is_at_most}{size_text(each.all_bytes)}"
        yield *head, each.kind, str(each.instructions), times, size_text(each.bytes), all_bytes
        head = "", "", ""


def program_text(parts: Parts, found: Inspected) -> str:
    """Return what ranks run: the table of ticks, or the list that the host dispatches."""
    ticks, schedule = parts.ticks, parts.schedule
    if ticks is None:
        return f"what the host dispatches in a step\n{listing(found.dispatch, schedule.stages_of)}"
    slots = ", ".join(f"{number} of {kind}" for kind, number in ticks.num_slots.items() if number)
    which = "an F, then a B, and a hop each way" if ticks.program == "pair" else "one task of any kind"
    head = f"one scan over {ticks.num_ticks} ticks, each {which}; slots of a rank: {slots or 'none'}"
    if ticks.program == "pair" and parts.config.executor.idle == "compute":
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


def _texts(wanted: Sequence[str], parts: Parts, found: Inspected) -> dict[str, str]:
    """Return the text of each file that goes to inspect.out."""
    texts = {}
    for what in wanted:
        if what == "summary":
            texts["summary.txt"] = _summary_text(parts, found)
        elif what == "program":
            texts["program.txt"] = program_text(parts, found)
        else:
            texts |= {f"{each.name.replace(' ', '_')}.{what}.txt": each.text(what) for each in found.programs}
    return texts


def _summary_text(parts: Parts, found: Inspected) -> str:
    text = StringIO()
    show_summary(Console(file=text, width=FILE_WIDTH, color_system=None), parts, found)
    return text.getvalue()
