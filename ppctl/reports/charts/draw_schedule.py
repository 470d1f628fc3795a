"""Schedules as files of every format, as charts of html pages, and in notebooks.

A page is one self-contained file: its charts are canvases, their data deflated. Notebooks get plain
tables, and pictures inside <img>, so that svg ids of two cells cannot clash.
"""

import base64
import io
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ppctl.errors import ConfigError
from ppctl.reports.charts import schedule_drawing as drawn
from ppctl.reports.charts.image_charts import FORMS, MAX_RANKS, MAX_VECTORS, image
from ppctl.reports.charts.schedule_drawing import Drawing, drawing_document
from ppctl.reports.page_kit import asset, filled, page, soft, table, text
from ppctl.reports.palette import INK, shade
from ppctl.reports.terminal_output import mapped, size_text, write_file
from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import ALL_KINDS, MOST_TASKS, PART_KINDS, Schedule
from ppctl.schedule.schedule_text import to_csv
from ppctl.schedule.simulator import simulate

TEXT_WIDTH = 200  # columns
DIGITS = 7  # digits of the makespan that rounded numbers keep; a wide screen shows four
LOOK = "max-width:100%;background:white"  # style of a picture in a notebook


def draw(schedule: Schedule, path: str | Path, costs: Costs | None = None) -> Path:
    """Draw a schedule to a file; return the file's path.

    Times are simulated: a task starts once its rank is free and its inputs have arrived.

    Args:
        schedule: The schedule.
        path: A file whose suffix names the format: .svg, .pdf, .png, .html (interactive), .json,
            .txt or .csv.
        costs: Seconds of tasks; None: F = I = W = 1 s.

    Raises:
        ConfigError: The suffix is unknown, or the file cannot be written.
    """
    path = Path(path)
    if path.suffix not in _FORM_OF:
        raise ConfigError(f"{path} has an unknown suffix. Use one of {', '.join(_FORM_OF)}.")
    timeline = simulate(schedule, Costs() if costs is None else costs)
    drawing = Drawing(schedule.name, timeline)
    write_file(f"path={path}", path, DRAWN_AS[_FORM_OF[path.suffix]](drawing))
    return path


def _text(drawing: Drawing) -> str:
    file = io.StringIO()
    # in a notebook rich would display the text instead of writing it
    console = Console(file=file, width=TEXT_WIDTH, color_system=None, force_jupyter=False)
    drawn.show_gantt(console, drawing)
    return file.getvalue()


DRAWN_AS: dict[str, Callable[[Drawing], str | bytes]] = {  # content of a file, by format
    "text": _text,
    "html": lambda drawing: schedules_page([drawing]),
    **{form: lambda drawing, form=form: image([drawing], form) for form in FORMS},
    "json": lambda drawing: json.dumps(drawing_document(drawing)) + "\n",
    "csv": lambda drawing: to_csv(drawing.schedule.ranks),
}
_FORM_OF = {".txt" if form == "text" else f".{form}": form for form in DRAWN_AS}


def schedules_page(drawings: Sequence[Drawing]) -> str:
    """Return an html page: a summary of all drawings, then their charts on one time axis."""
    labels = ", ".join(drawing.label for drawing in drawings)
    title = drawings[0].title if len(drawings) == 1 else f"Schedules: {labels}"
    return page(title, charts_html(drawings), main='<main class="wide">')


def charts_html(drawings: Sequence[Drawing], notes: Sequence[str] = ()) -> str:
    """Return html of notes and charts with buttons; a page may hold only one such result."""
    said = "".join(f"{soft(text(note))}\n" for note in notes)
    if not drawings:
        return said
    data = json.dumps([chart_data(drawing) for drawing in drawings]).replace("<", "\\u003c")
    script = "".join(map(asset, ("page.js", "page_input.js", "page_start.js")))
    return said + filled("charts.html", JS=script, DATA=data)


def too_many_tasks(num_tasks: int) -> str | None:
    """Return the reason if a step has too many tasks to draw, else None."""
    if num_tasks <= MOST_TASKS:
        return None
    return f"Not drawn: {num_tasks:,} tasks are too many for a chart ({MOST_TASKS:,} at most)."


def chart_data(drawing: Drawing) -> dict[str, Any]:
    """Return the words and colours of a chart, and its numbers as deflated JSON.

    The numbers are those of `drawing_document` and two more lists. waits_for: for each task, rank
    after rank, the index of the task that it waits for. memory: for each rank, the points
    (seconds, activations) of its memory curve.
    """
    # 1. numbers
    timeline, schedule = drawing.timeline, drawing.schedule
    tasks = [task for tasks in schedule.ranks for task in tasks]
    place = {task: i for i, task in enumerate(tasks)}
    waited = map(timeline.waits_for, tasks)
    numbers = drawing_document(drawing) | {
        "waits_for": [None if task is None else place[task] for task in waited],
        "memory": [timeline.memory_curve(rank) for rank in range(schedule.num_ranks)],
    }
    decimals = DIGITS - math.ceil(math.log10(timeline.makespan_s or 1.0))  # a small page
    numbers = mapped(numbers, lambda x: round(x, decimals) if isinstance(x, float) else x)
    # 2. words and colours
    chunks = range(schedule.num_chunks)
    return {
        **drawn.picked(drawing, "label", "title", "verdict", "labelled_s", "longest_label"),
        "reasons": drawn.reasons(drawing),
        "kinds": ALL_KINDS,
        "kind_names": [drawn.KIND_NAMES[kind] for kind in ALL_KINDS],
        "colours": [
            [shade(k, 0 if k in PART_KINDS else i, len(chunks)) for i in chunks] for k in ALL_KINDS
        ],
        "ink": INK,
        "numbers": base64.b64encode(zlib.compress(json.dumps(numbers).encode())).decode(),
    }


def schedule_html(schedule: Schedule) -> str:
    """Return the html chart of a schedule with F = I = W = 1 s; a sentence if it is too large.

    >>> from ppctl.schedule.families.registry import build
    >>> schedule_html(build("gpipe", 1024, 1))
    '<p>gpipe: 1024 ranks, 1 microbatch. Too large for a picture here: ppctl.draw makes a page.</p>'
    """
    if schedule.num_ranks > MAX_RANKS or sum(map(len, schedule.ranks)) > MAX_VECTORS:
        words = f"{drawn.title_of(schedule.name, schedule)}. Too large for a picture here"
        return f"<p>{text(words)}: ppctl.draw makes a page.</p>"
    drawing = Drawing(schedule.name, simulate(schedule, Costs()))
    data = base64.b64encode(image([drawing], "svg")).decode()
    words = text(f"{drawing.title}; {drawing.verdict}")
    return f'<img alt="{words}" style="{LOOK}" src="data:image/svg+xml;base64,{data}">'


def pipeline_html(
    facts: Mapping[str, str],
    layers: Sequence[str],
    memory: Sequence[Mapping[str, int]],
    schedule: Schedule | None,
) -> str:
    """Return html: the facts, a table of each rank's layers and bytes, the schedule's chart.

    facts: values by name. layers: a text for each rank. memory: bytes by part, for each rank.
    schedule: None: no chart.
    """
    lines = "".join(f"<b>{text(name)}</b> {text(words)}<br>" for name, words in facts.items())
    parts = [part for part in memory[0] if any(held.get(part) for held in memory)]
    rows = [
        [str(r), text(held), size_text(sum(sizes.values()))]
        + [size_text(sizes.get(part, 0)) for part in parts]
        for r, (held, sizes) in enumerate(zip(layers, memory, strict=True))
    ]
    listed = table("ranks", ["rank", "layers", "memory", *map(text, parts)], rows)
    return f"<p>{lines}</p>{listed}" + ("" if schedule is None else schedule_html(schedule))
