"""Results of `make bench-scale`: tables on a terminal and in docs/benchmarks.md, and the picture."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from rich.console import Console

from benchmarks.scaling.measure import Measured
from benchmarks.scaling.rows import Row
from ppctl.reports.palette import LINES, MARKS, PARTS
from ppctl.reports.terminal_output import show_table

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE, PICTURE = DOCS / "benchmarks.md", DOCS / "images" / "scaling.svg"
BEGIN, END = "<!-- made by make bench-scale -->\n", "<!-- to here -->"
MOST_BY_MICROBATCHES, MOST_BY_DEVICES = 1.1, 1.3  # bars: growth of the compile time
Results = Mapping[Row, Measured]
SERIES = ("whole", "ranks", "replicas")  # series that are drawn
COLOURS = (*LINES, *PARTS)
PANELS: tuple[tuple[str, Sequence[str], Callable[[Measured], float | None]], ...] = (
    ("planning, CPU s", ("planned",), lambda costs: costs.plan_s),
    ("compiling, CPU s", ("compiled",), lambda costs: costs.compile_s),
    ("instructions of the program", ("compiled",), lambda costs: costs.num_instructions),
    ("host memory, MiB", ("planned", "compiled"), lambda costs: costs.host_bytes / 2**20),
)


class Growth(NamedTuple):
    """The compile time of a row relative to the first of its line."""

    line: str  # model, target, executor and schedule
    span: str  # from the first row to this one
    ratio: float
    most: float  # bar


def line_of(row: Row) -> str:
    """Return the text of a row's line: model, target, executor and schedule where unusual."""
    kind = "" if (row.executor, row.schedule) == ("spmd", "1f1b") else f", {row.schedule}"
    kind += "" if row.executor == "spmd" else f" {row.executor}"
    return f"{row.model}, {row.target}{kind}"


def growths(results: Results) -> list[Growth]:
    """Return the growth of compile time from 32 to 512 devices, and from 8 to 64 microbatches."""
    seconds = {row: found.compile_s or 0.0 for row, found in results.items() if row.layers}
    small = {
        (line_of(row), row.num_microbatches): s for row, s in seconds.items() if _is_small(row)
    }
    found: list[Growth] = []
    for row, compile_s in seconds.items():
        line, number = line_of(row), row.num_microbatches
        if row.devices == 512 and (line, number) in small:
            span, most = f"{row.series}, 32 to 512 devices", MOST_BY_DEVICES
            found.append(Growth(line, span, compile_s / small[line, number], most))
        elif _is_small(row) and number == 64 and (line, 8) in small:
            ratio = compile_s / small[line, 8]
            found.append(Growth(line, "8 to 64 microbatches", ratio, MOST_BY_MICROBATCHES))
    return found


def _is_small(row: Row) -> bool:
    """Return whether a row is compiled for the fewest devices, where each line begins."""
    return row.compiles and row.devices == 32


def _planned(results: Results) -> Iterator[list[str]]:
    """Yield a row of the table of planning for each number of devices."""
    planned = {row: found for row, found in results.items() if not row.compiles}
    whole = {(row.model, row.devices): (row, planned[row]) for row in planned if not row.layers}
    models = list(dict.fromkeys(model for model, _ in whole))
    for devices in sorted({devices for _, devices in whole}):
        cells = [f"{devices:,}"]
        for row, found in (whole[model, devices] for model in models if (model, devices) in whole):
            cells += [_mesh(row), f"{found.plan_s:.1f}", f"{found.host_bytes / 2**20:.0f}"]
        yield cells
    for row, found in planned.items():
        if row.layers:
            mesh = (
                f"{_mesh(row)}, {row.schedule} {row.executor}, {row.num_microbatches} microbatches"
            )
            costs = [f"{found.plan_s:.1f}", f"{found.host_bytes / 2**20:.0f}"]
            yield [f"{row.devices:,}", mesh, *costs, "", "", ""]


def _mesh(row: Row) -> str:
    sizes = {"dp": row.copies // row.fsdp, "fsdp": row.fsdp, "pp": row.ranks}
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)


def _compiled(results: Results) -> Iterator[list[str]]:
    """Yield a row of the table of compiling for each compiled request."""
    for row, found in results.items():
        if row.compiles:
            assert found.compile_s is not None
            yield [
                line_of(row),
                "126" if row.layers is None else f"{row.layers}",
                f"{row.devices}",
                _mesh(row),
                f"{row.num_microbatches}",
                f"{found.compile_s:.1f}",
                f"{found.num_instructions:,}",
                f"{(found.lowered_bytes or 0) / 1e6:.1f}",
                f"{found.host_bytes / 2**20:.0f}",
            ]


def _grown(results: Results) -> Iterator[list[str]]:
    for each in growths(results):
        yield [each.line, each.span, f"{each.ratio:.2f}", f"{each.most:.1f}"]


PLANNED = ("devices", "405B", "CPU s", "MiB", "mixture", "CPU s", "MiB")
COMPILED = (
    "model, target",
    "layers",
    "devices",
    "mesh",
    "microbatches",
    "compile CPU s",
    "instructions",
    "StableHLO MB",
    "host MiB",
)
GROWN = ("model, target", "from, to", "compile time, times", "bar")
TABLES: tuple[tuple[Sequence[str], Callable[[Results], Iterator[list[str]]]], ...] = (
    (PLANNED, _planned),
    (GROWN, _grown),
    (COMPILED, _compiled),
)


def show(results: Results) -> None:
    """Print the tables."""
    for names, rows in TABLES:
        show_table(Console(), "", list(names), list(rows(results)))


def page_tables(results: Results) -> str:
    """Return the tables as Markdown."""
    texts = []
    for names, rows in TABLES:
        lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
        lines += [f"| {' | '.join(cells)} |" for cells in rows(results)]
        texts.append("\n".join(lines))
    return "\n" + "\n\n".join(texts) + "\n\n"


def write_page(results: Results) -> None:
    """Write the tables into docs/benchmarks.md, and the picture next to it."""
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    page = f"{head}{BEGIN}{page_tables(results)}{rest[rest.index(END) :]}"
    PAGE.write_text(page, encoding="utf-8")
    PICTURE.write_bytes(re.sub(rb"[ \t]+\n", b"\n", picture(results)))


def _lines(results: Results) -> dict[tuple[str, str, str], list[tuple[int, Measured]]]:
    """Return the lines of the picture, (verb, `line_of`, series) -> (devices, costs), ascending.

    Replicas begin with the four ranks of `ranks`. A line has at least two points.
    """
    found: dict[tuple[str, str, str], list[tuple[int, Measured]]] = {}
    for row, costs in results.items():
        verb = "compiled" if row.compiles else "planned"
        starts = row.series == "ranks" and _is_small(row)
        for series in (row.series, "replicas") if starts else (row.series,):
            if series in SERIES:
                found.setdefault((verb, line_of(row), series), []).append((row.devices, costs))
    by_devices = lambda points: sorted(points, key=lambda point: point[0])
    return {line: by_devices(points) for line, points in found.items() if len(points) > 1}


def picture(results: Results) -> bytes:
    """Return planning time, compile time, program size and host memory by devices, as svg.

    Colours tell models, targets and executors apart, marks tell series; planned lines are dotted.
    """
    # 1. draw the four panels over a logarithmic axis of devices
    lines = _lines(results)
    names = list(dict.fromkeys(name for _, name, _ in lines))
    figure = Figure(figsize=(9.0, 6.5), dpi=150, layout="constrained")
    panels = figure.subplots(2, 2).ravel()
    for axes, (label, verbs, value) in zip(panels, PANELS, strict=True):
        for (verb, name, series), points in lines.items():
            if verb not in verbs:
                continue
            how: dict[str, Any] = {"linestyle": ":" if verb == "planned" else "-"}
            how |= {"color": COLOURS[names.index(name)], "marker": MARKS[SERIES.index(series)]}
            x, y = zip(*((devices, value(costs)) for devices, costs in points), strict=True)
            axes.plot(x, y, markersize=4, linewidth=1.2, label=f"{verb}: {name}, {series}", **how)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
        axes.set(xlabel="devices", ylabel=label)
        axes.set_ylim(bottom=0)

    # 2. one legend, of the panel that has all lines
    of_all: dict[str, Any] = {"ncols": 3, "fontsize": 8, "edgecolor": "none"}
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside lower center", **of_all)

    # 3. no date and fixed ids: the same results give the same bytes
    out = BytesIO()
    with mpl.rc_context({"svg.hashsalt": "ppctl", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
