"""`ppctl report`: one run, or several compared, as an html page to send. Starts no JAX."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppctl.cli.choices import schema_of
from ppctl.cli.command_options import Parser
from ppctl.cli.commands.runs import DEFAULT_DIR, run_named
from ppctl.cli.resume_command import resumption
from ppctl.cli.subcommands.runs_sweep import find_sweep, report_sweep
from ppctl.config import Auto, Csv, Mesh
from ppctl.config.schedule_from_config import Planned, pipeline_of
from ppctl.errors import ConfigError, PpctlError, one_line
from ppctl.reports import write_report as report
from ppctl.reports.charts.draw_schedule import too_many_tasks
from ppctl.reports.run_files import SCHEDULE_FILE, is_run
from ppctl.reports.run_page.one_run_page import run_page
from ppctl.reports.run_page.read_run import RecordedRun, read_run
from ppctl.reports.run_status import COSTS
from ppctl.reports.terminal_output import replace_file
from ppctl.schedule.costs import Costs, task_costs
from ppctl.schedule.placement_costs import Placed

NOTES = """\
RUN is a path, a name in the list of `ppctl runs`, or a unique part of one. Several runs are
compared: differences, and curves in the same figures. SWEEP, a sweep's directory or its name, gives
the page of its jobs. The page is one self-contained file: it can be mailed, and opens offline. It
shows the current state; write it again while a run goes on."""


def parser() -> Parser:
    """Return the parser for the options of `ppctl report`."""
    usage = "RUN [RUN ...] [--out FILE.html] [--json]"
    options = Parser("report", usage, notes=NOTES, words="runs", nargs="+")
    about = (
        "file to write (default: report.html in the run's directory; of several runs, in the "
        "current one). Only a report is overwritten"
    )
    options.add_argument("--out", metavar="FILE", help=about)
    return options


def serve(options: Namespace) -> int:
    """Write the page of a run or of several; return the exit code."""
    sweep = find_sweep(options.runs[0], [Path(DEFAULT_DIR)]) if len(options.runs) == 1 else None
    if sweep is not None:
        return report_sweep(sweep, options.out, as_json=options.json)
    runs = [run_named(word) for word in options.runs]
    places: dict[Path, str] = {}
    for word, (_, path) in zip(options.runs, runs, strict=True):
        place = path.resolve()
        if place in places:
            raise ConfigError(f"{places[place]} and {word} are the same run. Name each once.")
        places[place] = word
    file = report.place_of(options.out, [path for _, path in runs])
    read = [_read(*each, is_alone=len(runs) == 1) for each in runs]
    return report.write_report(read, file, as_json=options.json)


def write_report_of(run_dir: Path) -> None:
    """Write the report of a run in its directory, unless that would overwrite another file."""
    if not is_run(run_dir):
        return
    with suppress(PpctlError, OSError):
        file = report.place_of(None, [run_dir])
        replace_file(file, run_page(_read(str(run_dir), run_dir, is_alone=True), file))


def _read(name: str, path: Path, *, is_alone: bool) -> RecordedRun:
    old = resumption(path)
    words = old.words, old.command, old.notes
    run = read_run(name, path, *words, pipeline="Not drawn for several runs.")
    return replace(run, pipeline=_pipeline(run)) if is_alone else run


def _pipeline(run: RecordedRun) -> Planned | str:
    """Return the schedule of a run's settings, or the reason why it cannot be drawn."""
    try:
        return _pipeline_of(run.summary.path, run.summary.config, run.starts)
    except PpctlError as error:
        reason = one_line(error)
    except (KeyError, TypeError, ValueError, AttributeError, OSError):
        reason = "this version of ppctl cannot read the settings of the run."
    return f"The schedule cannot be drawn: {reason}"


def _pipeline_of(
    run_dir: Path, recorded: Mapping[str, Any], starts: Sequence[Mapping[str, Any]]
) -> Planned | str:
    # 1. the settings
    groups = ((part, recorded[part]) for part in ("schedule", "executor"))
    schedule, executor = (schema_of(part, each["name"])(**each) for part, each in groups)
    mesh = Mesh(**recorded["mesh"])
    for part in (mesh, schedule, executor):
        part.check()
    if executor.name == "reference":
        return "executor=reference has no pipeline to draw."
    # 2. for schedule=auto, the schedule that the run found and stored
    found, number = run_dir / SCHEDULE_FILE, schedule.num_microbatches
    is_auto = isinstance(schedule, Auto) and found.is_file()
    if is_auto:
        schedule = Csv(name="csv", path=str(found), num_microbatches=number)
    # 3. its size and costs, and the schedule as the executor ran it
    num_chunks = getattr(schedule, "num_chunks", 2 * getattr(schedule, "num_waves", 1))
    if large := too_many_tasks(3 * mesh.pp * number * num_chunks):
        return large
    costs = task_costs(executor.remat)
    if starts and isinstance(relative := starts[-1].get(COSTS), dict):
        costs = Costs(**{name: float(value) for name, value in relative.items()})
    num_layers, trained = recorded["model"]["num_layers"] or mesh.pp, costs.weight_grad_s
    assert isinstance(trained, float), "the cost of every stage"
    on_any = Placed(costs).anywhere
    planned = pipeline_of(schedule, executor, mesh.pp, num_layers, trained, on_any)
    step = replace(planned.step, costs=costs)
    return planned._replace(step=step, label="auto" if is_auto else planned.label)
