"""A schedule drawn to a file, in the form that the file's name asks for."""

import io
import json
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from ppctl.errors import ConfigError
from ppctl.reports.charts.html_charts import schedules_page
from ppctl.reports.charts.image_charts import FORMS, image
from ppctl.reports.charts.schedule_drawing import Drawing, drawing_document
from ppctl.reports.charts.text_chart import show_gantt
from ppctl.reports.terminal_output import write_file
from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import Schedule
from ppctl.schedule.schedule_text import to_csv
from ppctl.schedule.simulator import simulate

TEXT_WIDTH = 200  # columns


def draw(schedule: Schedule, path: str | Path, costs: Costs | None = None) -> Path:
    """Draw a schedule as simulated on free-running ranks; return where.

    Args:
        path: Its ending names the form: .svg, .pdf, .png, .html (interactive), .json,
        .txt, .csv. costs: Seconds of tasks; None: F = I = W = 1 s.

    Raises:
        ConfigError: The ending is none of these, or the file cannot be written.
    """
    path = Path(path)
    if path.suffix not in _FORM_OF:
        raise ConfigError(f"{path} ends in none of {', '.join(_FORM_OF)}.")
    timeline = simulate(schedule, Costs() if costs is None else costs)
    drawing = Drawing(schedule.name, timeline)
    write_file(f"path={path}", path, DRAWN_AS[_FORM_OF[path.suffix]](drawing))
    return path


def _text(drawing: Drawing) -> str:
    file = io.StringIO()
    show_gantt(Console(file=file, width=TEXT_WIDTH, color_system=None), drawing)
    return file.getvalue()


DRAWN_AS: dict[str, Callable[[Drawing], str | bytes]] = {  # the content of a file, by form
    "text": _text,
    "html": lambda drawing: schedules_page([drawing]),
    **{form: lambda drawing, form=form: image([drawing], form) for form in FORMS},
    "json": lambda drawing: json.dumps(drawing_document(drawing)) + "\n",
    "csv": lambda drawing: to_csv(drawing.schedule.ranks),
}
_FORM_OF = {".txt" if form == "text" else f".{form}": form for form in DRAWN_AS}
