"""`ppctl schedule curves`: a schedule at several numbers of ranks and of microbatches.

This file loads no JAX.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal

from ppctl import config as settings
from ppctl.cli.subcommands.schedule_show import costs_on, costs_text, deliver
from ppctl.config.schedule_from_config import label, schedule_of
from ppctl.errors import ConfigError, ScheduleError, one_line
from ppctl.reports.charts.image_charts import FORMS, Panel, panels
from ppctl.reports.charts.schedule_drawing import number_text
from ppctl.reports.terminal_output import OutputConsole, show_lines, show_table
from ppctl.schedule.simulator import simulate

FORMATS = ("text", "json", *FORMS)
MOST_LINES = 16  # lines in a figure


@dataclass(frozen=True)
class CurvePoint:
    """A schedule simulated at one size.

    The unit of activations is one microbatch through 1/num_ranks of the model.
    """

    num_ranks: int
    num_microbatches: int
    makespan_s: float
    bubble_fraction: float
    speedup: float  # factor over one rank that does all the work
    peak_activations: float  # peak activations of the rank that holds most
    all_activations: float  # sum of the peaks of all ranks


@dataclass(frozen=True)
class CurveGrid:
    """The points of all possible sizes, and the errors of the impossible ones.

    kept_mb: sizes to draw, in MB, of the activations that a rank keeps for a microbatch; empty:
    memory is counted in activations. refused: errors by (ranks, microbatches).
    """

    title: str
    over: Literal["ranks", "microbatches"]  # x axis; a line for each size of the other
    kept_mb: Sequence[float]
    points: Sequence[CurvePoint]
    # (x, point) pairs of each line, by the line's name; a point is None if its size is impossible
    lines: Mapping[str, Sequence[tuple[int, CurvePoint | None]]]
    refused: Mapping[tuple[int, int], str]


def curve_grid(
    request: settings.ScheduleConfig,
    ranks: Sequence[int],
    microbatches: Sequence[int],
    kept_mb: Sequence[float],
) -> CurveGrid:
    """Return the requested schedule simulated at all pairs of `ranks` and `microbatches`.

    The x axis is the longer of the two lists; microbatches, if they are equally long.
    kept_mb: as in `CurveGrid`.
    """
    if isinstance(request.schedule, settings.Csv):
        use = "Name a family, as in schedule=gpipe."
        raise ConfigError(f"schedule=csv has the size of its file. {use}")
    # 1. each size
    cells, refused = {}, {}
    for p, m in product(ranks, microbatches):
        schedule = replace(request.schedule, num_microbatches=m)
        sized = request._replace(mesh=replace(request.mesh, pp=p), schedule=schedule)
        try:
            cells[p, m] = _point(sized)
        except ScheduleError as error:
            refused[p, m] = one_line(error)
    # 2. the lines
    if not cells:
        why = next(iter(refused.values()))
        raise ScheduleError(f"{request.schedule.name} is impossible at all of these sizes. {why}")
    lines: dict[str, list[tuple[int, CurvePoint | None]]]
    if len(microbatches) >= len(ranks):
        over = "microbatches"
        lines = {f"p={p}": [(m, cells.get((p, m))) for m in microbatches] for p in ranks}
    else:
        over = "ranks"
        lines = {f"m={m}": [(p, cells.get((p, m))) for p in ranks] for m in microbatches}
    title = f"{label(request.schedule)}, {costs_text(request.costs)}"
    return CurveGrid(title, over, kept_mb, [*cells.values()], lines, refused)


def show_curves(found: CurveGrid, form: str, out: Path | None) -> int:
    """Write a grid in one of FORMATS to a file, or to stdout if `out` is None; return 0."""
    if form == "json":
        cells = [_document(point, found.kept_mb) for point in found.points]
        whys = found.refused.items()
        refused = [{"num_ranks": p, "num_microbatches": m, "why": why} for (p, m), why in whys]
        content = {"title": found.title, "over": found.over, "kept_mb": found.kept_mb}
        return deliver(json.dumps(content | {"cells": cells, "refused": refused}) + "\n", out)
    if form == "text":
        _show_tables(found)
        return 0
    drawn = len(found.lines) * max(1, len(found.kept_mb))
    if drawn > MOST_LINES:
        axis = "--microbatches" if found.over == "ranks" else "--ranks"
        what = f"{drawn} lines are more than the {MOST_LINES} that a figure tells apart"
        raise ConfigError(f"{what}. Use fewer {axis}.")
    return deliver(panels(found.title, list(_panels(found)), found.over, form), out)


def _point(request: settings.ScheduleConfig) -> CurvePoint:
    p, m = request.mesh.pp, request.schedule.num_microbatches
    schedule = schedule_of(request.schedule, p, costs_on(request)).schedule
    timeline = simulate(schedule, costs_on(request)(schedule.rank_of).costs)
    peaks, bubble = timeline.peak_activations, timeline.bubble_fraction
    return CurvePoint(p, m, timeline.makespan_s, bubble, p * (1 - bubble), max(peaks), sum(peaks))


def _document(cell: CurvePoint, kept_mb: Sequence[float]) -> dict[str, object]:
    return asdict(cell) | {
        "efficiency_fraction": 1 - cell.bubble_fraction,
        "peak_mb": [size * cell.peak_activations for size in kept_mb],
        "all_mb": [size * cell.all_activations for size in kept_mb],
    }


def _panels(found: CurveGrid) -> Iterator[Panel]:
    """Yield the four figures; the memory figures repeat each line for each entry of kept_mb."""
    of_memory = [(mb, f", {number_text(mb)} MB") for mb in found.kept_mb] or [(1.0, "")]
    unit = "MB" if found.kept_mb else "activations"
    for title, of, name, scales in (
        ("bubble, idle share of all ranks", "bubble", "bubble_fraction", [(1.0, "")]),
        ("speedup over one rank", "speedup", "speedup", [(1.0, "")]),
        ("memory of the rank that holds most", unit, "peak_activations", of_memory),
        ("memory of all ranks", unit, "all_activations", of_memory),
    ):
        lines = {
            line + suffix: [(x, None if p is None else by * getattr(p, name)) for x, p in points]
            for by, suffix in scales
            for line, points in found.lines.items()
        }
        yield Panel(title, of, lines, is_share=of == "bubble")


def _show_tables(found: CurveGrid) -> None:
    """Print a table for each figure: a row for each size on the x axis, a column for each line."""
    console = OutputConsole()
    show_lines(console, found.title)
    for panel in _panels(found):
        write = (lambda y: f"{y:.1%}") if panel.is_share else number_text
        columns = [dict(line) for line in panel.lines.values()]
        rows = [
            (str(x), *("" if (y := column[x]) is None else write(y) for column in columns))
            for x in columns[0]
        ]
        unit = "" if panel.unit in panel.title else f" ({panel.unit})"
        show_table(console, panel.title + unit, (found.over, *panel.lines), rows)
    for (p, m), why in found.refused.items():
        show_lines(console, f"p={p} m={m}: {why}")
