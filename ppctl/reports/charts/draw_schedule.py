"""A schedule drawn to a file, in the form that the file's name asks for."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from ppctl.errors import ConfigError
from ppctl.reports.charts.html_charts import schedules_page
from ppctl.reports.charts.image_charts import FORMS, image
from ppctl.reports.charts.schedule_drawing import (
    KIND_NAMES,
    Drawing,
    drawing_document,
    drawing_of_timeline,
)
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
        path: Its ending names the form: .svg, .pdf, .png, .html (interactive), .json (for
        Perfetto), .txt, .csv. costs: Seconds of tasks; None: F = I = W = 1 s.

    Raises:
        ConfigError: The ending is none of these, or the file cannot be written.
    """
    path = Path(path)
    if path.suffix not in _FORM_OF:
        raise ConfigError(f"{path} ends in none of {', '.join(_FORM_OF)}.")
    timeline = simulate(schedule, Costs() if costs is None else costs)
    drawing = drawing_of_timeline(schedule.name, timeline)
    write_file(f"path={path}", path, DRAWN_AS[_FORM_OF[path.suffix]](drawing))
    return path


def trace(drawing: Drawing) -> dict[str, Any]:
    """Return a schedule in the Trace Event Format, for ui.perfetto.dev and chrome://tracing.

    A complete event ("X") for each task, a thread and a memory counter for each rank; microseconds.
    """
    timeline, schedule = drawing.timeline, drawing.schedule
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": drawing.title}}
    ]
    for rank, tasks in enumerate(schedule.ranks):
        # 1. the thread
        thread = {"pid": 0, "tid": rank}
        about = (
            ("thread_name", {"name": f"rank {rank}"}),
            ("thread_sort_index", {"sort_index": rank}),
        )
        events += [{"ph": "M", **thread, "name": name, "args": args} for name, args in about]
        # 2. tasks
        for task in tasks:
            start_s, waited = timeline.start_s[task], timeline.waits_for(task)
            args: dict[str, Any] = {"stage": task.stage, "microbatch": task.microbatch}
            args["chunk"] = schedule.chunk_at(task)
            args |= {"waits_for": str(waited)} if waited else {}
            event = {"ph": "X", **thread, "name": str(task), "cat": KIND_NAMES[task.kind]}
            event |= {"ts": start_s * 1e6, "dur": (timeline.end_s[task] - start_s) * 1e6}
            events.append(event | {"args": args})
        # 3. memory
        counter = {"ph": "C", "pid": 0, "name": f"activations of rank {rank}"}
        for at_s, live in timeline.memory_curve(rank):
            events.append(counter | {"ts": at_s * 1e6, "args": {"activations": live}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


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
    "perfetto": lambda drawing: json.dumps(trace(drawing)) + "\n",
}
_FORM_OF = {
    **{f".{form}": form for form in (*FORMS, "html", "csv")},
    ".json": "perfetto",
    ".txt": "text",
}
