"""Several runs as one html page: their differences in a table, their losses and speeds drawn."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ppctl.reports import page_kit as kit
from ppctl.reports.charts.page_figures import MOST_LINES
from ppctl.reports.foreign_files import printable
from ppctl.reports.recorded_settings import differing_settings
from ppctl.reports.run_page.one_run_page import MARK, loss_text, warnings_of
from ppctl.reports.run_page.read_run import RecordedRun
from ppctl.reports.run_page.run_figures import figures_of_runs
from ppctl.reports.runs_columns import steps_text

NONE = "&ndash;"
KEY = re.compile(r"(?<![^,/])[A-Za-z_][\w.]*=")  # in the name of a sweep's job
OPTIONAL = ("eval_loss", "mfu_fraction")  # columns of numbers that not every kind of run has
ABOUT = (
    "Seconds of a step and speed are medians. Memory: of the fullest device, as compiled. "
    "Bubble: predicted; measured: of a timeline (run.timeline=true)."
)
Value = Callable[[RecordedRun], float | None]


def compare_page(runs: Sequence[RecordedRun], file: Path) -> str:
    """Return the text of the page; `file`: where it will stand."""
    names = [Path(_brief(run.summary.name)).name for run in runs]
    labels = [printable(f"{number} {name}") for number, name in enumerate(names, 1)]
    return kit.page(
        f"{len(runs)} runs",
        kit.section("Runs", _table(runs, file)),
        _figures(runs, labels),
        _warnings(runs),
        main=MARK,
    )


def _figures(runs: Sequence[RecordedRun], labels: Sequence[str]) -> str:
    """Return the curves of the first MOST_LINES runs."""
    figures = kit.figures(figures_of_runs(runs[:MOST_LINES], labels[:MOST_LINES]))
    few = f"The first {MOST_LINES} runs. Name others to see theirs: ppctl report RUN RUN ..."
    about = kit.soft(few) if figures and len(runs) > MOST_LINES else ""
    return kit.section("Over the steps", about, figures)


def _table(runs: Sequence[RecordedRun], file: Path) -> str:
    """Return a row for each run: its name, which leads to its page or directory, and numbers."""
    differ = differing_settings([run.config for run in runs], [run.words for run in runs])
    columns = _columns(runs)
    rows = []
    for index, run in enumerate(runs):
        texts = [values[index] for values in differ.values()]
        settings = [NONE if each is None else kit.text(each) for each in texts]
        numbers = [kit.number(name, value(run), NONE) for name, value in columns.items()]
        sample = kit.line_sample(index) if index < MOST_LINES else ""
        report, directory = run.summary.path / "report.html", run.summary.path
        place = report if report.exists() else directory
        name = f"{sample}{index + 1} {kit.link(place, file, _brief(run.summary.name))}"
        state = run.summary.status, steps_text(run.summary), loss_text(run)
        rows.append([name, *settings, *state, *numbers])
    heads = "status", "step", "loss", *(kit.NUMBERS[name][0] for name in columns)
    names = ["", *map(kit.breakable, differ), *heads]
    same = "" if differ else " No requested setting differs."
    return kit.table("the runs", names, rows, "jobs runs") + kit.soft(ABOUT + same)


def _brief(name: str) -> str:
    """Return the name of a run without names of settings: values tell jobs of a sweep apart.

    >>> _brief("sweep/schedule=1f1b,optim.lr=1e-3"), _brief("tiny")
    ('sweep/1f1b,1e-3', 'tiny')
    """
    return KEY.sub("", name)


def _columns(runs: Sequence[RecordedRun]) -> dict[str, Value]:
    """Return the value of a run for each column, by its name among kit.NUMBERS."""
    speeds = [speed for speed in kit.SPEEDS if any(run.speed == speed for run in runs)]
    medians = ("step_time_s", *speeds, "mfu_fraction")
    newest = ("memory_bytes", "ideal_bubble_fraction", "predicted_bubble_fraction")
    columns: dict[str, Value] = {"eval_loss": lambda run: run.summary.eval_loss}
    columns |= {name: partial(RecordedRun.median, name=name) for name in medians}
    columns |= {name: lambda run, name=name: run.newest.get(name) for name in newest}
    columns["measured_bubble_fraction"] = lambda run: run.measured_bubble
    for name in OPTIONAL:
        if all(columns[name](run) is None for run in runs):
            del columns[name]
    return columns


def _warnings(runs: Sequence[RecordedRun]) -> str:
    """Return the warnings of all runs, equal ones of several runs as one."""
    whose: dict[str, list[str]] = {}
    for run in runs:
        for each in warnings_of(run):
            whose.setdefault(each, []).append(run.summary.name)
    lines = [f"{', '.join(names)}: {each}" for each, names in whose.items()]
    return kit.section("To know", kit.bullets(lines))
