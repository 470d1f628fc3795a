"""Schedules as one self-contained html file: charts on canvases, their data deflated inside."""

import base64
import json
import sys
import zlib
from array import array
from collections.abc import Sequence
from typing import Any

from ppctl.reports.charts.palette import INK, shade
from ppctl.reports.charts.schedule_drawing import KIND_NAMES, Drawing, picked, reasons
from ppctl.reports.page_kit import asset, filled, page, soft, text
from ppctl.schedule.ir import ALL_KINDS, KINDS, PART_KINDS
from ppctl.schedule.simulator import MOST_TASKS, Timeline


def schedules_page(drawings: Sequence[Drawing]) -> str:
    """Return a page: a summary of all drawings, then their charts on one time axis."""
    title = drawings[0].title
    if len(drawings) > 1:
        title = f"Schedules: {', '.join(drawing.label for drawing in drawings)}"
    return page(title, charts_html(drawings), main='<main class="wide">')


def charts_html(drawings: Sequence[Drawing], notes: Sequence[str] = ()) -> str:
    """Return notes and charts with their buttons, once in a page; only notes without drawings."""
    said = "".join(f"{soft(text(note))}\n" for note in notes)
    if not drawings:
        return said
    data = json.dumps([chart_data(drawing) for drawing in drawings]).replace("<", "\\u003c")
    script = "".join(map(asset, ("page.js", "page_input.js", "page_start.js")))
    return said + filled("charts.html", JS=script, DATA=data)


def too_many_tasks(num_tasks: int) -> str | None:
    """Return why a step is not drawn; None where it can be."""
    if num_tasks <= MOST_TASKS:
        return None
    return f"Not drawn: {num_tasks:,} tasks are too many for a chart ({MOST_TASKS:,} at most)."


def chart_data(drawing: Drawing) -> dict[str, Any]:
    """Return the data of one drawing that the page's script reads.

    `tasks` is base64 of deflated little-endian arrays in this order, each over all tasks, rank
    after rank in program order: start (float64), waits_for (int32: distance to the number of that
    task, 0 for none), stage (uint32), microbatch (uint32), kind (uint8: index in `kinds`). `memory`
    is the same of time (float32) and of activations (float32), over the points of every rank's
    curve. A task of kind k and stage s lasts `seconds[k][s]`, unless the timeline is uneven: then
    `lasts` is the same of each task's seconds (float64), otherwise of nothing.
    """
    timeline, schedule = drawing.timeline, drawing.schedule
    num_chunks = schedule.num_chunks
    return {
        # 1. the summary
        **picked(drawing, "label", "title", "verdict"),
        "reasons": reasons(drawing),
        **picked(timeline, "makespan_s", "period_s", "bubble_fraction"),
        **picked(drawing, "lower_bound_s", "period_bound_s", "labelled_s", "longest_label"),
        "peak_bound": max(drawing.peak_bounds),
        "hop_s": timeline.costs.transfer_s,
        "bubbles": timeline.bubble_fractions,
        "peaks": timeline.peak_activations,
        # 2. stages and kinds
        **picked(schedule, "num_microbatches", "rank_of", "chunk_of"),
        "num_tasks": [len(program) for program in schedule.ranks],
        "kinds": ALL_KINDS,
        "num_stage_kinds": len(KINDS),  # the other kinds are of parts of the vocabulary, by rank
        "present": drawing.kinds,
        "kind_names": [KIND_NAMES[kind] for kind in ALL_KINDS],
        "colours": [
            [shade(k, 0 if k in PART_KINDS else chunk, num_chunks) for chunk in range(num_chunks)]
            for k in ALL_KINDS
        ],
        "ink": INK,
        "seconds": [
            [
                timeline.costs.seconds(kind, s, num_chunks)
                for s in range(len(schedule.ranks_of(kind)))
            ]
            for kind in ALL_KINDS
        ],
        # 3. tasks and memory
        **_arrays(timeline),
    }


def _arrays(timeline: Timeline) -> dict[str, Any]:
    """Return the packed arrays of `chart_data`."""
    tasks = [task for tasks in timeline.schedule.ranks for task in tasks]
    index = {task: i for i, task in enumerate(tasks)}
    waited = (timeline.waits_for(task) for task in tasks)
    curves = [timeline.memory_curve(rank) for rank in range(timeline.schedule.num_ranks)]
    lasts = (timeline.end_s[t] - timeline.start_s[t] for t in tasks) if timeline.is_uneven else ()
    return {
        "tasks": _packed(
            array("d", (timeline.start_s[task] for task in tasks)),
            array("i", (0 if w is None else index[w] - i for i, w in enumerate(waited))),
            array("I", (task.stage for task in tasks)),
            array("I", (task.microbatch for task in tasks)),
            array("B", (ALL_KINDS.index(task.kind) for task in tasks)),
        ),
        "lasts": _packed(array("d", lasts)),
        "num_points": [len(curve) for curve in curves],
        "memory": _packed(
            array("f", (at_s for curve in curves for at_s, _ in curve)),
            array("f", (live for curve in curves for _, live in curve)),
        ),
    }


def _packed(*arrays: array) -> str:
    """Return arrays as base64 of deflated little-endian bytes."""
    for each in arrays:
        if sys.byteorder == "big":
            each.byteswap()
    return base64.b64encode(zlib.compress(b"".join(each.tobytes() for each in arrays), 9)).decode()
