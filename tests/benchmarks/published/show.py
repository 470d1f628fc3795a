"""Published steps next to predictions: the table on a terminal, the page, and the picture."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from io import BytesIO, StringIO
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.published.compare import Compared, memory_lines, summary
from benchmarks.published.constants import FITTED, Constants
from ppctl.reports.palette import line_style
from ppctl.reports.terminal_output import show_table

DOCS = Path(__file__).resolve().parents[3] / "docs"
DATA, PAGE, PICTURE = (
    DOCS / "published.json",
    DOCS / "published.md",
    DOCS / "images" / "published.svg",
)
BEGIN, END = "<!-- made by make bench-published -->\n", "<!-- to here -->"
BAND = 0.2  # shaded share of measured values
COLUMNS: tuple[tuple[str, Callable[[Compared], str]], ...] = (
    ("row", lambda row: row.id),
    ("GPU", lambda row: row.gpu),
    ("layout", lambda row: row.layout or ""),
    ("published s", lambda row: _number(row.published_step_s)),
    ("predicted s", lambda row: _number(row.predicted_step_s)),
    ("ratio", lambda row: "" if row.ratio is None else f"{row.ratio:.3f}"),
    ("MFU published", lambda row: _percent(row.published_mfu_fraction)),
    ("predicted", lambda row: _percent(row.predicted_mfu_fraction)),
    ("memory GiB", lambda row: _memory(row)),
    ("fitted", lambda row: "yes" if row.is_fitted else ""),
)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _memory(row: Compared) -> str:
    """Return the predicted memory, if the source states that it fits, or its memory."""
    if row.memory_gib is None or (row.ran is None and row.published_memory_gib is None):
        return ""
    stated = (
        "ran"
        if row.ran
        else "did not run"
        if row.ran is not None
        else f"{row.published_memory_gib:g}"
    )
    return f"{row.memory_gib:.0f} ({stated})"


def show(compared: Sequence[Compared], constants: Constants = FITTED) -> None:
    """Print the table, then refused rows, then the errors."""
    rows = [[text(row) for _, text in COLUMNS] for row in compared if row.refused is None]
    show_table(Console(), "", [name for name, _ in COLUMNS], rows)
    for line in (*_refused(compared), *_errors(compared), *_constants(constants)):
        print(line)


def _refused(compared: Sequence[Compared]) -> list[str]:
    return [f"refused   {row.id}: {row.refused}" for row in compared if row.refused is not None]


def _errors(compared: Sequence[Compared]) -> list[str]:
    lines = [
        f"errors    {each.name}: {each.rows} rows, median {each.median:.1%}, nine of ten within "
        f"{each.ninth_decile:.1%}, worst {each.worst:.1%}"
        for each in summary(compared)
    ]
    return lines + [f"memory    {line}" for line in memory_lines(compared)]


def _constants(constants: Constants) -> list[str]:
    return [
        "fitted    " + ", ".join(f"{name} {value:g}" for name, value in asdict(constants).items())
    ]


def write_page(compared: Sequence[Compared]) -> None:
    """Write the tables of docs/published.md and its picture."""
    PAGE.write_text(
        page_with(PAGE.read_text(encoding="utf-8"), page_tables(compared)), encoding="utf-8"
    )
    PICTURE.write_bytes(re.sub(rb"[ \t]+\n", b"\n", picture(compared)))


def page_with(page: str, tables: str) -> str:
    """Return the page with these tables between its marks."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}{tables}{rest[rest.index(END) :]}"


def tables_of(page: str) -> str:
    return page.split(BEGIN)[1].split(END)[0]


def picture(compared: Sequence[Compared]) -> bytes:
    """Return the predicted steps against the published ones as svg: equal on the line, within BAND
    in the shade.
    """
    # 1. points of each GPU, with and without a pipeline
    groups = dict[str, list[tuple[float, float]]]()
    for row in sorted(compared, key=lambda row: (row.gpu, not row.has_pipeline)):
        if row.published_step_s is not None and row.predicted_step_s is not None:
            label = f"{row.gpu}, {'with' if row.has_pipeline else 'without'} a pipeline"
            groups.setdefault(label, []).append((row.published_step_s, row.predicted_step_s))
    values = [value for points in groups.values() for point in points for value in point]
    ends = [min(values, default=1.0) / 1.3, max(values, default=1.0) * 1.3]

    # 2. draw them on logarithmic axes
    figure = Figure(figsize=(6.0, 5.0), dpi=150, layout="constrained")
    axes = figure.subplots()
    below, above = ([end * (1 + sign * BAND) for end in ends] for sign in (-1, 1))
    axes.fill_between(
        ends, below, above, color="#999999", alpha=0.2, linewidth=0, label=f"within {BAND:.0%}"
    )
    axes.plot(ends, ends, color="#555555", linewidth=1)
    for i, (label, points) in enumerate(groups.items()):
        colour, mark = line_style(i)
        x, y = zip(*points, strict=True)
        axes.scatter(x, y, s=20, color=colour, marker=mark, alpha=0.6, label=label)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set_title(f"{sum(map(len, groups.values()))} rows", fontsize=9)
    axes.set(xlabel="published seconds a step", ylabel="predicted seconds a step")
    axes.legend(fontsize=8, edgecolor="none", loc="upper left")

    # 3. no date and fixed ids: the same rows give the same bytes
    out = BytesIO()
    with mpl.rc_context({"svg.hashsalt": "ppctl", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def page_tables(compared: Sequence[Compared], constants: Constants = FITTED) -> str:
    """Return the tables of docs/published.md, between its markers, as Markdown."""
    out = StringIO()
    print(
        "| rows | number | median error | nine of ten within | worst |\n|---|---|---|---|---|",
        file=out,
    )
    for each in summary(compared):
        cells = f"{each.median:.1%} | {each.ninth_decile:.1%} | {each.worst:.1%}"
        print(f"| {each.name} | {each.rows} | {cells} |", file=out)
    if lines := memory_lines(compared):
        print("", *lines, sep="\n", file=out)
    print("\n| fitted constant | value |\n|---|---|", file=out)
    for name, value in asdict(constants).items():
        print(f"| `{name}` | {value:g} |", file=out)
    for system in dict.fromkeys(row.system for row in compared):
        rows = [row for row in compared if row.system == system]
        names = [name for name, _ in COLUMNS]
        print(f"\n### {system}\n\n{_sources(rows)}\n", file=out)
        shown = [row for row in rows if row.refused is None]
        if shown:
            print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}", file=out)
        for row in shown:
            cells = [text(row) for _, text in COLUMNS]
            print(f"| {' | '.join(cells)} |", file=out)
        assumed = dict.fromkeys(text for row in shown for text in row.assumed)
        if assumed:
            print(f"\nAssumed, as the source does not state it: {'; '.join(assumed)}.", file=out)
        for row in rows:
            if row.refused is not None:
                print(f"\nRefused: `{row.id}`, {row.refused}.", file=out)
    return out.getvalue()


def _sources(rows: Sequence[Compared]) -> str:
    """Return the sources in a line; of one file's many lines the first."""
    files = dict.fromkeys(
        row.source.split(".md:")[0] + (".md" if ".md:" in row.source else "") for row in rows
    )
    return "Source: " + "; ".join(files) + "."
