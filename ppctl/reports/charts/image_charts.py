"""Schedules and curves as svg, pdf or png, drawn by matplotlib, which is imported when needed."""

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, nan
from operator import sub
from typing import Any

from ppctl.errors import ConfigError
from ppctl.reports.charts.schedule_drawing import KIND_NAMES, Drawing, number_text
from ppctl.reports.palette import INK, line_style, shade
from ppctl.reports.terminal_output import seconds_text
from ppctl.schedule.ir import ALL_KINDS, Kind

WIDTH_IN, ROW_IN, MARGIN_IN, DPI = 14.0, 0.32, 1.3, 150
PANEL_IN = 5.0  # inches, height of a panel of curves
# fewest marks on a line if the n lines of a panel take turns, each with a mark at every n-th point;
# a line that would have fewer has a mark at each point
MANY_MARKS = 4
FORMS = ("svg", "pdf", "png")
MAX_RANKS = 512  # rows of a figure: more would be taller than 160 inches
MAX_VECTORS = 20_000  # tasks that an svg draws as vectors; more are drawn as one bitmap
POINTS_PER_CHARACTER = 4.6  # points, width of a letter of size 7 in a cell


def image(drawings: Sequence[Drawing], form: str) -> bytes:
    """Return a figure with a row for each rank, drawings on one time axis; form: one of FORMS."""
    num_ranks = max(drawing.schedule.num_ranks for drawing in drawings)
    if num_ranks > MAX_RANKS:
        what = f"mesh.pp={num_ranks}: a {form} has {MAX_RANKS} rows at most"
        raise ConfigError(f"{what}. Use --format html.")
    return _saved(_gantt(drawings), form)


def _saved(figure: Any, form: str) -> bytes:
    import matplotlib

    out = io.BytesIO()
    # no date and fixed ids: the same schedule gives the same bytes
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[form]
    settings: Any = {"svg.hashsalt": "ppctl", "svg.fonttype": "none", "pdf.fonttype": 42}
    with matplotlib.rc_context(settings):
        figure.savefig(out, format=form, metadata=metadata)
    return out.getvalue()


@dataclass(frozen=True)
class Panel:
    """Lines of a quantity, by label. Points ascend by x; None is a gap."""

    title: str
    unit: str
    lines: Mapping[str, Sequence[tuple[int, float | None]]]
    is_share: bool = False  # y is a share, 0 to 1


def panels(title: str, each: Sequence[Panel], x_name: str, form: str) -> bytes:
    """Return the bytes of a figure of panels in two columns; shares also have an axis of 1 - y."""
    figure = _figure(PANEL_IN * ceil(len(each) / 2))
    for axes, panel in zip(figure.subplots(ceil(len(each) / 2), 2).flat, each, strict=False):
        n = len(panel.lines)
        for i, (name, line) in enumerate(panel.lines.items()):
            x, y = zip(*((x, nan if y is None else y) for x, y in line), strict=True)
            colour, mark = line_style(i)
            # lines may coincide, so their marks alternate
            marked = (i, n) if len(x) >= MANY_MARKS * n else 1
            axes.plot(x, y, label=name, color=colour, marker=mark, markersize=4, markevery=marked)
        axes.set(xlabel=x_name, ylabel=panel.unit)
        axes.set_title(panel.title, loc="left", fontsize=10)
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(bottom=0, top=1 if panel.is_share else None)
        if panel.is_share:
            rest = (partial(sub, 1),) * 2  # y -> 1 - y, and its inverse
            axes.secondary_yaxis("right", functions=rest).set_ylabel("efficiency")
        axes.legend(fontsize=8, edgecolor="none")
    figure.suptitle(title, fontsize=10)
    return _saved(figure, form)


def _figure(height_in: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no window system
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _gantt(drawings: Sequence[Drawing]) -> Any:
    """Return the figure of drawings, one below the other, on one time axis."""
    from matplotlib.patches import Patch

    heights = [MARGIN_IN + ROW_IN * drawing.schedule.num_ranks for drawing in drawings]
    figure = _figure(sum(heights))
    places = figure.subplots(len(drawings), squeeze=False, height_ratios=heights).flat
    end_s = max(drawing.timeline.makespan_s for drawing in drawings)
    for axes, drawing in zip(places, drawings, strict=True):
        _ranks(axes, drawing, end_s)
    present = {kind for drawing in drawings for kind in drawing.kinds}
    kinds: list[Kind] = [kind for kind in ALL_KINDS if kind in present]
    names = [f"{kind} {KIND_NAMES[kind]}" for kind in kinds]
    handles = [Patch(color=shade(kind, 0, 1)) for kind in kinds]
    look = {"loc": "outside lower center", "ncols": len(names), "fontsize": 8}
    figure.legend(handles, names, frameon=False, **look)
    return figure


def _ranks(axes: Any, drawing: Drawing, end_s: float) -> None:
    """Draw a row for each rank, with its bubble and peak to the right; time runs to `end_s`."""
    timeline, schedule = drawing.timeline, drawing.schedule
    # 1. tasks as bars
    boxes: dict[tuple[Kind, int, int], list[tuple[float, float]]] = defaultdict(list)
    for task, start_s in timeline.start_s.items():
        place = (task.kind, schedule.chunk_at(task), schedule.rank_at(task))
        boxes[place].append((start_s, timeline.end_s[task] - start_s))
    few = len(timeline.start_s) <= MAX_VECTORS
    look = {"edgecolors": "white" if few else "none", "linewidths": 0.4, "rasterized": not few}
    for (kind, chunk, rank), spans in boxes.items():
        colour = shade(kind, chunk, schedule.num_chunks)
        axes.broken_barh(spans, (rank - 0.45, 0.9), facecolors=colour, **look)
    _letters(axes, drawing, points_per_s=0.8 * WIDTH_IN * 72 / end_s)
    # 2. numbers to the right
    look = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8}
    axes.text(1.005, -0.75, "bubble, peak", **look)
    numbers = zip(timeline.bubble_fractions, timeline.peak_activations, strict=True)
    for rank, (bubble, peak) in enumerate(numbers):
        axes.text(1.005, rank, f"{bubble:.1%}, {number_text(peak)}", **look)
    # 3. axes and title
    num_ranks = schedule.num_ranks
    axes.set(xlim=(0, end_s), ylim=(num_ranks - 0.5, -0.5), xlabel="seconds", ylabel="rank")
    if end_s < 1:
        axes.set_xlabel("time")
        axes.xaxis.set_major_formatter(lambda at_s, _: seconds_text(at_s, end_s))
    axes.set_yticks(range(0, num_ranks, 1 if num_ranks <= 64 else 8))
    axes.set_title(f"{drawing.title}\n{drawing.verdict}", loc="left", fontsize=10)


def _letters(axes: Any, drawing: Drawing, points_per_s: float) -> None:
    """Write kind and microbatch, or only the kind, into cells if that fits for every kind."""
    timeline, schedule = drawing.timeline, drawing.schedule
    of_all = int(drawing.labelled_s * points_per_s / POINTS_PER_CHARACTER)
    if not of_all:
        return
    for task, start_s in timeline.start_s.items():
        end_s = timeline.end_s[task]
        room = int((end_s - start_s) * points_per_s / POINTS_PER_CHARACTER)
        text = f"{task.kind}{task.microbatch}" if drawing.longest_label <= of_all else task.kind
        if len(text) <= room:
            rank = schedule.rank_at(task)
            look = {"ha": "center", "va": "center", "fontsize": 7, "color": INK}
            letters = axes.text((start_s + end_s) / 2, rank, text, **look)
            letters.set_in_layout(False)
