"""A schedule on the terminal: a row for each rank, a column for each stretch of time; tables of several schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from rich.console import Console
from rich.style import Style
from rich.text import Text

from ppctl.reports.charts.drawing import KIND_NAMES, Drawing, Row, number_text, reasons
from ppctl.reports.charts.palette import INK, shade
from ppctl.reports.terminal import show_table
from ppctl.schedule.ir import Task

MAX_RANKS = 32  # rows shown; of more ranks, the first and the last half
FORMULA = "formula"
COLUMNS = (
    *("schedule", "makespan s", FORMULA, "makespan at least", "period s", "period at least"),
    *("bubble", "peak activations", FORMULA, "peak at least"),
)
WORDS = (
    "makespan: of a step; period: of one after which ranks begin the next without waiting for each other",
    "at least: no order of these tasks takes less, or holds less at this period",
)


def show_gantt(console: Console, drawing: Drawing) -> None:
    """Print the chart as wide as the terminal. Bubbles are dots; without colour, dashes fill a task."""
    timeline, schedule = drawing.timeline, drawing.schedule
    labels = [f"rank {rank}" for rank in range(schedule.num_ranks)]
    left, right = max(map(len, labels)), len("  bubble    peak")
    scale = _columns_per_s(drawing, console.width - left - 2 - right)
    width = round(timeline.makespan_s * scale)
    pad = "-" if console.color_system is None else " "

    def say(text: str | Text) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(drawing.title)
    say(drawing.verdict)
    for reason in reasons(drawing):
        say(reason)
    say("")
    say(" " * (left + 2 + width) + "  bubble    peak")
    for rank in _shown(schedule.num_ranks):
        if rank is None:
            say(f"... {schedule.num_ranks - MAX_RANKS} ranks more; --format html shows all ...")
            continue
        row = Text(labels[rank].rjust(left) + "  ")
        for text, style in _row(drawing, schedule.ranks[rank], scale, width, pad):
            row.append(text, style)
        bubble, peak = timeline.bubble_fractions[rank], timeline.peak_activations[rank]
        say(row.append(f"  {bubble:>6.1%}  {number_text(peak):>6}"))
    say("")
    say(_legend(drawing, scale))


def show_schedules_table(console: Console, title: str, rows: Sequence[Row], *, formulas: bool = False) -> None:
    """Print a table with a row for each schedule, then the notes on each; formulas: their columns too."""
    cell = lambda value: "-" if value is None else number_text(value)  # noqa: E731
    columns = [column for column in COLUMNS if formulas or column != FORMULA]
    cells = []
    for row in rows:
        line = [
            row.label,
            number_text(row.makespan_s),
            *([cell(row.makespan_formula_s)] if formulas else []),
            number_text(row.lower_bound_s),
            number_text(row.period_s),
            number_text(row.period_lower_bound_s),
            f"{row.bubble_fraction:.1%}",
            number_text(row.peak_activations),
            *([cell(row.peak_activations_formula)] if formulas else []),
            cell(row.peak_activations_lower_bound),
        ]
        cells.append(line)
    show_table(console, title, columns, cells)
    for line in WORDS:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for row in rows:
        for note in row.notes:
            console.print(f"{row.label}: {note}", markup=False, highlight=False, soft_wrap=True)


def _columns_per_s(drawing: Drawing, room: int) -> float:
    """Return the columns of one second in `room`: enough for the letter and number of every task if they fit."""
    timeline, shortest_s = drawing.timeline, _shortest_s(drawing)
    each = min(drawing.longest_label, int(room * shortest_s / timeline.makespan_s))
    return each / shortest_s if each else max(room, 20) / timeline.makespan_s


def _shortest_s(drawing: Drawing) -> float:
    lasts = (drawing.timeline.end_s[task] - start for task, start in drawing.timeline.start_s.items())
    return min(seconds for seconds in lasts if seconds > 0)


def _row(
    drawing: Drawing, tasks: Sequence[Task], scale: float, width: int, pad: str
) -> Iterator[tuple[str, Style | str]]:
    """Yield the pieces of one rank's row: text and style."""
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
        # judged by the time it takes, not by the columns it happens to get, so that equal tasks look alike
        fits = are_numbered and len(text) <= min(room, (timeline.end_s[task] - timeline.start_s[task]) * scale + 1e-9)
        colour = shade(task.kind, schedule.chunk_at(task), schedule.num_chunks)
        yield (text if fits else task.kind).ljust(room, pad), Style(color=INK, bgcolor=colour)
        column = end
    yield "." * (width - column), "dim"


def _shown(num_ranks: int) -> Iterator[int | None]:
    """Yield the ranks that get a row; None where some are left out."""
    if num_ranks <= MAX_RANKS:
        yield from range(num_ranks)
        return
    yield from range(MAX_RANKS // 2)
    yield None
    yield from range(num_ranks - MAX_RANKS // 2, num_ranks)


def _legend(drawing: Drawing, scale: float) -> Text:
    legend = Text()
    for kind in drawing.kinds:
        legend.append(f" {kind} ", Style(color=INK, bgcolor=shade(kind, 0, 1))).append(f" {KIND_NAMES[kind]}  ")
    if drawing.schedule.num_chunks > 1:
        legend.append("lighter: later chunk  ")
    legend.append(f"1 column: {number_text(1 / scale)} s")
    number = ceil(1 / (scale * _shortest_s(drawing)) - 1e-9)
    if number > 1:
        legend.append(f", up to {number} tasks of a rank; --out FILE.html or FILE.svg shows each")
    return legend
