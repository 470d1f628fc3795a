"""Schedules as one html file that loads nothing: charts on canvases, their data deflated inside the page."""

from __future__ import annotations

import base64
import html
import json
import re
import sys
import zlib
from array import array
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from ppctl.reports.charts.drawing import KIND_NAMES, Drawing, reasons
from ppctl.reports.charts.palette import INK, shade
from ppctl.schedule.ir import ALL_KINDS, KINDS, PART_KINDS


def schedules_page(drawings: Sequence[Drawing]) -> str:
    """Return a page: a summary of all drawings, then the charts below each other on one time axis."""
    title = drawings[0].title if len(drawings) == 1 else "Schedules: " + ", ".join(d.label for d in drawings)
    return html_page(title, f"<main>\n{charts_html(drawings)}</main>\n")


def html_page(title: str, content: str, *styles: str) -> str:
    """Return a page of some html below its title; `styles` are further files of this folder."""
    return _filled(
        "page.html", TITLE=html.escape(title), CSS="".join(map(_read, ("page.css", *styles))), CONTENT=content
    )


def charts_html(drawings: Sequence[Drawing]) -> str:
    """Return the html of charts with their buttons, once in a page."""
    data = json.dumps([chart_data(drawing) for drawing in drawings]).replace("<", "\\u003c")
    script = "".join(map(_read, ("page.js", "page_input.js", "page_start.js")))
    return _filled("charts.html", JS=script, DATA=data)


def _filled(name: str, **texts: str) -> str:
    """Return a file of this folder with `texts` in the place of @@their names@@."""
    return re.sub(r"@@(\w+)@@", lambda found: texts[found[1]], _read(name))


def _read(name: str) -> str:
    return (files("ppctl.reports.charts") / name).read_text(encoding="utf-8")


def chart_data(drawing: Drawing) -> dict[str, Any]:
    """Return the data of one drawing that the page's script reads.

    `tasks` is base64 of deflated little-endian arrays in this order, each over all tasks, rank after rank in program
    order: start (float64), waits_for (int32: distance to the number of that task, 0 for none), stage (uint32),
    microbatch (uint32), kind (uint8: index in `kinds`). `memory` is the same of time (float32) and of activations
    (float32), over the points of every rank's curve. A task of kind k and stage s lasts `seconds[k][s]`, unless the
    timeline is uneven: then `lasts` is the same of each task's seconds (float64), otherwise of nothing.
    """
    timeline, schedule = drawing.timeline, drawing.schedule
    tasks = [task for tasks in schedule.ranks for task in tasks]
    index = {task: i for i, task in enumerate(tasks)}
    waited = (timeline.waits_for(task) for task in tasks)
    curves = [timeline.memory_curve(rank) for rank in range(schedule.num_ranks)]
    num_chunks = schedule.num_chunks
    return {
        "label": drawing.label,
        "title": drawing.title,
        "verdict": drawing.verdict,
        "labelled_s": drawing.labelled_s,
        "longest_label": drawing.longest_label,
        "reasons": reasons(drawing),
        "makespan_s": timeline.makespan_s,
        "period_s": timeline.period_s,
        "lower_bound_s": drawing.lower_bound_s,
        "period_bound_s": drawing.period_bound_s,
        "peak_bound": max(drawing.peak_bounds),
        "hop_s": timeline.costs.hop_s,
        "bubble_fraction": timeline.bubble_fraction,
        "bubbles": timeline.bubble_fractions,
        "peaks": timeline.peak_activations,
        "num_microbatches": schedule.num_microbatches,
        "num_tasks": [len(program) for program in schedule.ranks],
        "num_points": [len(curve) for curve in curves],
        "rank_of": schedule.rank_of,
        "chunk_of": schedule.chunk_of,
        "kinds": ALL_KINDS,
        "num_stage_kinds": len(KINDS),  # the others are of parts of the vocabulary, whose number is that of their rank
        "present": drawing.kinds,
        "kind_names": [KIND_NAMES[kind] for kind in ALL_KINDS],
        "colours": [
            [shade(kind, 0 if kind in PART_KINDS else chunk, num_chunks) for chunk in range(num_chunks)]
            for kind in ALL_KINDS
        ],
        "ink": INK,
        "seconds": [
            [timeline.costs.seconds(kind, place, num_chunks) for place in schedule.places(kind)] for kind in ALL_KINDS
        ],
        "tasks": _packed(
            array("d", (timeline.start_s[task] for task in tasks)),
            array("i", (0 if w is None else index[w] - i for i, w in enumerate(waited))),
            array("I", (task.stage for task in tasks)),
            array("I", (task.microbatch for task in tasks)),
            array("B", (ALL_KINDS.index(task.kind) for task in tasks)),
        ),
        "lasts": _packed(
            array("d", (timeline.end_s[t] - timeline.start_s[t] for t in tasks) if timeline.is_uneven else ())
        ),
        "memory": _packed(
            array("f", (at_s for curve in curves for at_s, _ in curve)),
            array("f", (live for curve in curves for _, live in curve)),
        ),
    }


def _packed(*arrays: array) -> str:
    return base64.b64encode(zlib.compress(b"".join(_little(a) for a in arrays), 9)).decode()


def _little(values: array) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()
