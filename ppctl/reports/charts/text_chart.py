"""Text charts: a schedule with a row for each rank and columns of time; tables of schedules."""

from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.text import Text

from ppctl.reports.charts.schedule_drawing import KIND_NAMES, Drawing, number_text, reasons
from ppctl.reports.palette import INK, shade
from ppctl.reports.terminal_output import seconds_text, show_lines, show_table
from ppctl.schedule.ir import Task

COLUMNS = {  # headings of a table of schedules, by key
    "label": "schedule",
    "makespan_s": "makespan",
    "makespan_formula_s": "makespan formula",
    "lower_bound_s": "makespan at least",
    "period_s": "period",
    "period_lower_bound_s": "period at least",
    "bubble_fraction": "bubble",
    "peak_activations": "peak activations",
    "peak_activations_formula": "peak formula",
    "peak_activations_lower_bound": "peak at least",
}
LEAST = (  # headings that make room in a narrow terminal, the first one first
    *("peak at least", "period at least", "makespan at least", "peak formula"),
    *("makespan formula", "period"),
)
WORDS = (
    "makespan: time of one step; period: time of a step if ranks begin the next one without "
    "waiting for each other",
    "at least: a lower bound over all orders of these tasks; for the peak, at this period",
)


def show_gantt(console: Console, drawing: Drawing) -> None:
    """Print a chart as wide as the terminal: dots are bubbles; tasks are coloured, else dashes."""
    # 1. the scale
    timeline, schedule = drawing.timeline, drawing.schedule
    left, right = len(f"rank {schedule.num_ranks - 1}"), len("  bubble    peak")
    scale = _columns_per_s(drawing, console.width - left - 2 - right)
    width = round(timeline.makespan_s * scale)
    pad = "-" if console.color_system is None else " "

    # 2. headings, rows and legend
    heads = " " * (left + 2 + width) + "  bubble    peak"
    show_lines(console, drawing.title, drawing.verdict, *reasons(drawing), "", heads)
    for rank in range(schedule.num_ranks):
        row = Text(f"rank {rank}".rjust(left) + "  ")
        for text, style in _row(drawing, schedule.ranks[rank], scale, width, pad):
            row.append(text, style)
        bubble, peak = timeline.bubble_fractions[rank], timeline.peak_activations[rank]
        show_lines(console, row.append(f"  {bubble:>6.1%}  {number_text(peak):>6}"))
    show_lines(console, "", _legend(drawing, scale))


def show_schedules_table(
    console: Console, title: str, rows: Sequence[Mapping[str, Any]], *, formulas: bool = False
) -> None:
    """Print a row for each schedule, then their notes; formulas: with columns of closed forms."""
    longest_s = max(row["makespan_s"] for row in rows)

    def cell(name: str, value: Any) -> str:
        if value is None:
            return "-"
        if name.endswith("_s"):
            return seconds_text(value, longest_s, 5)
        if name == "bubble_fraction":
            return f"{value:.1%}"
        return value if name == "label" else number_text(value)

    names = [name for name in COLUMNS if formulas or "formula" not in name]
    cells = [[cell(name, row[name]) for name in names] for row in rows]
    show_table(console, title, [COLUMNS[name] for name in names], cells, LEAST)
    notes = [f"{row['label']}: {note}" for row in rows for note in row["notes"]]
    show_lines(console, *WORDS, *notes)


def _columns_per_s(drawing: Drawing, room: int) -> float:
    """Return columns per second: enough for every label if `room` columns allow it."""
    timeline, shortest_s = drawing.timeline, drawing.labelled_s
    each = min(drawing.longest_label, int(room * shortest_s / timeline.makespan_s))
    return each / shortest_s if each else max(room, 20) / timeline.makespan_s


def _row(
    drawing: Drawing, tasks: Sequence[Task], scale: float, width: int, pad: str
) -> Iterator[tuple[str, Style | str]]:
    """Yield (text, style) of each piece of one rank's row.

    scale: columns per second. width: columns of the row. pad: character that fills up a task.
    """
    timeline, schedule = drawing.timeline, drawing.schedule
    column, are_numbered = 0, drawing.longest_label <= drawing.labelled_s * scale + 1e-9
    for task in tasks:
        first, end = round(timeline.start_s[task] * scale), round(timeline.end_s[task] * scale)
        if end <= max(first, column):
            continue
        if first > column:
            yield "." * (first - column), "dim"
            column = first
        room = end - column
        text = f"{task.kind}{task.microbatch}"
        # the unrounded width decides, so that tasks of equal length are labelled alike
        exact = (timeline.end_s[task] - timeline.start_s[task]) * scale + 1e-9
        fits = are_numbered and len(text) <= min(room, exact)
        colour = shade(task.kind, schedule.chunk_at(task), schedule.num_chunks)
        yield (text if fits else task.kind).ljust(room, pad), Style(color=INK, bgcolor=colour)
        column = end
    yield "." * (width - column), "dim"


def _legend(drawing: Drawing, scale: float) -> Text:
    legend = Text()
    for kind in drawing.kinds:
        legend.append(f" {kind} ", Style(color=INK, bgcolor=shade(kind, 0, 1)))
        legend.append(f" {KIND_NAMES[kind]}  ")
    if drawing.schedule.num_chunks > 1:
        legend.append("lighter: later chunk  ")
    timeline_s = drawing.timeline.makespan_s
    legend.append(f"1 column: {seconds_text(1 / scale, timeline_s, 5)}")
    number = ceil(1 / (scale * drawing.labelled_s) - 1e-9)
    if number > 1:
        legend.append(f", up to {number} tasks of a rank; --out FILE.html or FILE.svg shows each")
    return legend
