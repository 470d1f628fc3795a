"""A schedule as a figure, png or svg. The only user of matplotlib, which is imported when a figure is asked for."""

from __future__ import annotations

import io
from collections import defaultdict
from typing import Any

from ppctl.draw.drawing import KIND_NAMES, Drawing, number
from ppctl.draw.palette import INK, shade
from ppctl.errors import ConfigError
from ppctl.schedule.ir import Kind

WIDTH_IN, ROW_IN, MARGIN_IN, DPI = 14.0, 0.32, 1.3, 150
MAX_RANKS = 512  # rows of a figure: more would be taller than 160 inches
MAX_VECTORS = 20_000  # tasks of an svg drawn one by one; more become one picture inside it
POINTS_PER_CHARACTER = 4.6  # of the letters in cells, whose size is 7


def image(drawing: Drawing, form: str) -> bytes:
    """The bytes of a figure WIDTH_IN wide, with a row of ROW_IN for each rank; `form` is png or svg."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no window system is asked for
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    timeline, schedule = drawing.timeline, drawing.schedule
    if schedule.num_ranks > MAX_RANKS:
        raise ConfigError(f"mesh.pp={schedule.num_ranks}: a {form} has {MAX_RANKS} rows at most. Use --format html.")
    figure = Figure(figsize=(WIDTH_IN, MARGIN_IN + ROW_IN * schedule.num_ranks), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    boxes: dict[tuple[Kind, int, int], list[tuple[float, float]]] = defaultdict(list)
    for task, start_s in timeline.start_s.items():
        place = (task.kind, schedule.chunk_of[task.stage], schedule.rank_of[task.stage])
        boxes[place].append((start_s, timeline.end_s[task] - start_s))
    few = len(timeline.start_s) <= MAX_VECTORS
    for (kind, chunk, rank), spans in boxes.items():
        colour = shade(kind, chunk, schedule.num_chunks)
        edge = "white" if few else "none"
        axes.broken_barh(
            spans, (rank - 0.45, 0.9), facecolors=colour, edgecolors=edge, linewidths=0.4, rasterized=not few
        )
    _letters(axes, drawing, points_per_s=0.8 * WIDTH_IN * 72 / timeline.makespan_s)
    for rank, (bubble, peak) in enumerate(zip(timeline.bubble_fractions, timeline.peak_activations, strict=True)):
        text = f"{bubble:.1%}, {number(peak)}"
        axes.text(1.005, rank, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    axes.text(1.005, -0.75, "bubble, peak", transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    axes.set(xlim=(0, timeline.makespan_s), ylim=(schedule.num_ranks - 0.5, -0.5), xlabel="seconds", ylabel="rank")
    axes.set_yticks(range(0, schedule.num_ranks, 1 if schedule.num_ranks <= 64 else 8))
    axes.set_title(f"{drawing.title}\n{drawing.verdict}", loc="left", fontsize=10)
    names = [f"{kind} {KIND_NAMES[kind]}" for kind in drawing.kinds]
    handles = [Patch(color=shade(kind, 0, 1)) for kind in drawing.kinds]
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize=8, frameon=False)
    out = io.BytesIO()
    # a fixed date and fixed ids: the same schedule gives the same bytes
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "ppctl", "svg.fonttype": "none"}):
        figure.savefig(out, format=form, metadata={"Date": None} if form == "svg" else {})
    return out.getvalue()


def _letters(axes: Any, drawing: Drawing, points_per_s: float) -> None:
    """Writes the kind and microbatch of each task in its cell where they fit."""
    timeline, schedule = drawing.timeline, drawing.schedule
    for task, start_s in timeline.start_s.items():
        end_s = timeline.end_s[task]
        room = int((end_s - start_s) * points_per_s / POINTS_PER_CHARACTER)
        text = f"{task.kind}{task.microbatch}"
        if room:
            text, rank = text if len(text) <= room else task.kind, schedule.rank_of[task.stage]
            letters = axes.text((start_s + end_s) / 2, rank, text, ha="center", va="center", fontsize=7, color=INK)
            letters.set_in_layout(False)
