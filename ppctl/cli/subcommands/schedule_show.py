"""`ppctl schedule`: draw, list, compare and check schedules from costs. Loads no JAX."""

import csv
import inspect
import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ppctl.config import Costs as AssumedCosts, ScheduleConfig
from ppctl.config.schedule_from_config import read, schedule_of
from ppctl.errors import ScheduleError, one_line
from ppctl.reports.charts import schedule_drawing as drawn
from ppctl.reports.charts.draw_schedule import DRAWN_AS, schedules_page
from ppctl.reports.charts.image_charts import FORMS, image
from ppctl.reports.charts.schedule_drawing import Drawing, drawing_document, show_gantt, table_row
from ppctl.reports.terminal_output import OutputConsole, show_lines, write_file
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.registry import FAMILIES
from ppctl.schedule.placement_costs import CostsOf, Placed
from ppctl.schedule.search.auto_choice import GIB
from ppctl.schedule.simulator import simulate

FORMATS = tuple(DRAWN_AS)
LIST_FORMATS = ("text", *FORMS, "json", "csv")


def show_drawing(drawing: Drawing, form: str, out: Path | None) -> int:
    """Draw one schedule in one of FORMATS to a file, or to stdout if `out` is None; return 0."""
    if form == "text":
        show_gantt(OutputConsole(), drawing)
        return 0
    return deliver(DRAWN_AS[form](drawing), out)


def show_comparison(configs: Sequence[ScheduleConfig], form: str, out: Path | None) -> int:
    """Write several schedules as a table (text, csv), charts (html, images) or JSON; return 0."""
    drawings = list(map(draw, configs))
    rows = list(map(table_row, drawings))
    if form == "text":
        title = f"{len(configs)} schedules, {_size_of(configs[0])}"
        drawn.show_schedules_table(OutputConsole(), title, rows)
        return 0
    if form == "csv":
        return deliver(_rows_csv(rows), out)
    if form == "html":
        return deliver(schedules_page(drawings), out)
    if form in FORMS:
        return deliver(image(drawings, form), out)
    return deliver(json.dumps([drawing_document(drawing) for drawing in drawings]) + "\n", out)


def list_families(
    request: ScheduleConfig, each: Sequence[ScheduleConfig], form: str, out: Path | None
) -> int:
    """Write each family with its formulas, or its error for the size of `request`; return 0.

    each: the requests, one for each family.
    """
    # 1. the families
    rows, drawings = list[dict[str, Any]](), list[Drawing]()
    refused, order = dict[str, str](), list(FAMILIES)
    for one in sorted(each, key=lambda one: order.index(one.schedule.name)):
        try:
            drawings.append(draw(one))
            rows.append(table_row(drawings[-1], *_formulas(one)))
        except ScheduleError as error:
            refused[one.schedule.name] = one_line(error)
    if not drawings:
        raise ScheduleError(next(iter(refused.values())))
    stated = {row["schedule"]: formulas(row["schedule"]) for row in rows}
    # 2. their table, or charts
    if form == "json":
        documents = [row | {"formulas": stated[row["schedule"]]} for row in rows]
        return deliver(json.dumps({"schedules": documents, "refused": refused}) + "\n", out)
    if form != "text":
        return deliver(_rows_csv(rows) if form == "csv" else image(drawings, form), out)
    console, width = OutputConsole(), max(map(len, stated), default=0)
    title = f"{_size_of(request)}, {costs_text(request.costs)}"
    drawn.show_schedules_table(console, title, rows, formulas=True)
    texts = [f"{family:{width}}  {text}" for family, text in stated.items()]
    show_lines(console, *texts, "", *refused.values())
    return 0


def _rows_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table as CSV, without notes; unknown values are empty."""
    file, names = io.StringIO(), [name for name in rows[0] if name != "notes"]
    lines = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
    lines.writeheader()
    lines.writerows(rows)
    return file.getvalue()


def check_file(path: Path) -> int:
    """Return 0 if a CSV file holds a valid schedule, else 1, with the fault printed."""
    try:
        schedule = read(path)
    except ScheduleError as error:
        print(f"ppctl: {error}", file=sys.stderr)
        return 1
    kinds = "".join(sorted(schedule.kinds))
    sizes = f"{schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches"
    print(f"{path}: valid: {sizes}, {schedule.num_stages} stages, kinds {kinds}")
    return 0


def draw(request: ScheduleConfig) -> Drawing:
    """Return the requested schedule, simulated. ScheduleError if it is too large."""
    requested = schedule_of(request.schedule, request.mesh.pp, costs_on(request))
    timeline = simulate(requested.schedule, costs_of(request.costs))
    return Drawing(requested.label, timeline, requested.choice)


def _formulas(request: ScheduleConfig) -> tuple[float | None, float | None]:
    """Return (makespan in seconds, peak activations) by closed forms; None for a missing form."""
    family, knobs = FAMILIES[request.schedule.name], request.schedule.knobs()
    sizes = request.mesh.pp, request.schedule.num_microbatches
    peak = family.peak_activations(*sizes, **knobs)
    return family.makespan_s(*sizes, costs_of(request.costs), **knobs), peak


def formulas(family: str) -> str:
    """Return a family's closed forms from its docstring: bubble or makespan, and peak.

    >>> formulas("gpipe")
    'Bubble (p-1)(F+B); bubble fraction (p-1)/(m+p-1); peak activations m on every rank'
    """
    text = inspect.getdoc(FAMILIES[family].generate) or ""
    paragraph = " ".join(text.split("\n\n")[1].partition("\nSource:")[0].split())
    found = re.match(r".*?peak activations.*?(?=[.;] |\.$|$)", paragraph, re.IGNORECASE)
    return found[0] if found else paragraph


def costs_of(costs: AssumedCosts) -> Costs:
    """Return the simulator's costs of 1/p of the layers: seconds, and activations in bytes."""
    seconds = costs.forward_s, costs.input_grad_s, costs.weight_grad_s, costs.transfer_s
    return Costs(*seconds, activation_bytes=costs.activation_gib * GIB)


def costs_on(request: ScheduleConfig) -> CostsOf:
    """Return a function from a placement to costs: always those of the request."""
    fixed_bytes = (request.costs.fixed_gib * GIB,) * request.mesh.pp
    return lambda rank_of: Placed(costs_of(request.costs), fixed_bytes)


def costs_text(costs: AssumedCosts) -> str:
    """Return the request's costs as text."""
    return (
        f"F={costs.forward_s:g} I={costs.input_grad_s:g} W={costs.weight_grad_s:g} "
        f"c={costs.transfer_s:g} s"
    )


def _size_of(request: ScheduleConfig) -> str:
    return f"{request.mesh.pp} ranks, {request.schedule.num_microbatches} microbatches"


def deliver(content: str | bytes, out: Path | None) -> int:
    """Write text or bytes to a file, or to stdout if `out` is None; return 0."""
    if out is None:
        if isinstance(content, bytes):
            sys.stdout.buffer.write(content)
        else:
            print(content, end="")
        return 0
    write_file(f"--out {out}", out, content)
    return 0
