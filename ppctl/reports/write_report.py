"""Reports of runs: the path of the page, the numbers as JSON, and the page of several runs."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ppctl.errors import ConfigError
from ppctl.reports import page_kit as kit
from ppctl.reports.charts.page_figures import MOST_LINES
from ppctl.reports.foreign_files import printable
from ppctl.reports.recorded_settings import differing_settings
from ppctl.reports.run_page.one_run_page import MARK, figures_of, loss_text, run_page, warnings_of
from ppctl.reports.run_page.read_run import NEWEST, RecordedRun
from ppctl.reports.runs_table import run_document
from ppctl.reports.terminal_output import check_file, show_json, write_file

FILE = "report.html"
NONE = "&ndash;"
COLUMNS = (  # numbers of the table; a column needs at least one value
    *("eval_loss", "step_time_s", *kit.SPEEDS, "mfu_fraction", "memory_bytes"),
    *("ideal_bubble_fraction", "predicted_bubble_fraction", "measured_bubble_fraction"),
)
ABOUT = (
    "Step time and speed are medians. Memory: of the fullest device, as compiled. "
    "Bubble, measured: of a timeline (run.timeline=true)."
)
Differ = Mapping[str, Sequence[str | None]]  # values in each run, by setting


def place_of(out: str | None, paths: Sequence[Path]) -> Path:
    """Return the path of the report on the runs in `paths`. ConfigError if it cannot be written.

    out: the requested path; None: report.html, in the directory of a single run, else in the
    current directory.
    """
    file = Path(out) if out is not None else paths[0] / FILE if len(paths) == 1 else Path(FILE)
    named = f"--out {file}" if out is not None else str(file)
    if file.suffix != ".html":
        raise ConfigError(f"{named}: a report is html. Name a FILE.html.")
    if out is None and file.is_symlink():  # a link in a foreign directory must not choose the file
        target = printable(str(file.resolve()))
        raise ConfigError(f"{named} is a link to {target}. Name a file: --out FILE.html.")
    check_file(named, file)
    with suppress(OSError):  # only a report may be overwritten
        if not file.exists() or (file.is_file() and MARK.encode() in file.read_bytes()):
            return file
    what = "the file exists and is not a report of ppctl"
    raise ConfigError(f"{named}: {what}. Move it away, or name another.")


def write_report(runs: Sequence[RecordedRun], file: Path, *, as_json: bool) -> int:
    """Write the report on runs to `file`, and with as_json print its numbers as JSON; return 0."""
    configs = [run.summary.config for run in runs]
    differ = differing_settings(configs, [run.words for run in runs])
    page = run_page(runs[0], file) if len(runs) == 1 else compare_page(runs, differ, file)
    write_file(str(file), file, page)
    if as_json:
        documents = [run_document(run) for run in runs]
        if len(runs) > 1:
            for index, each in enumerate(documents):
                each["differs"] = {name: values[index] for name, values in differ.items()}
        show_json({"file": str(file), "runs": documents})
    return 0


def compare_page(runs: Sequence[RecordedRun], differ: Differ, file: Path) -> str:
    """Return the text of the page. file: the page's path, for relative links."""
    # 1. curves of the first runs
    names = [Path(run.summary.name).name for run in runs]
    labels = [printable(f"{number} {name}") for number, name in enumerate(names, 1)]
    figures = kit.figures(figures_of(runs[:MOST_LINES], labels[:MOST_LINES]))
    few = f"The first {MOST_LINES} runs. Name others to see theirs: ppctl report RUN RUN ..."
    about = kit.soft(few) if figures and len(runs) > MOST_LINES else ""
    # 2. warnings; equal ones of several runs share a line
    whose: dict[str, list[str]] = {}
    for run in runs:
        for each in warnings_of(run):
            whose.setdefault(each, []).append(run.summary.name)
    lines = [f"{', '.join(names)}: {each}" for each, names in whose.items()]
    # 3. the page
    return kit.page(
        f"{len(runs)} runs",
        kit.section("Runs", _table(runs, differ, file)),
        kit.section("Over the steps", about, figures),
        kit.section("To know", kit.bullets(lines)),
        main=MARK,
    )


def _table(runs: Sequence[RecordedRun], differ: Differ, file: Path) -> str:
    """Return a table of runs: a link to the report or directory, settings, state and numbers."""
    found = {name: [_number(run, name) for run in runs] for name in COLUMNS}
    columns = {
        name: kit.column(name, values, NONE)
        for name, values in found.items()
        if any(value is not None for value in values)
    }
    rows = []
    for index, run in enumerate(runs):
        texts = [values[index] for values in differ.values()]
        settings = [NONE if each is None else kit.text(each) for each in texts]
        numbers = [cells[index] for cells in columns.values()]
        if "eval_loss" in columns and run.summary.eval_note:
            numbers[0] += f" {run.summary.eval_note}"
        sample = kit.line_sample(index) if index < MOST_LINES else ""
        report, directory = run.summary.path / FILE, run.summary.path
        place = report if os.path.exists(report) else directory
        name = f"{sample}{index + 1} {kit.link(place, file, run.summary.name)}"
        state = run.summary.status, run.summary.steps_text, loss_text(run)
        rows.append([name, *settings, *state, *numbers])
    heads = "status", "step", "loss", *(kit.NUMBERS[name][0] for name in columns)
    names = ["", *map(kit.breakable, differ), *heads]
    same = "" if differ else " No requested setting differs."
    return kit.table("the runs", names, rows, "jobs runs") + kit.soft(ABOUT + same)


def _number(run: RecordedRun, name: str) -> float | None:
    if name == "eval_loss":
        return run.summary.eval_loss
    if name == "measured_bubble_fraction":
        return run.measured_bubble
    return run.newest.get(name) if name in NEWEST else run.median(name)
