"""`ppctl schedule curves`: what becomes of a schedule with more ranks and more microbatches. Loads no jax."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import Console

from ppctl import config as settings
from ppctl.cli.commands.schedule_show import costs_on, costs_text, deliver, is_large, print_on
from ppctl.config.schedule_from_config import label, schedule_of
from ppctl.errors import ConfigError, ScheduleError
from ppctl.reports.charts.drawing import number_text
from ppctl.reports.charts.image import FORMS, Panel, panels
from ppctl.reports.terminal import show_table
from ppctl.schedule.simulate import simulate

FORMATS = ("text", "json", *FORMS)
MOST_LINES = 16  # in a figure
Over = Literal["ranks", "microbatches"]


@dataclass(frozen=True)
class CurvePoint:
    """One size of a schedule, simulated. Activations are those of one microbatch through 1/num_ranks of the model."""

    num_ranks: int
    num_microbatches: int
    makespan_s: float
    bubble_fraction: float
    speedup: float  # over one rank that does all the work
    peak_activations: float  # of the rank that holds most
    all_activations: float  # of all ranks, each at its peak


@dataclass(frozen=True)
class CurveGrid:
    """The cells of all sizes, and why some cannot be. kept_mb: what a rank may keep of a microbatch."""

    title: str
    ranks: Sequence[int]
    microbatches: Sequence[int]
    over: Over  # runs along the x axis; the other one tells lines apart
    kept_mb: Sequence[float]
    cells: dict[tuple[int, int], CurvePoint]
    refused: dict[tuple[int, int], str]

    def line(self, other: int, value: Callable[[CurvePoint], float]) -> Iterator[tuple[int, float | None]]:
        """(x, value) along the x axis where the other axis stands at `other`; None where there is no such schedule."""
        for x in self.ranks if self.over == "ranks" else self.microbatches:
            cell = self.cells.get((x, other) if self.over == "ranks" else (other, x))
            yield x, None if cell is None else value(cell)

    @property
    def lines(self) -> dict[str, int]:
        """Return the size of each line by its name."""
        letter, sizes = ("m", self.microbatches) if self.over == "ranks" else ("p", self.ranks)
        return {f"{letter}={size}": size for size in sizes}


def curve_grid(
    config: settings.ScheduleConfig,
    ranks: Sequence[int],
    microbatches: Sequence[int],
    over: Over | None,
    kept_mb: Sequence[float],
) -> CurveGrid:
    """Return the schedule of a request at all these sizes. over: None takes the axis that has more of them."""
    if isinstance(config.schedule, settings.Csv):
        raise ConfigError("schedule=csv has the size of its file. Name a family, as in schedule=gpipe.")
    cells, refused = {}, {}
    for p in ranks:
        for m in microbatches:
            request = replace(
                config, mesh=replace(config.mesh, pp=p), schedule=replace(config.schedule, num_microbatches=m)
            )
            if is_large(request):
                raise ScheduleError(f"{p} ranks, {m} microbatches: too many tasks for a curve. Use fewer.")
            try:
                cells[p, m] = _point(request)
            except ScheduleError as error:
                refused[p, m] = " ".join(str(error).split())
    if not cells:
        raise ScheduleError(f"{config.schedule.name} has none of these sizes. {next(iter(refused.values()))}")
    over = over or ("microbatches" if len(microbatches) >= len(ranks) else "ranks")
    title = f"{label(config.schedule)}, {costs_text(config.costs)}"
    return CurveGrid(title, ranks, microbatches, over, kept_mb, cells, refused)


def show_curves(found: CurveGrid, form: str, out: Path | None) -> int:
    """Show a grid in one of FORMATS, to a file or to stdout."""
    if form == "json":
        content = {
            "title": found.title,
            "over": found.over,
            "kept_mb": found.kept_mb,
            "cells": [_document(cell, found.kept_mb) for cell in found.cells.values()],
            "refused": [{"num_ranks": p, "num_microbatches": m, "why": why} for (p, m), why in found.refused.items()],
        }
        return deliver(json.dumps(content) + "\n", out)
    if form == "text":
        return print_on(lambda console: _tables(console, found), out)
    drawn = len(found.lines) * max(1, len(found.kept_mb))
    if drawn > MOST_LINES:
        axis = "--microbatches" if found.over == "ranks" else "--ranks"
        raise ConfigError(f"{drawn} lines are more than the {MOST_LINES} that a figure tells apart. Use fewer {axis}.")
    return deliver(panels(found.title, list(_panels(found)), found.over, form), out)


def _point(config: settings.ScheduleConfig) -> CurvePoint:
    p, m = config.mesh.pp, config.schedule.num_microbatches
    schedule = schedule_of(config.schedule, p, costs_on(config)).schedule
    timeline = simulate(schedule, costs_on(config)(schedule.rank_of).costs)
    peaks, bubble = timeline.peak_activations, timeline.bubble_fraction
    return CurvePoint(p, m, timeline.makespan_s, bubble, p * (1 - bubble), max(peaks), sum(peaks))


def _document(cell: CurvePoint, kept_mb: Sequence[float]) -> dict[str, object]:
    return asdict(cell) | {
        "efficiency_fraction": 1 - cell.bubble_fraction,
        "peak_mb": [size * cell.peak_activations for size in kept_mb],
        "all_mb": [size * cell.all_activations for size in kept_mb],
    }


def _panels(found: CurveGrid) -> Iterator[Panel]:
    """The four figures. Of memory there is a line for each size that a rank may keep of a microbatch."""

    def lines(value: Callable[[CurvePoint], float], suffix: str = "") -> dict[str, list[tuple[int, float | None]]]:
        return {name + suffix: list(found.line(other, value)) for name, other in found.lines.items()}

    def memory(value: Callable[[CurvePoint], float]) -> dict[str, list[tuple[int, float | None]]]:
        if not found.kept_mb:
            return lines(value)
        return {
            name: line
            for size in found.kept_mb
            for name, line in lines(lambda cell: size * value(cell), f", {number_text(size)} MB").items()  # noqa: B023
        }

    unit = "MB" if found.kept_mb else "activations"
    yield Panel("bubble, idle share of all ranks", "bubble", lines(lambda cell: cell.bubble_fraction), is_share=True)
    yield Panel("speedup over one rank", "speedup", lines(lambda cell: cell.speedup))
    yield Panel("memory of the rank that holds most", unit, memory(lambda cell: cell.peak_activations))
    yield Panel("memory of all ranks", unit, memory(lambda cell: cell.all_activations))


def _tables(console: Console, found: CurveGrid) -> None:
    """Prints a table for each figure: a row for each size on the x axis, a column for each line."""
    console.print(found.title, markup=False, highlight=False, soft_wrap=True)
    for panel in _panels(found):
        write = (lambda y: f"{y:.1%}") if panel.is_share else number_text
        columns = [dict(line) for line in panel.lines.values()]
        rows = [(str(x), *("" if (y := column[x]) is None else write(y) for column in columns)) for x in columns[0]]
        unit = "" if panel.unit in panel.title else f" ({panel.unit})"
        show_table(console, panel.title + unit, (found.over, *panel.lines), rows)
    for (p, m), why in found.refused.items():
        console.print(f"p={p} m={m}: {why}", markup=False, highlight=False, soft_wrap=True)
