"""A schedule drawn to a file, in the form that the file's name asks for."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from ppctl.errors import ConfigError
from ppctl.reports.charts.drawing import Drawing, drawing_of_timeline
from ppctl.reports.charts.html import schedules_page
from ppctl.reports.charts.image import FORMS, image
from ppctl.reports.charts.perfetto import trace
from ppctl.reports.charts.text_chart import show_gantt
from ppctl.reports.terminal import write_file
from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import Schedule
from ppctl.schedule.simulate import simulate
from ppctl.schedule.text import to_csv

TEXT_WIDTH = 200  # columns


def draw(schedule: Schedule, path: str | Path, costs: Costs | None = None) -> Path:
    """Draw a schedule as simulated on free-running ranks; return where.

    Args:
        path: Its ending names the form: .svg, .pdf, .png, .html (interactive), .json (for Perfetto), .txt, .csv.
        costs: Seconds of tasks; None: F = I = W = 1 s.

    Raises:
        ConfigError: The ending is none of these, or the file cannot be written.
    """
    path = Path(path)
    if path.suffix not in _FORMS:
        raise ConfigError(f"{path} ends in none of {', '.join(_FORMS)}.")
    drawing = drawing_of_timeline(schedule.name, simulate(schedule, Costs() if costs is None else costs))
    write_file(f"path={path}", path, _FORMS[path.suffix](drawing))
    return path


def _text(drawing: Drawing) -> str:
    file = io.StringIO()
    show_gantt(Console(file=file, width=TEXT_WIDTH), drawing)
    return file.getvalue()


_FORMS: dict[str, Callable[[Drawing], str | bytes]] = {
    **{f".{form}": lambda drawing, form=form: image([drawing], form) for form in FORMS},
    ".html": lambda drawing: schedules_page([drawing]),
    ".json": lambda drawing: json.dumps(trace(drawing)),
    ".txt": _text,
    ".csv": lambda drawing: to_csv(drawing.schedule.ranks),
}
