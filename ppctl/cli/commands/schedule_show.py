"""`ppctl schedule`: schedules drawn, listed, compared and checked, from costs alone. Loads no jax."""

from __future__ import annotations

import csv
import inspect
import io
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from ppctl import config as settings
from ppctl.config.schedule_from_config import label, read, schedule_of
from ppctl.errors import ConfigError, ScheduleError
from ppctl.reports.charts.drawing import Drawing, Row, drawing_document, drawing_of_timeline, number_text, row
from ppctl.reports.charts.html import schedules_page
from ppctl.reports.charts.image import FORMS, image
from ppctl.reports.charts.perfetto import trace
from ppctl.reports.charts.text_chart import show_gantt, show_schedules_table
from ppctl.reports.terminal import OutputConsole, write_file
from ppctl.schedule.bounds import split_makespan_bound_s, whole_makespan_bound_s
from ppctl.schedule.costs import OF_PARTS, Costs
from ppctl.schedule.families.registry import FAMILIES, advice, build, makespan_formula_s, peak_formula
from ppctl.schedule.ir import Schedule
from ppctl.schedule.partition.partition import Partition, balanced, uniform
from ppctl.schedule.search.choice import GIB, Choice
from ppctl.schedule.search.extrapolate import MOST_TASKS, extrapolate
from ppctl.schedule.search.layer_costs import LayerCosts, Piece
from ppctl.schedule.search.ledger import CostsOf, Placed
from ppctl.schedule.simulate import simulate
from ppctl.schedule.text import task_lists, to_csv

SHOW_FORMATS = ("text", "html", *FORMS, "json", "csv", "perfetto", "tasks")
COMPARE_FORMATS = ("text", "html", *FORMS, "json", "csv")
LIST_FORMATS = ("text", *FORMS, "json", "csv")
WITHOUT_TASKS = ("text", "json")  # of one schedule, what needs its numbers alone
FILE_WIDTH = 200  # columns of a text that goes to a file


def show(config: settings.ScheduleConfig, form: str, out: Path | None) -> int:
    """Draw the schedule that a request asks for, in one of SHOW_FORMATS, to a file or to stdout.

    A schedule that is too large to be simulated is extrapolated: its numbers as text or JSON, no chart.
    """
    if not is_large(config):
        return show_drawing(draw(config), form, out)
    if form not in WITHOUT_TASKS:
        raise _too_large(config)
    return _show_rows(f"{config.schedule.name}, {costs_text(config.costs)}", [extrapolated(config)], {}, form, out)


def show_drawing(drawing: Drawing, form: str, out: Path | None) -> int:
    """Draw one schedule in one of SHOW_FORMATS, to a file or to stdout."""
    if form == "text":
        return print_on(lambda console: show_gantt(console, drawing), out)
    content: str | bytes
    if form in FORMS:
        content = image([drawing], form)
    elif form == "html":
        content = schedules_page([drawing])
    elif form == "csv":
        content = to_csv(drawing.schedule.ranks)
    elif form == "tasks":
        content = f"{drawing.title}\n{task_lists(drawing.schedule)}"
    else:
        content = json.dumps(drawing_document(drawing) if form == "json" else trace(drawing)) + "\n"
    return deliver(content, out)


def show_comparison(configs: Sequence[settings.ScheduleConfig], form: str, out: Path | None) -> int:
    """Show several schedules in one table, in one of COMPARE_FORMATS; html and figures have their charts."""
    title = f"{len(configs)} schedules, {_size_of(configs[0])}"
    if any(map(is_large, configs)):
        if form not in (*WITHOUT_TASKS, "csv"):
            raise _too_large(configs[0])
        rows = [extrapolated(config) if is_large(config) else row(draw(config)) for config in configs]
        return _show_rows(title, rows, {}, form, out)
    drawings = list(map(draw, configs))
    if form == "text":
        return print_on(lambda console: show_schedules_table(console, title, list(map(row, drawings))), out)
    if form == "csv":
        return deliver(_rows_csv(list(map(row, drawings))), out)
    if form == "html":
        return deliver(schedules_page(drawings), out)
    if form in FORMS:
        return deliver(image(drawings, form), out)
    return deliver(json.dumps([drawing_document(drawing) for drawing in drawings]) + "\n", out)


def list_families(
    config: settings.ScheduleConfig, each: Sequence[settings.ScheduleConfig], form: str, out: Path | None
) -> int:
    """Show every family at the size of `config`, with its formulas; those that refuse it, why."""
    rows, drawings, refused, order = [], [], {}, list(FAMILIES)
    if form in FORMS and any(map(is_large, each)):
        raise _too_large(config)
    for one in sorted(each, key=lambda one: order.index(one.schedule.name)):
        try:
            if is_large(one):
                rows.append(extrapolated(one))
                continue
            drawings.append(draw(one))
            rows.append(row(drawings[-1], *_formulas(one)))
        except ScheduleError as error:
            refused[one.schedule.name] = " ".join(str(error).split())
    if form in FORMS:
        return deliver(image(drawings, form), out)
    title = f"{_size_of(config)}, {costs_text(config.costs)}"
    return _show_rows(title, rows, refused, form, out)


def _show_rows(title: str, rows: Sequence[Row], refused: dict[str, str], form: str, out: Path | None) -> int:
    """Show a table of `rows`, below it what the families' docstrings state and why others were refused."""
    stated = {row.schedule: formulas(row.schedule) for row in rows if row.schedule in FAMILIES}
    if form == "json":
        documents = [asdict(row) | {"formulas": stated.get(row.schedule)} for row in rows]
        return deliver(json.dumps({"schedules": documents, "refused": refused}) + "\n", out)
    if form == "csv":
        return deliver(_rows_csv(rows), out)
    width = max(map(len, stated), default=0)

    def draw_on(console: Console) -> None:
        show_schedules_table(console, title, rows, formulas=True)
        for text in [*(f"{family:{width}}  {text}" for family, text in stated.items()), "", *refused.values()]:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    return print_on(draw_on, out)


def _rows_csv(rows: Sequence[Row]) -> str:
    """Return a table as CSV; what is not known is empty. Its notes are left out."""
    names = [field.name for field in fields(Row) if field.name != "notes"]
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(names)
    lines.writerows([getattr(row, name) for name in names] for row in rows)
    return out.getvalue()


def show_certified(config: settings.ScheduleConfig, time_limit_s: float, form: str, out: Path | None) -> int:
    """Say how short any order of the schedule's tasks can be, as text or JSON."""
    from ppctl.schedule.search.certify import certify

    requested = schedule_of(config.schedule, config.mesh.pp, costs_on(config))
    if requested.choice is not None and requested.choice.cap is None:
        raise ConfigError(
            "schedule.max_memory_gib: certify counts activations, not bytes. Use schedule.max_activations."
        )
    cap = None if requested.choice is None else requested.choice.cap
    began, costs = time.perf_counter(), costs_on(config)(requested.schedule.rank_of).costs
    found = certify(requested.schedule, costs, cap, time_limit_s=time_limit_s)
    own_s = simulate(requested.schedule, costs).makespan_s
    numbers = {
        "label": requested.label,
        "makespan_s": own_s,
        "shortest_s": found.shortest_s,
        "lower_bound_s": found.lower_bound_s,
        "is_proven": found.is_proven,
        "max_activations": found.cap,
        "ranks": [list(map(str, tasks)) for tasks in found.schedule.ranks],
    }
    if form == "json":
        return deliver(json.dumps(numbers) + "\n", out)
    under = f"under {number_text(found.cap)} activations on this placement"
    shorter = "" if found.shortest_s >= own_s else f" One of {number_text(found.shortest_s)} s was found."
    proven = (
        f"No order {under} takes less than {number_text(found.lower_bound_s)} s."
        if found.is_proven
        else f"Any order {under} takes at least {number_text(found.lower_bound_s)} s; the shortest known takes "
        f"{number_text(found.shortest_s)} s. Raise --seconds for more."
    )
    text = f"{requested.label}, {_size(requested.schedule)}: {number_text(own_s)} s.{shorter} {proven}"
    return deliver(f"{text} (CP-SAT, {time.perf_counter() - began:.1f} s)\n", out)


def check_file(path: Path) -> int:
    """Return 0 if the CSV file holds a valid schedule, else 1 after printing the fault with the grid and an arrow."""
    try:
        schedule = read(path)
    except ScheduleError as error:
        print(f"ppctl: {error}", file=sys.stderr)
        return 1
    kinds = "".join(sorted({task.kind for tasks in schedule.ranks for task in tasks}))
    print(f"{path}: valid: {_size(schedule)}, {schedule.num_stages} stages, kinds {kinds}")
    return 0


def draw(config: settings.ScheduleConfig) -> Drawing:
    """Return the schedule that a request asks for, with its costs."""
    requested = schedule_of(config.schedule, config.mesh.pp, costs_on(config))
    return drawing_of(requested.schedule, config.costs, requested.label, requested.choice)


def is_large(config: settings.ScheduleConfig) -> bool:
    """Return whether the schedule has too many tasks to be simulated in seconds."""
    return config.schedule.name in FAMILIES and 3 * config.mesh.pp * config.schedule.num_microbatches > MOST_TASKS


def _too_large(config: settings.ScheduleConfig) -> ScheduleError:
    return ScheduleError(
        f"{_size_of(config)}: too many tasks for a chart. Use --format text or json, which extrapolate, or fewer."
    )


def extrapolated(config: settings.ScheduleConfig) -> Row:
    """Return the row of a schedule too large to be simulated, from smaller ones of its family."""
    wanted, num_ranks = config.schedule, config.mesh.pp
    apart = next((key for key in ("num_layers", "link_s") if getattr(config.costs, key)), None)
    if apart is not None:
        raise ConfigError(
            f"{_size_of(config)}: too many tasks to be simulated, and nothing is extrapolated with "
            f"costs.{apart}={getattr(config.costs, apart):g}. Leave it out, or use fewer."
        )
    costs = costs_of(config.costs)
    family = partial(build, wanted.name, **wanted.knobs())
    found = extrapolate(family, num_ranks, wanted.num_microbatches, costs)
    few = family(*found.simulated[0])
    bound = split_makespan_bound_s if any(t.kind == "W" for t in few.ranks[-1]) else whole_makespan_bound_s
    return Row(
        wanted.name,
        label(wanted),
        found.makespan_s,
        _formulas(config)[0],
        bound(num_ranks, wanted.num_microbatches, few.num_chunks, costs),
        found.period_s,
        wanted.num_microbatches * (costs.seconds("F", 0, 1) + costs.backward_s),
        found.bubble_fraction,
        found.peak_activations,
        _formulas(config)[1],
        None,
        [f"extrapolated from (ranks, microbatches) {', '.join(map(str, found.simulated))}"],
    )


def _formulas(config: settings.ScheduleConfig) -> tuple[float | None, float | None]:
    """Return makespan and peak by the family's closed forms, None where there is none."""
    wanted, sizes = config.schedule, (config.mesh.pp, config.schedule.num_microbatches)
    if config.costs.num_layers is not None or config.costs.link_s:  # closed forms: equal stages, links of their own
        return None, peak_formula(wanted.name, *sizes, **wanted.knobs())
    return (
        makespan_formula_s(wanted.name, *sizes, costs_of(config.costs), **wanted.knobs()),
        peak_formula(wanted.name, *sizes, **wanted.knobs()),
    )


def formulas(family: str) -> str:
    """Return what the docstring of a family states in closed form: its bubble or makespan, and its peak of activations.

    >>> formulas("gpipe")
    'Bubble (p-1)(F+B); bubble fraction (p-1)/(m+p-1); peak activations m on every rank'
    """
    text = inspect.getdoc(FAMILIES[family].generate) or ""
    paragraph = " ".join(text.split("\n\n")[1].partition("\nSource:")[0].split())
    found = re.match(r".*?peak activations.*?(?=[.;] |\.$|$)", paragraph, re.IGNORECASE)
    return found[0] if found else paragraph


def drawing_of(schedule: Schedule, costs: settings.Costs, label: str, choice: Choice | None = None) -> Drawing:
    """Return the drawing of a schedule with these costs."""
    seconds = placed_costs(costs, schedule.rank_of, schedule.num_ranks).costs
    drawing = drawing_of_timeline(label, simulate(schedule, seconds))
    return replace(drawing, advice=advice(schedule, seconds), choice=choice)


def costs_of(costs: settings.Costs) -> Costs:
    """Return the costs that a request assumes for 1/p of the layers, for the simulator."""
    seconds = costs.forward_s, costs.input_grad_s, costs.weight_grad_s, costs.transfer_s
    of_parts = {name: getattr(costs, name) for name in OF_PARTS.values()}
    return Costs(*seconds, activation_bytes=costs.activation_gib * GIB, **of_parts)


def costs_on(config: settings.ScheduleConfig) -> CostsOf:
    """Return the costs that a request assumes, of any placement of stages."""
    return lambda rank_of: placed_costs(config.costs, rank_of, config.mesh.pp)


def placed_costs(costs: settings.Costs, rank_of: tuple[int, ...], num_ranks: int) -> Placed:
    """Return the costs that a request assumes on a placement. ConfigError where its layers are too few for it."""
    links: dict[str, Any] = {}
    if costs.link_s:
        hosts = () if costs.host_ranks is None else tuple(r // costs.host_ranks for r in range(num_ranks))
        links = {"transfer_bytes": costs.link_s, "transfer_bytes_per_s": 1.0, "link_hosts": hosts}
        links["transfer_s"] = costs.transfer_s - costs.link_s
    if costs.num_layers is None:
        return Placed(replace(costs_of(costs), **links), (costs.fixed_gib * GIB,) * num_ranks)
    num_layers, even = costs.num_layers, costs.partition == "uniform"

    def divide(rank_of: tuple[int, ...]) -> Partition:
        if even:
            return uniform(num_layers, len(rank_of))
        return balanced(num_layers, rank_of, embed=costs.embed, head=costs.head)

    def piece(layers: float) -> Piece:
        """Return what costs as much as so many layers."""
        share = layers * num_ranks / num_layers
        seconds = (share * each for each in (costs.forward_s, costs.input_grad_s, costs.weight_grad_s))
        return Piece(*seconds, fixed_bytes=share * costs.fixed_gib * GIB)

    layer = piece(1.0)._replace(stash_bytes=costs.activation_gib * GIB * num_ranks / num_layers)
    parts = layer, divide, piece(costs.embed), piece(costs.head)
    try:
        placed = LayerCosts((1.0,) * num_layers, *parts, hop_s=costs.transfer_s).on(rank_of)
        return replace(placed, costs=replace(placed.costs, **links))
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.num_layers", "costs.num_layers")) from None


def costs_text(costs: settings.Costs) -> str:
    """Return the costs that a request assumes, in words."""
    text = f"F={costs.forward_s:g} I={costs.input_grad_s:g} W={costs.weight_grad_s:g} c={costs.transfer_s:g} s"
    if costs.link_s:
        shared = "" if costs.host_ranks is None else f", {costs.host_ranks} ranks to a host"
        text += f" ({costs.link_s:g} s on a link that others wait for{shared})"
    if costs.num_layers is None:
        return text
    ends = [f"{key} as {value:g}" for key in ("embed", "head") if (value := getattr(costs, key))]
    return f"{text}, {', '.join([f'{costs.num_layers} layers ({costs.partition})', *ends])}"


def _size_of(config: settings.ScheduleConfig) -> str:
    return f"{config.mesh.pp} ranks, {config.schedule.num_microbatches} microbatches"


def _size(schedule: Schedule) -> str:
    return f"{schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches"


def print_on(draw_on: Callable[[Console], None], out: Path | None) -> int:
    """Call `draw_on(console)`, on the terminal or in a text file."""
    if out is None:
        draw_on(OutputConsole())
        return 0
    text = io.StringIO()
    draw_on(Console(file=text, width=FILE_WIDTH, color_system=None))
    return deliver(text.getvalue(), out)


def deliver(content: str | bytes, out: Path | None) -> int:
    """Write `content` to a file or to stdout; bytes are for a file only."""
    if out is None:
        if isinstance(content, bytes):
            sys.stdout.buffer.write(content)
        else:
            print(content, end="")
        return 0
    write_file(f"--out {out}", out, content)
    return 0
