"""Static figures of html pages: curves drawn by matplotlib, and bars of html.

An svg takes its font and colours from the page (THEME, `.lines` in page.css), so it is readable on
light and dark backgrounds. Matplotlib is imported when a figure is drawn.
"""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any

from ppctl.reports.page_kit import text
from ppctl.reports.palette import LINES, PARTS, line_style
from ppctl.reports.terminal_output import size_text

WIDTH, HEIGHT = 460, 300  # svg units, each about a pixel
SOFT, GRID = "#010101", "#020202"  # placeholders for colours of the page
THEME = {SOFT: "var(--soft)", GRID: "var(--line)"}
LOOK: dict[Any, Any] = {
    "font.size": 13,
    "svg.fonttype": "none",  # text stays text, in the page's font
    "text.parse_math": False,  # a name may hold a $
    **dict.fromkeys(("xtick.color", "ytick.color", "axes.labelcolor"), SOFT),
    "xtick.bottom": False,
    "ytick.left": False,
    "ytick.major.pad": 7,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 1,
    "path.simplify_threshold": 0.5,  # pixels; keeps every spike
}
MOST_LINES = len(LINES) ** 2  # pairs of a colour and a mark
TREND = 80  # number of medians on a curve of many points
FEW = 16  # largest number of points that a curve's description lists
NUM_SHADES = 16  # colours of a heat map
NUM_MARKS = 5  # approximate number of marks on a curve, if a figure has several
LOG_FROM = 100.0  # least ratio of greatest to least value for a logarithmic y axis
LEAST_SPAN = 1e-5  # least height of the y axis, as a share of the greatest value
LEAST = 1e-100  # smallest value for a logarithmic axis

Points = Sequence[tuple[float, float | None]]  # ascending by x; None: not finite


def curves_svg(
    curves: Mapping[str, Points],
    *,
    title: str,
    x_name: str,
    from_zero: bool = False,
    over_sizes: bool = False,
) -> str:
    """Return the svg of curves; values that are not finite are gaps with crosses at the top.

    A curve of many points is pale and keeps every spike; a strong curve shows its medians. curves:
    points by label: 1 to MOST_LINES curves, at least one with a value. title: the quantity, for the
    description of the svg. from_zero: whether the y axis includes 0; else see `_set_values`.
    over_sizes: whether x are positive sizes or rates. Points then have marks, and the x axis is
    logarithmic unless x are whole numbers that span less than a factor of four.
    """
    import numpy as np

    assert 0 < len(curves) <= MOST_LINES, "a colour and a mark each"
    with _axes() as axes:
        # 1. curves
        has_marks = over_sizes or len(curves) > 1
        for number, points in enumerate(curves.values()):
            _draw_curve(axes, number, np.array(points, float).reshape(-1, 2), has_marks)
        # 2. the axis of x
        every = [point for points in curves.values() for point in points]
        first, last = (end(x for x, _ in every) for end in (min, max))
        are_whole = all(float(x).is_integer() for x, _ in every)
        if over_sizes and (last >= 4 * first or not are_whole):
            is_short = last < 1000 * first
            base, subs = (2, (1,)) if are_whole else (10, (1, 2, 5) if is_short else (1,))
            axes.set_xscale("log", base=base)
            axes.xaxis.get_major_locator().set_params(subs=subs, numticks=6)
            axes.xaxis.set_major_formatter("{x:,.0f}" if are_whole else "{x:g}")
        else:
            axes.set_xlim(first - (first == last), last + (first == last))
            axes.locator_params(axis="x", integer=True, nbins=min(5, 50 // len(f"{last:,.0f}")))
            axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel(x_name)
        # 3. the axis of values
        low, high = (end(y for _, y in every if y is not None) for end in (min, max))
        _set_values(axes, low, high, from_zero=from_zero)
        abouts = (f"{label}: {_summary(points)}" for label, points in curves.items())
        return _svg_of(axes, "; ".join([f"{title}, by {x_name}", *abouts]))


def heat_svg(
    first: int,
    last: Sequence[int],
    values_CL: Sequence[Sequence[float]],
    *,
    title: str,
    least: float,
) -> str:
    """Return the svg of a heat map: a row for each layer, a column for each block of steps.

    first: first step of the first column. last: last step of each column. values_CL: numbers
    [columns, layers]; NaN has no colour. title: the quantity, for the description of the svg.
    least: number drawn in the darkest colour.
    """
    import matplotlib
    import numpy as np

    values_LC = np.ma.masked_invalid(np.array(values_CL, float).T)
    number = len(values_LC)
    with _axes() as axes:
        # 1. a cell for each layer and column
        most = max(float(values_LC.max()), least + 0.1) if values_LC.count() else least + 1
        extent = (first - 0.5, last[-1] + 0.5, number - 0.5, -0.5)
        colours = matplotlib.colormaps["cividis"].resampled(NUM_SHADES)
        how: Any = {"cmap": colours, "vmin": least, "vmax": most, "extent": extent}
        cells = axes.imshow(values_LC, aspect="auto", interpolation="none", **how)
        # 2. axes and colours
        axes.grid(visible=False)
        axes.locator_params(axis="x", integer=True, nbins=min(5, 50 // len(f"{last[-1]:,}")))
        axes.locator_params(axis="y", integer=True, nbins=8)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("step")
        axes.set_ylabel("layer")
        bar = axes.figure.colorbar(cells, ax=axes, format="{x:,g}")
        bar.outline.set_visible(False)
        bar.ax.grid(visible=False)
        bar.ax.tick_params(length=0)
        bar.ax.locator_params(nbins=5)
        layers = (
            f"layer {l}: {_summary([*zip(last, row.tolist(), strict=True)])}"
            for l, row in enumerate(values_LC)
            if row.count()
        )
        return _svg_of(axes, "; ".join([f"{title}, by layer and step", *layers]))


def _draw_curve(axes: Any, number: int, points_N2: Any, has_marks: bool) -> None:
    """Draw a curve, its medians and marks, and crosses for values that are not finite."""
    import numpy as np

    colour, marker = line_style(number)
    look = {"color": colour}
    # 1. a line through all points, pale if there are many; dots for points without neighbours
    x, y = points_N2.T
    is_known = np.isfinite(y)
    known = points_N2[is_known]
    is_many = len(known) > 4 * TREND
    name, width = ("pale", 1) if is_many else ("data", 2)
    axes.plot(x, y, linewidth=width, gid=name, **look)
    around = np.pad(is_known, 1)
    is_alone = is_known & ~around[:-2] & ~around[2:]
    if is_alone.any():
        axes.plot(x[is_alone], y[is_alone], "o", markersize=3, gid="data", **look)
    # 2. medians and marks
    if is_many:
        known = np.array([np.median(block, axis=0) for block in np.array_split(known, TREND)])
        axes.plot(*known.T, linewidth=2.5, gid="trend", **look)
    if has_marks and len(known):
        every = known[:: -max(1, len(known) // NUM_MARKS)]
        axes.plot(*every.T, marker, markersize=8, gid="data", **look)
    # 3. crosses, at most one in each pixel
    if not is_known.all():
        pixels = np.round(x[~is_known] * (WIDTH / max(np.ptp(x), 1)))
        lost = x[~is_known][np.unique(pixels, return_index=True)[1]]
        cross = {"markersize": 8, "markeredgewidth": 2, "transform": axes.get_xaxis_transform()}
        axes.plot(lost, np.ones_like(lost), "x", gid="lost", **cross, **look)


def _set_values(axes: Any, low: float, high: float, *, from_zero: bool) -> None:
    """Set the y axis: from 0 if from_zero, else logarithmic if values span a factor of LOG_FROM."""
    if from_zero:
        axes.set_ylim(min(low, 0), max(1.05 * high, 0) or 1)
        axes.yaxis.set_major_formatter("{x:,g}")
    elif low > LEAST and high >= LOG_FROM * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    if axes.get_yscale() == "linear":
        axes.locator_params(axis="y", nbins=5)
        if not from_zero:
            # a span of rounding errors would look like a trend
            missing = LEAST_SPAN * max(abs(low), abs(high)) - (high - low)
            if missing > 0:
                axes.set_ylim(low - missing / 2, high + missing / 2)
            axes.yaxis.set_major_formatter("{x:,.8g}")  # complete, without an offset
    axes.minorticks_off()


def _summary(points: Points) -> str:
    if len(points) <= FEW:
        return ", ".join(f"{x:g}: {'not finite' if y is None else f'{y:.4g}'}" for x, y in points)
    values = [y for _, y in points if y is not None]
    if not values:
        return "no finite value"
    ends = {"first": values[0], "last": values[-1], "least": min(values), "greatest": max(values)}
    return ", ".join(f"{name} {value:.4g}" for name, value in ends.items())


@contextmanager
def _axes() -> Iterator[Any]:
    """Yield the axes of a new figure of WIDTH x HEIGHT svg units."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(LOOK):
        size = {"figsize": (WIDTH / 72, HEIGHT / 72), "dpi": 72, "layout": "constrained"}
        figure = Figure(frameon=False, **size)
        yield figure.subplots(subplot_kw={"frame_on": False})


def _svg_of(axes: Any, about: str) -> str:
    """Return the figure of `axes` as an svg element; about: its description in words.

    Groups get classes in place of ids. Ids of marks are hashes of `about`, so that they differ
    between the figures of a page.
    """
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": about}):
        axes.figure.savefig(out, format="svg", metadata={"Date": None})
    inside = out.getvalue()
    inside = inside[inside.index("<g ") :].replace("xlink:", "")  # without the svg header
    for pattern, new in (
        (r'<g id="([A-Za-z]+)[^"]*"', r'<g class="\1"'),
        (r"font-\w+: [^;]*; ", ""),  # the page sets the font
        (r'\s*\n\s*| transform="rotate\(-0[^"]*"', " "),
        (r' clip-path="[^"]*"|<defs> <clipPath.*?</defs>', ""),  # nothing lies outside of the axes
        (r'([ "]-?\d+\.\d)\d+', r"\1"),
    ):
        inside = re.sub(pattern, new, inside)
    for colour, variable in THEME.items():
        inside = inside.replace(colour, variable)
    shown = "".join(letter if letter.isprintable() else "?" for letter in about)
    frame = f'class="lines" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    return f'<svg {frame} aria-label="{escape(shown)}">{inside}'


# --- bars of html -------------------------------------------------------------------------------

# multiple of the longest bar; a larger limit gets a label but no line, so that bars stay visible
FAR_LIMIT = 4.0
LEAST_LETTERS = 0.04  # share of the axis; smaller parts get no number


def memory_bars(
    sums: Sequence[tuple[str, Mapping[str, int]]],
    parts: Sequence[str],
    limit: int | None = None,
    about: Mapping[str, str] | None = None,
) -> str:
    """Return a bar for each (name, bytes by part), and a legend, as html.

    parts: those of a bar in order, at most len(PARTS); each has a colour and a number. limit: bytes
    of a dashed line, with a label above the bars. about: a description of parts, for the legend.
    """
    assert len(parts) <= len(PARTS), "one colour each"
    # 1. the limit
    longest = max(1, *(sum(sizes.values()) for _, sizes in sums))
    end, line, rows = longest, "", ""
    if limit is not None:
        words, place = f"limit {size_text(limit)}", "right:0"
        if limit <= FAR_LIMIT * longest:
            end = max(longest, limit)
            share = limit / end
            line = f'<u class="limit" style="left:{share:.4%}"></u>'
            place = f"right:{1 - share:.4%}" if share > 0.5 else f"left:{share:.4%}"
        else:
            times = "over 1,000" if limit > 1000 * longest else f"{limit / longest:.0f}"
            words += f", {times} × the longest →"
        rows = f'<span></span><div><small style="{place}">{words}</small></div><span></span>'
    # 2. bars
    abouts = []
    for name, sizes in sums:
        boxes, total = "", size_text(sum(sizes.values()))
        for i, part in enumerate(parts):
            if sizes.get(part):
                share, words = sizes[part] / end, text(f"{part} {size_text(sizes[part])}")
                number = f"<b>{i + 1}</b>" if share >= LEAST_LETTERS else ""
                look = f"width:{share:.4%};background:{PARTS[i]}"
                boxes += f'<i style="{look}" title="{words}">{number}</i>'
        rows += f"<span>{text(name)}</span><div>{boxes}{line}</div><span>{total}</span>"
        listed = ", ".join(f"{part} {size_text(size)}" for part, size in sizes.items() if size)
        abouts.append(f"{name}: {total}, of which {listed}")
    # 3. legend
    items = ""
    for i, part in enumerate(parts):
        if any(sizes.get(part) for _, sizes in sums):
            swatch = f'<span class="swatch" style="background:{PARTS[i]}">{i + 1}</span>'
            words = f"{part}: {about[part]}" if about and part in about else part
            items += f"<li>{swatch}{text(words)}</li>"
    frame = f'class="bars" role="img" aria-label="{text("; ".join(abouts))}"'
    return f'<div {frame}>{rows}</div><ul class="parts">{items}</ul>'
