"""Several runs as one html page: what differs between them in a table, their losses and speeds drawn together."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from ppctl.reports.charts.elements import exact, link, printable, section, table
from ppctl.reports.charts.html import html_page
from ppctl.reports.charts.palette import line_sample
from ppctl.reports.run_page.figures import SPEED_NAMES, figures_of_runs
from ppctl.reports.run_page.page import MARK, STYLES, loss_text, steps_text, warnings_of
from ppctl.reports.run_page.read import SPEEDS, RecordedRun
from ppctl.reports.run_settings import differing_settings
from ppctl.reports.terminal import size_text

NONE = "&ndash;"
MOST_LETTERS = 160  # of the names of runs that are drawn together
KEY = re.compile(r"(?<![^,/])[A-Za-z_][\w.]*=")  # in the name of a sweep's job
TOGETHER = 8  # runs whose curves are drawn in one figure, where they are told from each other
OPTIONAL = ("eval loss", "MFU")  # columns of numbers that not every kind of run has
ABOUT = (
    "Seconds of a step and speed are medians. Memory: of the fullest device, as compiled. Bubble: predicted; "
    "measured: of a timeline (run.timeline=true)."
)
Value = Callable[[RecordedRun], float | None]


def compare_page(runs: Sequence[RecordedRun], file: Path) -> str:
    """Return the text of the page; `file`: where it will stand."""
    labels = [f"{number} {Path(_brief(run.summary.name)).name}" for number, run in enumerate(runs, 1)]
    sections = [
        section("Runs", _table(runs)),
        _figures(runs, list(map(printable, labels))),
        section("Where they are", _folded(len(runs), "All directories", _places(runs, file))),
        _warnings(runs),
    ]
    return html_page(f"{len(runs)} runs", f"{MARK}\n{''.join(sections)}</main>\n", *STYLES)


def _figures(runs: Sequence[RecordedRun], labels: Sequence[str]) -> str:
    """Return the curves of all runs, of many a page for each TOGETHER of them, of which one opens at a time."""
    pages = [f'<div class="figures">{"".join(figures)}</div>' for figures in figures_of_runs(runs, labels, TOGETHER)]
    if not any("<figure>" in page for page in pages):
        return ""
    if len(pages) == 1:
        return section("Over the steps", pages[0])
    texts = []
    for number, page in enumerate(pages):
        first, last = number * TOGETHER + 1, min(len(runs), (number + 1) * TOGETHER)
        of = f"Runs {first} to {last}" if last > first else f"Run {first}"
        names = ", ".join(labels[first - 1 : last])
        names = names if len(names) <= MOST_LETTERS else ""
        shown = page if "<figure>" in page else "<p>No step is recorded.</p>"
        head = f"<summary><b>{of}</b> <small>{escape(names)}</small></summary>"
        texts.append(f'<details class="page" name="curves"{" open" if number == 0 else ""}>{head}{shown}</details>')
    about = f"<p class='soft'>{TOGETHER} runs at a time, all on the same axes.</p>"
    return section("Over the steps", about + "".join(texts))


def _folded(number: int, title: str, content: str) -> str:
    """Return a content of so many rows, of many folded away below its title."""
    return content if number <= TOGETHER else f"<details><summary>{title}</summary>{content}</details>"


def _table(runs: Sequence[RecordedRun]) -> str:
    differ = differing_settings([run.config for run in runs], [run.words for run in runs])
    columns = [
        column
        for column in _columns(runs)
        if column[0] not in OPTIONAL or any(column[1](run) is not None for run in runs)
    ]
    rows = []
    for index, run in enumerate(runs):
        settings = [NONE if value is None else escape(printable(value)) for value in _at(index, differ)]
        values = ((value(run), text) for _, value, text in columns)
        numbers = [NONE if value is None else exact(value, text(value)) for value, text in values]
        name = f"{line_sample(index % TOGETHER)}{index + 1} {_name(run)}"
        rows.append([name, *settings, run.summary.status, steps_text(run), loss_text(run), *numbers])
    names = ["", *map(_breakable, differ), "status", "step", "loss", *(name for name, _, _ in columns)]
    same = "" if differ else " No requested setting differs."
    return f'<div class="jobs runs">{table("the runs", names, rows)}</div><p class="soft">{ABOUT}{same}</p>'


def _name(run: RecordedRun) -> str:
    """Return the html of a run's name, brief, with the whole one in a title."""
    name = printable(run.summary.name)
    return escape(name) if _brief(name) == name else f'<span title="{escape(name)}">{escape(_brief(name))}</span>'


def _brief(name: str) -> str:
    """Return the name of a run without those of settings, whose values tell the jobs of a sweep apart.

    >>> _brief("sweep/schedule=1f1b,optim.lr=1e-3"), _brief("tiny")
    ('sweep/1f1b,1e-3', 'tiny')
    """
    return KEY.sub("", name)


def _columns(runs: Sequence[RecordedRun]) -> list[tuple[str, Value, Callable[[Any], str]]]:
    """Return (name, value of a run, how it is written) of each number."""
    speeds = [speed for speed in SPEEDS if any(run.speed == speed for run in runs)]
    return [
        ("eval loss", lambda run: run.summary.eval_loss, "{:.4f}".format),
        ("s/step", lambda run: run.median("step_time_s"), "{:.4g}".format),
        *((SPEED_NAMES[speed], partial(RecordedRun.median, name=speed), "{:,.0f}".format) for speed in speeds),
        ("MFU", lambda run: run.median("mfu_fraction"), "{:.1%}".format),
        ("memory", lambda run: run.newest.get("memory_bytes"), lambda size: size_text(int(size))),
        ("bubble, ideal", lambda run: run.newest.get("ideal_bubble_fraction"), "{:.1%}".format),
        ("bubble, predicted", lambda run: run.newest.get("predicted_bubble_fraction"), "{:.1%}".format),
        ("bubble, measured", lambda run: run.measured_bubble, "{:.1%}".format),
    ]


def _at(index: int, differ: Mapping[str, Sequence[str | None]]) -> list[str | None]:
    return [values[index] for values in differ.values()]


def _places(runs: Sequence[RecordedRun], file: Path) -> str:
    rows = []
    for number, run in enumerate(runs, 1):
        own = run.summary.path / "report.html"
        links = link(run.summary.path, file) + (f", {link(own, file)}" if own.exists() else "")
        rows.append([f"{number} {escape(printable(run.summary.name))}", links])
    return f'<div class="stages">{table("directories", [], rows)}</div>'


def _warnings(runs: Sequence[RecordedRun]) -> str:
    """Return what is odd about the runs; what is the same of several is said once."""
    whose: dict[str, list[str]] = {}
    for run in runs:
        for each in warnings_of(run):
            whose.setdefault(each, []).append(run.summary.name)
    lines = (f"{', '.join(names)}: {each}" for each, names in whose.items())
    items = "".join(f"<li>{escape(printable(line))}</li>" for line in lines)
    return section("To know", f'<ul class="warnings">{items}</ul>') if items else ""


def _breakable(name: str) -> str:
    return escape(printable(name)).replace(".", ".<wbr>").replace("_", "_<wbr>")
