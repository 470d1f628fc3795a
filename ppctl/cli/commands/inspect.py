"""`ppctl inspect`: show the programs of a run: ticks, collectives, jaxpr, StableHLO, HLO.

No step runs. The view `summary` counts the collectives in the compiled programs; the view `program`
is the table of ticks that the XLA program of executor=spmd reads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from ppctl.config import Config
from ppctl.reports import terminal_output as terminal
from ppctl.reports.terminal_output import OutputConsole, show_json, size_text
from ppctl.schedule.partition.partition import ranks_text
from ppctl.schedule.tick_lowering import Ticks, TickTask, tick_tasks, tick_text
from ppctl.training.pipeline.engines import step_programs
from ppctl.training.pipeline.engines.step_programs import StepProgram, StepPrograms
from ppctl.training.pipeline.job import TrainingJob, assemble

COLUMNS = (  # columns of the summary
    *("program", "on ranks", "runs a rank", "collective", "over"),
    *("instructions", "times a run", "bytes a time", "bytes a run", "beside products"),
)
LEAST = ("instructions", "bytes a time", "times a run")  # columns that make room first


def inspect(config: Config, *, as_json: bool) -> int:
    """Print the views of inspect.what; return 0."""
    job = assemble(config)
    found, ticks = job.pipe.programs(), job.pipe.ticks
    usual = ["summary"] if ticks is None else ["summary", "program"]
    wanted = usual if config.inspect.what is None else [config.inspect.what]
    if "summary" in wanted or "hlo" in wanted:
        step_programs.compile_all(found.programs)
    if as_json:
        show_json(document(job, found, wanted))
        return 0
    for what in wanted:
        if what == "summary":
            show_summary(OutputConsole(), job, found)
        elif what == "program" and ticks is not None:
            print(program_text(ticks), end="")
        else:
            for each in found.programs:
                head = f"# {each.name}\n" if len(found.programs) > 1 else ""
                print(head + each.text(what), end="")
    return 0


def document(job: TrainingJob, found: StepPrograms, wanted: Sequence[str]) -> dict[str, Any]:
    """Return the JSON document of the views in `wanted`."""
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
    if "program" in wanted and job.pipe.ticks is not None:
        rows = [list(map(_tasks, row)) for row in tick_tasks(job.pipe.ticks)]
        shown |= {"ticks": rows, "num_slots": job.pipe.ticks.num_slots}
    for form in step_programs.FORMS:
        if form in wanted:
            shown[form] = {each.name: each.text(form) for each in found.programs}
    return shown


def _program(program: StepProgram) -> dict[str, Any]:
    names = ("name", "ranks", "runs", "temp_bytes")
    collectives = [asdict(each) for each in program.collectives]
    return {name: getattr(program, name) for name in names} | {"collectives": collectives}


def _tasks(cell: Sequence[TickTask]) -> list[dict[str, Any]]:
    return [{"task": str(one.task), "is_run": one.is_run, "to": one.to} for one in cell]


def _devices(job: TrainingJob) -> str:
    meshes = job.pipe.meshes
    return f"{meshes.num_devices} x {meshes.device.device_kind}"


# --- the terminal -------------------------------------------------------------------------------


def show_summary(console: Console, job: TrainingJob, found: StepPrograms) -> None:
    """Print a step's communication: collectives in the programs, and transfers between them."""
    config, schedule = job.config, job.pipe.schedule
    which = "no pipeline" if not config.executor.ENGINE.is_pipelined else schedule.name
    what = f"{config.executor.name}: {which}, {schedule.num_microbatches} microbatches"
    axes = config.mesh.axes_text if config.mesh.ranks else ", ".join(config.mesh.axes_text.split())
    mesh = f"mesh={config.mesh.text} ({axes})"
    terminal.show_lines(console, f"{what}, {mesh} on {_devices(job)}")
    title = "collectives of a step (bytes: of their results, on one device)"
    rows = (row for each in found.programs for row in _rows(each))
    terminal.show_table(console, title, COLUMNS, rows, LEAST)
    if found.transfers:
        names = ("from rank", "to rank", "values", "bytes a device")
        transfers = ((t.sender, t.receiver, t.number, size_text(t.bytes)) for t in found.transfers)
        cells = (tuple(map(str, each)) for each in transfers)
        terminal.show_table(console, "transfers of a step", names, cells)


def _rows(program: StepProgram) -> Iterator[tuple[str, ...]]:
    """Yield a row for each pair of collective and axes; only the first row names the program."""
    head = program.name, ranks_text(program.ranks), str(program.runs)
    if not program.collectives:
        yield *head, "none", "", "", "", "", "", ""
    for each in program.collectives:
        at_most = "<= " * each.is_at_most
        times = "?" if each.times is None else f"{at_most}{each.times}"
        all_bytes = "?" if each.all_bytes is None else f"{at_most}{size_text(each.all_bytes)}"
        what = each.kind, " ".join(each.axes), str(each.instructions)
        yield *head, *what, times, size_text(each.bytes), all_bytes, str(each.overlapped)
        head = "", "", ""


def program_text(ticks: Ticks) -> str:
    """Return the table of ticks as text."""
    slots = ", ".join(f"{number} of {kind}" for kind, number in ticks.num_slots.items() if number)
    is_fb = ticks.program == "fb"
    which = "an F, then a B, and a hop each way" if is_fb else "one task of any kind"
    head = f"one scan over {ticks.num_ticks} ticks, each {which}"
    return f"{head}; slots of a rank: {slots or 'none'}\n{tick_text(ticks)}"
