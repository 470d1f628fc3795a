"""A schedule with its timeline, label and bounds: for charts of every format, as text, as JSON."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import ceil
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.text import Text

from ppctl.reports.palette import INK, shade
from ppctl.reports.terminal_output import seconds_text, show_lines, show_table
from ppctl.schedule.ir import ALL_KINDS, Kind, Schedule, Task
from ppctl.schedule.lower_bounds import makespan_bound_s, peak_activations_bound, period_bound_s
from ppctl.schedule.search.auto_choice import GIB, Choice
from ppctl.schedule.simulator import Timeline

KIND_NAMES: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input-gradient backward",
    "W": "weight-gradient backward",
    "E": "embedding, a part",
    "S": "logits and their sums, a part",
    "T": "gradients of logits, a part",
    "G": "gradient of the embedding, a part",
}

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


@dataclass(frozen=True)
class Drawing:
    """A schedule, its times and its bounds."""

    label: str  # distinguishes the drawing from others
    timeline: Timeline
    choice: Choice | None = None  # result of the search of schedule=auto

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule

    @cached_property
    def lower_bound_s(self) -> float:
        """Return a lower bound of the makespan in seconds, for any order of the tasks."""
        return makespan_bound_s(self.schedule, self.timeline.costs)

    @cached_property
    def peak_bounds(self) -> tuple[float, ...]:
        """Return a lower bound of each rank's peak activations, for any order with this period."""
        costs, period_s = self.timeline.costs, self.timeline.period_s
        return peak_activations_bound(self.schedule, costs, period_s)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Return the kinds of the schedule's tasks, in the order of ALL_KINDS."""
        present = {task.kind for task in self.timeline.start_s}
        return tuple(kind for kind in ALL_KINDS if kind in present)

    @cached_property
    def labelled_s(self) -> float:
        """Return the seconds of the shortest task that lasts at least 1/4 of its kind's median.

        The longest label that fits into these seconds is used for all tasks: kind and microbatch,
        kind, or nothing.
        """
        lasts = defaultdict(list)
        for task, start_s in self.timeline.start_s.items():
            if self.timeline.end_s[task] > start_s:
                lasts[task.kind].append(self.timeline.end_s[task] - start_s)
        least = {kind: statistics.median(seconds) / 4 for kind, seconds in lasts.items()}
        return min(s for kind, seconds in lasts.items() for s in seconds if s >= least[kind])

    @property
    def longest_label(self) -> int:
        """Return the number of characters of the longest task label, such as F31."""
        return 1 + len(str(self.schedule.num_microbatches - 1))

    @property
    def title(self) -> str:
        return title_of(self.label, self.schedule)

    @property
    def verdict(self) -> str:
        """Return makespan, its bound, period, bubble and memory in one line."""
        timeline = self.timeline
        seconds = timeline.makespan_s, self.lower_bound_s, timeline.period_s
        makespan, least, period = (seconds_text(each, seconds[0], 5) for each in seconds)
        peak, most_bytes = number_text(max(timeline.peak_activations)), max(timeline.peak_bytes)
        size = f" of {number_text(most_bytes / GIB)} GiB" if most_bytes else ""
        return (
            f"makespan {makespan} (at least {least}), period {period}, bubble "
            f"{timeline.bubble_fraction:.1%}, peak {peak} activations{size}"
        )


def title_of(label: str, schedule: Schedule) -> str:
    """Return a label with the numbers of ranks and microbatches."""
    num_ranks, number = schedule.num_ranks, schedule.num_microbatches
    ranks = f"{num_ranks} rank" + "s" * (num_ranks != 1)
    return f"{label}: {ranks}, {number} microbatch" + "es" * (number != 1)


def table_row(
    drawing: Drawing, makespan_formula_s: float | None = None, peak_formula: float | None = None
) -> dict[str, Any]:
    """Return the table row of a drawing, by column; formulas: its family's closed forms, if any."""
    timeline = drawing.timeline
    return {
        "schedule": drawing.schedule.name,
        "label": drawing.label,
        "makespan_s": timeline.makespan_s,
        "makespan_formula_s": makespan_formula_s,
        "lower_bound_s": drawing.lower_bound_s,
        "period_s": timeline.period_s,
        "period_lower_bound_s": period_bound_s(drawing.schedule, timeline.costs),
        "bubble_fraction": timeline.bubble_fraction,
        "peak_activations": max(timeline.peak_activations),
        "peak_activations_formula": peak_formula,
        "peak_activations_lower_bound": max(drawing.peak_bounds),
        "notes": reasons(drawing),
    }


def reasons(drawing: Drawing) -> list[str]:
    """Return lines on the choice of schedule=auto; [] without one."""
    if (choice := drawing.choice) is None:
        return []
    tried, within = choice.num_blocks
    blocks = f" and {tried} of {within} V-shaped building blocks" if within else ""
    least = seconds_text(choice.lower_bound_s, digits=5)
    tried_text = f"tried: {choice.num_published} published schedules{blocks}; on their placements"
    return [choice.summary, f"{tried_text} none is below {least}"]


def number_text(value: float) -> str:
    """Return a number with up to five digits, without trailing zeros.

    >>> number_text(28.5), number_text(0.1 + 0.2), number_text(3000)
    ('28.5', '0.3', '3000')
    """
    return f"{value:.5g}" if abs(value) < 1e5 else f"{value:.4g}"


def drawing_document(drawing: Drawing) -> dict[str, Any]:
    """Return the drawing as a JSON document; tasks and times by rank, units as in `Timeline`."""
    timeline, schedule = drawing.timeline, drawing.schedule
    return {
        "schedule": schedule.name,
        **picked(drawing, "label", "lower_bound_s"),
        "period_lower_bound_s": period_bound_s(drawing.schedule, timeline.costs),
        **picked(schedule, "num_ranks", "num_microbatches", "num_chunks", "rank_of"),
        "costs": asdict(timeline.costs),
        **picked(timeline, "makespan_s", "period_s", "peak_activations", "peak_bytes"),
        "auto": None if drawing.choice is None else _chosen(drawing.choice),
        "bubble_fraction": timeline.bubble_fractions,
        "peak_activations_lower_bound": drawing.peak_bounds,
        "ranks": [list(map(str, tasks)) for tasks in schedule.ranks],
        "start_s": [[timeline.start_s[task] for task in tasks] for tasks in schedule.ranks],
        "end_s": [[timeline.end_s[task] for task in tasks] for tasks in schedule.ranks],
    }


def picked(record: object, *names: str) -> dict[str, Any]:
    """Return the attributes of these names, by name."""
    return {name: getattr(record, name) for name in names}


def _chosen(choice: Choice) -> dict[str, Any]:
    """Return the result of the search of schedule=auto as JSON numbers."""
    tried, within = choice.num_blocks
    return {
        "max_activations": choice.cap,
        "max_bytes": choice.limit_bytes,
        **picked(choice, "held_bytes", "lower_bound_s", "gap_fraction", "num_published"),
        "num_building_blocks": tried,
        "num_building_blocks_within_cap": within,
        "candidates": [picked(c, "label", "length_s", "is_published") for c in choice.candidates],
    }


def show_gantt(console: Console, drawing: Drawing) -> None:
    """Print a chart as wide as the terminal: dots are bubbles; tasks are coloured, else dashes."""
    # 1. the scale, in columns per second: enough for every label if there is room
    timeline, schedule = drawing.timeline, drawing.schedule
    left, right = len(f"rank {schedule.num_ranks - 1}"), len("  bubble    peak")
    room, shortest_s = console.width - left - 2 - right, drawing.labelled_s
    each = min(drawing.longest_label, int(room * shortest_s / timeline.makespan_s))
    scale = each / shortest_s if each else max(room, 20) / timeline.makespan_s
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


def _row(
    drawing: Drawing, tasks: Sequence[Task], scale: float, width: int, pad: str
) -> Iterator[tuple[str, Style | str]]:
    """Yield (text, style) of the pieces of a rank's row; scale: columns/s; pad: fills up a task."""
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
