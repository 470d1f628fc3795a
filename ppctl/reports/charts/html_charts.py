"""Schedules as one self-contained html file: charts on canvases, with their data deflated."""

import base64
import json
import math
import zlib
from collections.abc import Sequence
from typing import Any

from ppctl.reports.charts.schedule_drawing import (
    KIND_NAMES,
    Drawing,
    drawing_document,
    picked,
    reasons,
)
from ppctl.reports.page_kit import asset, filled, page, soft, text
from ppctl.reports.palette import INK, shade
from ppctl.schedule.ir import ALL_KINDS, MOST_TASKS, PART_KINDS

DIGITS = 7  # digits of the makespan that rounded numbers keep; a wide screen shows four


def schedules_page(drawings: Sequence[Drawing]) -> str:
    """Return an html page: a summary of all drawings, then their charts on one time axis."""
    title = drawings[0].title
    if len(drawings) > 1:
        title = f"Schedules: {', '.join(drawing.label for drawing in drawings)}"
    return page(title, charts_html(drawings), main='<main class="wide">')


def charts_html(drawings: Sequence[Drawing], notes: Sequence[str] = ()) -> str:
    """Return html: notes, then the charts, if any, with buttons.

    A page may hold only one result with charts.
    """
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


def _rounded(value: Any, decimals: int) -> Any:
    """Return lists and dicts with floats rounded to `decimals`, to keep the page small."""
    if isinstance(value, dict):
        return {key: _rounded(each, decimals) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each, decimals) for each in value]
    return round(value, decimals) if isinstance(value, float) else value


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
    numbers = _rounded(numbers, DIGITS - math.ceil(math.log10(timeline.makespan_s or 1.0)))
    # 2. words and colours
    chunks = range(schedule.num_chunks)
    return {
        **picked(drawing, "label", "title", "verdict", "labelled_s", "longest_label"),
        "reasons": reasons(drawing),
        "kinds": ALL_KINDS,
        "kind_names": [KIND_NAMES[kind] for kind in ALL_KINDS],
        "colours": [
            [shade(k, 0 if k in PART_KINDS else i, len(chunks)) for i in chunks] for k in ALL_KINDS
        ],
        "ink": INK,
        "numbers": base64.b64encode(zlib.compress(json.dumps(numbers).encode())).decode(),
    }
