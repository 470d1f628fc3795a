"""`ppctl schedule`: schedules drawn, listed, compared and checked, from costs alone. Loads no jax."""

from __future__ import annotations

import inspect
import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from ppctl import config as settings
from ppctl.costs import Costs
from ppctl.draw.drawing import Drawing, document
from ppctl.draw.html import page
from ppctl.draw.image import image
from ppctl.draw.perfetto import trace
from ppctl.draw.terminal import show_gantt, show_summary
from ppctl.errors import ConfigError, ScheduleError
from ppctl.request import read, schedule_of
from ppctl.schedule.auto import Choice
from ppctl.schedule.bounds import makespan_bound_s, peak_activations_bound, period_bound_s
from ppctl.schedule.ir import Schedule
from ppctl.schedule.registry import FAMILIES, advice
from ppctl.schedule.simulate import simulate
from ppctl.schedule.text import to_csv

SHOW_FORMATS = ("text", "html", "svg", "png", "json", "csv", "perfetto")
COMPARE_FORMATS = ("text", "html", "json")
LIST_FORMATS = ("text", "json")
FILE_WIDTH = 200  # columns of a text that goes to a file


def show(drawing: Drawing, form: str, out: Path | None) -> int:
    """0 after drawing one schedule in one of SHOW_FORMATS, to a file or to stdout."""
    if form == "text":
        return _print(lambda console: show_gantt(console, drawing), out)
    content: str | bytes
    if form in ("svg", "png"):
        content = image(drawing, form)
    elif form == "html":
        content = page([drawing])
    elif form == "csv":
        content = to_csv(drawing.schedule.ranks)
    else:
        content = json.dumps(document(drawing) if form == "json" else trace(drawing)) + "\n"
    return _deliver(content, out)


def compare(drawings: Sequence[Drawing], form: str, out: Path | None) -> int:
    """0 after showing several schedules in one table, in one of COMPARE_FORMATS; html has their charts too."""
    if form == "text":
        title = f"{len(drawings)} schedules, {_size(drawings[0].schedule)}"
        return _print(lambda console: show_summary(console, title, drawings), out)
    if form == "html":
        return _deliver(page(drawings), out)
    return _deliver(json.dumps([document(drawing) for drawing in drawings]) + "\n", out)


def list_families(
    config: settings.ScheduleConfig, each: Sequence[settings.ScheduleConfig], form: str, out: Path | None
) -> int:
    """0 after showing every family, priced at the size of `config`, with its formulas; those that refuse it, why."""
    drawings, refused, order = [], {}, list(FAMILIES)
    for one in sorted(each, key=lambda one: order.index(one.schedule.name)):
        try:
            drawings.append((draw(one), formulas(one.schedule.name)))
        except ScheduleError as error:
            refused[one.schedule.name] = " ".join(str(error).split())
    if form == "json":
        rows = [
            {key: value for key, value in document(drawing).items() if key not in ("ranks", "start_s", "end_s")}
            | {"formulas": text}
            for drawing, text in drawings
        ]
        return _deliver(json.dumps({"schedules": rows, "refused": refused}) + "\n", out)
    title = f"{config.mesh.pp} ranks, {config.schedule.num_microbatches} microbatches, {_prices(config.costs)}"
    width = max((len(drawing.schedule.name) for drawing, _ in drawings), default=0)
    lines = [f"{drawing.schedule.name:{width}}  {text}" for drawing, text in drawings]

    def draw_on(console: Console) -> None:
        show_summary(console, title, [drawing for drawing, _ in drawings])
        for text in [*lines, "", *refused.values()]:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    return _print(draw_on, out)


def check(path: Path) -> int:
    """0 if the CSV file holds a valid schedule, else 1 after printing the fault with the grid and an arrow."""
    try:
        schedule = read(path)
    except ScheduleError as error:
        print(f"ppctl: {error}", file=sys.stderr)
        return 1
    kinds = "".join(sorted({task.kind for tasks in schedule.ranks for task in tasks}))
    print(f"{path}: valid: {_size(schedule)}, {schedule.num_stages} stages, kinds {kinds}")
    return 0


def draw(config: settings.ScheduleConfig) -> Drawing:
    """The schedule that a request asks for, priced with its costs."""
    requested = schedule_of(config.schedule, config.mesh.pp, _seconds(config.costs))
    return price(requested.schedule, config.costs, requested.label, requested.choice)


def formulas(family: str) -> str:
    """What the docstring of a family states in closed form: its bubble or makespan, and its peak of activations.

    >>> formulas("gpipe")
    'Bubble (p-1)(F+B); bubble fraction (p-1)/(m+p-1); peak activations m on every rank'
    """
    text = inspect.getdoc(FAMILIES[family]) or ""
    paragraph = " ".join(text.split("\n\n")[1].partition("\nSource:")[0].split())
    found = re.match(r".*?peak activations.*?(?=[.;] |\.$|$)", paragraph, re.IGNORECASE)
    return found[0] if found else paragraph


def price(schedule: Schedule, costs: settings.Costs, label: str, choice: Choice | None = None) -> Drawing:
    """The drawing of a schedule with these costs."""
    seconds = _seconds(costs)
    timeline = simulate(schedule, seconds)
    return Drawing(
        label,
        timeline,
        lower_bound_s=makespan_bound_s(schedule, seconds),
        period_bound_s=period_bound_s(schedule, seconds),
        peak_bounds=peak_activations_bound(schedule, seconds, timeline.period_s),
        advice=advice(schedule, seconds),
        choice=choice,
    )


def _seconds(costs: settings.Costs) -> Costs:
    return Costs(costs.forward_s, costs.input_grad_s, costs.weight_grad_s, costs.transfer_s)


def _prices(costs: settings.Costs) -> str:
    return f"F={costs.forward_s:g} I={costs.input_grad_s:g} W={costs.weight_grad_s:g} c={costs.transfer_s:g} s"


def _size(schedule: Schedule) -> str:
    return f"{schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches"


def _print(draw_on: Callable[[Console], None], out: Path | None) -> int:
    """0 after `draw_on(console)`, on the terminal or in a text file."""
    if out is None:
        draw_on(Console())
        return 0
    text = io.StringIO()
    draw_on(Console(file=text, width=FILE_WIDTH, color_system=None))
    return _deliver(text.getvalue(), out)


def _deliver(content: str | bytes, out: Path | None) -> int:
    """0 after writing `content` to a file or to stdout; bytes are for a file only."""
    if out is None:
        if isinstance(content, bytes):
            sys.stdout.buffer.write(content)
        else:
            print(content, end="")
        return 0
    try:
        if isinstance(content, bytes):
            out.write_bytes(content)
        else:
            out.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}.") from None
    print(f"ppctl: wrote {out} ({out.stat().st_size:,} bytes)", file=sys.stderr)
    return 0
