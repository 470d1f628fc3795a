"""Static figures of html pages as svg: curves over steps, lines over sizes, a histogram, bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ppctl.reports.charts import svg_surface as svg
from ppctl.reports.charts.palette import INK, LINES, PARTS, line_style
from ppctl.reports.charts.thinning import Points, medians, thin
from ppctl.reports.page_kit import part_legend
from ppctl.reports.terminal_output import size_text

PER_LETTER = 8.0
WIDEST_LETTER = 9.5  # in a narrow window, whose letters are larger than the figure
MOST_LINES = len(LINES) ** 2  # a colour and a mark tell them apart

COLUMNS = 600  # of a curve: more than a window has pixels for
TREND = 80  # medians of a curve of many points
MOST_LETTERS = 14  # of a label
LABEL_GAP = 18  # between labels
NUM_MARKS = 4  # on each of several curves

NUM_BINS = 40
FAR_BIN = 3.0  # medians: larger values share the last bin, and a named one is only written
FAR_LIMIT = 4.0  # longest bars: a larger limit is only written, or bars could not be seen
ROW, BAR = 26, 20  # heights of a row of bars, and of a bar in it

ALONE = (True, False, True)  # gaps before and after a point


@dataclass(frozen=True)
class Curve:
    """One curve of a figure; points ascend by x, and None is a gap."""

    label: str
    points: Points
    lost: Sequence[float] = ()  # where a value was not finite: crosses at the upper edge
    is_marked: bool = False  # a mark at every point


class Line(NamedTuple):
    """One line of a figure over a few sizes; points ascend by x."""

    label: str
    points: Sequence[tuple[float, float]]
    predicted: Sequence[tuple[float, float]] = ()  # drawn dashed, without marks
    measured: Sequence[tuple[float, float]] = ()  # hollow marks


# --- figures ------------------------------------------------------------------------------------


def curves_svg(
    curves: Sequence[Curve],
    *,
    title: str,
    x_name: str,
    from_zero: bool = False,
    others: Sequence[Curve] = (),
) -> str:
    """Return the svg of at most MOST_LINES curves, one with a value; several carry labels.

    others: curves of further figures, whose values these axes hold too, for comparison. Of many
    points a pale curve has the least and the greatest in every pixel column, a strong one the
    medians.
    """
    assert 0 < len(curves) <= MOST_LINES, "a colour and a mark each"
    # 1. axes, with room for labels
    every = (*curves, *others)
    values = [y for curve in every for _, y in curve.points if y is not None]
    steps = [x for curve in every for x in (*(x for x, _ in curve.points), *curve.lost)]
    letters = max(len(shortened(curve.label)) for curve in curves) if len(curves) > 1 else 0
    right = svg.WIDTH - svg.RIGHT - (14 + PER_LETTER * letters if letters else 0)
    with svg.figure_axes(right=right) as axes:
        _step_axis(axes, min(steps), max(steps), x_name)
        _value_axis(axes, values, from_zero=from_zero)
        # 2. curves and labels
        ends = []
        for number, curve in enumerate(curves):
            end = _draw_curve(axes, number, curve, is_labelled=bool(letters))
            ends.append((end, curve.label, number))
        if letters:
            _label_ends(axes, ends)
        about = "; ".join([f"{title}, by {x_name}", *map(_summary, curves)])
        return svg.svg_of(axes, about)


def lines_svg(
    lines: Sequence[Line],
    *,
    title: str,
    x_name: str,
    y_text: Callable[[float], str],
    from_zero: bool = True,
    is_log: bool = False,
) -> str:
    """Return the svg of at most MOST_LINES lines; `y_text` writes a y. Marks carry their numbers.

    from_zero: y from 0 up, else from the least to the greatest. x is logarithmic with `is_log`, and
    where it spans a factor of four, so that doublings stand equally far apart.
    """
    assert 0 < len(lines) <= MOST_LINES, "a colour and a mark each"
    every = [point for line in lines for points in line[1:] for point in points]
    places = sorted({x for line in lines for x, _ in (*line.points, *line.measured)})
    with svg.figure_axes() as axes:
        # 1. axes
        _size_axis(axes, [x for x, _ in every], places, x_name, is_log=is_log)
        if from_zero:
            ticks = svg.nice_ticks(0.0, max(y for _, y in every))
            axes.set_ylim(ticks[0], ticks[-1])
            axes.set_yticks(ticks, [y_text(tick) for tick in ticks])
        else:
            _value_axis(axes, [y for _, y in every], from_zero=False)
        # 2. lines and marks
        for number, line in enumerate(lines):
            colour, marker = line_style(number)
            dashed = {"color": colour, "linewidth": 1.5, "dashes": (5, 4)}
            svg.plot(axes, line.predicted, "data dashed", **dashed)
            svg.plot(axes, line.points, "data", color=colour, linewidth=2.5)
            look = {"marker": marker, "markersize": 9, "markeredgewidth": 2, "color": colour}
            kinds = (line.points, colour, ""), (line.measured, svg.PAPER, " measured")
            for points, fill, note in kinds:
                for x, y in points:
                    words = f"{line.label}, {x:g}: {y_text(y)}{note}"
                    svg.plot(axes, [(x, y)], "data mark", words, markerfacecolor=fill, **look)
        return svg.svg_of(axes, f"{title}, by {x_name}")


def histogram_svg(
    values: Sequence[float], named: Sequence[tuple[str, float]], *, title: str, x_name: str
) -> str:
    """Return the svg of positive values; `named`: their median, a solid line, others dashed.

    Values beyond FAR_BIN times the median are counted in the last bin.
    """
    # 1. bins
    limit = FAR_BIN * named[0][1]
    near = [(name, value) for name, value in named if not is_far(named[0][1], value)]
    inside = [value for value in values if value <= limit]
    low, high = (end([*inside, *(value for _, value in near)]) for end in (min, max))
    ticks = svg.nice_ticks(0.0 if svg.is_logarithmic(low, high) else low, high)
    texts = svg.tick_texts(ticks)
    width, counts = (ticks[-1] - ticks[0]) / NUM_BINS, [0] * NUM_BINS
    for value in inside:
        counts[min(NUM_BINS - 1, int((value - ticks[0]) / width))] += 1
    bars = [(ticks[0] + i * width, count) for i, count in enumerate(counts) if count]
    titles = [f"{low:.4g} to {low + width:.4g}: {count:,}" for low, count in bars]
    if beyond := len(values) - len(inside):
        bars.append((ticks[-1] + 6 * width, beyond))
        titles.append(f"more than {limit:.4g}: {beyond:,}")
        ticks, texts = [*ticks, ticks[-1] + 6.5 * width], [*texts, "more"]
    # 2. the figure
    with svg.figure_axes() as axes:
        axes.set_xlim(ticks[0], ticks[-1] + (width if beyond else 0))
        axes.set_xticks(ticks, texts)
        axes.set_xlabel(x_name)
        _value_axis(axes, [count for _, count in bars], from_zero=True, is_whole=True)
        least = axes.get_ylim()[1] / (
            svg.HEIGHT - svg.TOP - svg.BOTTOM
        )  # one of a hundred thousand is seen
        look = {"align": "edge", "color": LINES[0], "clip_on": False}
        for (low, count), words in zip(bars, titles, strict=True):
            [bar] = axes.bar(low, max(count, least), 0.9 * width, **look)
            bar.set_gid(f"data mark|{words}")
        for row, (name, value) in enumerate(near):
            _name_value(axes, f"{name} {value:.4g}", value, row)
        about = [f"{title}, {x_name}", *(f"{name} {value:.4g}" for name, value in named)]
        about += [f"{beyond:,} above {limit:.4g}"] if beyond else []
        return svg.svg_of(axes, "; ".join(about))


def is_far(median: float, value: float) -> bool:
    """Return whether a value lies too far from the median to be drawn with it."""
    return not median / FAR_BIN <= value <= FAR_BIN * median


def stacked_bars(
    sums: Sequence[tuple[str, Mapping[str, int]]],
    parts: Sequence[str],
    limit: int | None,
    text: Callable[[int], str],
) -> str:
    """Return the svg of a bar for each (name, sizes by part), parts in the order given.

    `text` writes a size. Parts carry their number or name besides their colour, and titles their
    sizes. There are at most as many as colours. Sums stand in a column at the right, where the
    limit crosses none of them. The limit is a dashed line with its label at its upper end.
    """
    assert len(parts) <= len(PARTS), "one colour each"
    # 1. sizes and margins
    totals = [sum(sizes.values()) for _, sizes in sums]
    longest = max(totals)
    is_drawn = limit is not None and limit <= FAR_LIMIT * longest
    end = max(longest, limit if limit is not None and is_drawn else 0, 1)
    left = 12 + PER_LETTER * max(len(name) for name, _ in sums)
    right = svg.WIDTH - 12 - PER_LETTER * max(len(text(total)) for total in totals)
    top, height = (0 if limit is None else ROW), ROW * len(sums)
    margins = {"left": left, "right": right, "top": top, "bottom": 0}
    with svg.figure_axes(**margins, height=top + height) as axes:
        # 2. bars
        axes.set(xlim=(0, end), ylim=(len(sums) - 0.5, -0.5), xticks=[])
        axes.grid(visible=False)
        axes.set_yticks(range(len(sums)), [name for name, _ in sums])
        for row, (_, sizes) in enumerate(sums):
            boxes = [(i, part, sizes[part]) for i, part in enumerate(parts) if sizes.get(part)]
            _draw_boxes(axes, row, boxes, limit, text)
            side = {"ha": "left", "va": "center", "offset": (6, 0)}
            svg.put_text(axes, (end, row), text(totals[row]), "total", **side)
        # 3. limit
        if limit is not None:
            _draw_limit(axes, limit, longest, is_drawn, text)
        about = []
        for (name, sizes), total in zip(sums, totals, strict=True):
            listed = ", ".join(f"{part} {text(size)}" for part, size in sizes.items() if size)
            about.append(f"{name}: {text(total)}, of which {listed}")
        return f'<figure class="bars">{svg.svg_of(axes, "; ".join(about))}</figure>'


def _draw_limit(
    axes: Any, limit: int, longest: int, is_drawn: bool, text: Callable[[int], str]
) -> None:
    """Draw the limit of bars as a dashed line with its label, or only the label if it is far."""
    bottom, top = axes.get_ylim()
    for colour, wide in ((svg.PAPER, 4), (svg.DARK, 2)) if is_drawn else ():
        points = [(limit, top - 0.8), (limit, bottom)]
        svg.plot(axes, points, "limit", color=colour, linewidth=wide, dashes=(5, 3))
    times = "over 1,000" if limit > 1000 * longest else f"{limit / max(longest, 1):.0f}"
    words = f"limit {text(limit)}" + ("" if is_drawn else f", {times} × the longest →")
    place = (limit if is_drawn else axes.get_xlim()[1], top)
    is_cut = axes.transData.transform(place)[0] + WIDEST_LETTER * len(words) > svg.WIDTH
    side, gap = ("right", -5) if is_cut else ("left", 5)
    side, gap = (side, gap) if is_drawn else ("right", svg.WIDTH - axes.bbox.x1)
    svg.put_text(axes, place, words, "said", ha=side, va="bottom", offset=(gap, 5))


def memory_bars(
    sums: Sequence[tuple[str, Mapping[str, int]]],
    parts: Sequence[str],
    limit: int | None = None,
    about: Mapping[str, str] | None = None,
) -> str:
    """Return bars of bytes by part with their legend; about: each part in words."""
    words = {} if about is None else about
    legend = []
    for i, part in enumerate(parts):
        if any(sizes.get(part) for _, sizes in sums):
            legend.append((i, f"{part}: {words[part]}" if part in words else part))
    return stacked_bars(sums, parts, limit, size_text) + part_legend(legend)


def shortened(label: str) -> str:
    """Return a label with an ellipsis in place of letters beyond MOST_LETTERS.

    >>> shortened("short"), shortened("a_name_that_is_long")
    ('short', 'a_name_…s_long')
    """
    if len(label) <= MOST_LETTERS:
        return label
    keep = MOST_LETTERS // 2
    return f"{label[:keep]}…{label[len(label) - keep + 1 :]}"


# --- parts of a figure --------------------------------------------------------------------------


def _draw_curve(
    axes: Any, number: int, curve: Curve, *, is_labelled: bool
) -> tuple[float, float] | None:
    """Draw a curve and return its last point, None if it has none."""
    # 1. all points, of many in a pale line; a dot where neighbours are missing
    colour, marker = line_style(number)
    few, trend = thin(curve.points, COLUMNS), medians(curve.points, TREND)
    name, width = ("data all pale", 1) if trend else ("data all", 2)
    is_gap = [True, *(y is None for _, y in few), True]
    alone = [each for i, each in enumerate(few) if tuple(is_gap[i : i + 3]) == ALONE]
    svg.plot(axes, few, name, color=colour, linewidth=width)
    svg.plot(axes, alone, "data", color=colour, marker="o", markersize=2)
    # 2. medians and marks
    svg.plot(axes, trend, "data trend", color=colour, linewidth=2.5)
    strong = trend or [(x, y) for x, y in few if y is not None]
    if curve.is_marked or is_labelled:
        every = 1 if curve.is_marked else max(1, len(strong) // NUM_MARKS)
        svg.plot(axes, strong[::-1][::every], "data", color=colour, marker=marker, markersize=10)
    # 3. crosses, one for each pixel
    top = axes.get_ylim()[1]
    pixel = lambda x: round(float(axes.transData.transform((x, top))[0]))  # noqa: E731
    crosses = {pixel(x): (x, top) for x in curve.lost}
    look = {"marker": "x", "markersize": 8, "markeredgewidth": 2, "color": colour}
    svg.plot(axes, [*crosses.values()], "data lost", f"{curve.label}: not finite", **look)
    return strong[-1] if strong else None


def _label_ends(axes: Any, ends: Sequence[tuple[tuple[float, float] | None, str, int]]) -> None:
    """Write labels next to the (end, label, number) of curves, moved apart, with dotted lines."""
    right, after = axes.bbox.x1, svg.HEIGHT - svg.TOP + LABEL_GAP
    to_figure = axes.transData.transform
    placed = [(to_figure(end), label, number) for end, label, number in ends if end]
    for i, ((x, y), label, number) in enumerate(sorted(placed, key=lambda each: -each[0][1])):
        lowest = svg.BOTTOM + LABEL_GAP * (len(placed) - 1 - i)
        at = after = max(min(y, after - LABEL_GAP), lowest)
        look = {"linewidth": 1, "dashes": (2, 3), "transform": None, "color": line_style(number)[0]}
        svg.plot(axes, [(x + 6, y), (right + 9, at)], "data leader", **look)
        shown = svg.drawable(shortened(label))
        words = axes.text(right + 12, at, shown, transform=None, va="center")
        words.set_gid(f"label|{svg.drawable(label)}")


def _name_value(axes: Any, words: str, value: float, row: int) -> None:
    """Draw a line across a histogram at a value, the first one solid, with words next to it."""
    low, high = axes.get_ylim()
    points, dashes = [(value, low), (value, high)], () if row == 0 else (5, 4)
    for colour, width, name in ((svg.PAPER, 5, "halo"), (svg.DARK, 2, "named")):
        svg.plot(axes, points, name, color=colour, linewidth=width, dashes=dashes)
    is_left = axes.transData.transform((value, 0))[0] + PER_LETTER * len(words) > axes.bbox.x1
    side, gap = ("right", -6) if is_left else ("left", 6)
    svg.put_text(axes, (value, high), words, "said", ha=side, va="top", offset=(gap, -17 * row))


def _draw_boxes(
    axes: Any,
    row: int,
    boxes: Sequence[tuple[int, str, int]],
    limit: int | None,
    text: Callable[[int], str],
) -> None:
    """Draw the (number, part, size) of a sum as boxes, with letters that fit off the limit."""
    at, scale = 0, axes.bbox.width / axes.get_xlim()[1]
    for number, part, size in boxes:
        # 1. the name or the number, in the wider side of the limit
        cut = at + size if limit is None else min(max(limit, at), at + size)
        low, high = max((at, cut), (cut, at + size), key=lambda side: side[1] - side[0])
        room = ((high - low) * scale - 4) / PER_LETTER
        letters = next((each for each in (part, str(number + 1)) if len(each) < room), "")
        # 2. the box
        look = {"color": PARTS[number], "edgecolor": INK, "linewidth": 0.6, "clip_on": False}
        [box] = axes.barh(row, size, BAR / ROW, at, **look)
        box.set_gid(f"mark|{part} {text(size)}")
        svg.put_text(axes, ((low + high) / 2, row), letters, "letters", ha="center", va="center")
        at += size


def _summary(curve: Curve) -> str:
    values = [y for _, y in curve.points if y is not None]
    if not values:
        return f"{curve.label}: no finite value"
    ends = {"first": values[0], "last": values[-1], "least": min(values), "greatest": max(values)}
    return f"{curve.label}: {', '.join(f'{name} {value:.4g}' for name, value in ends.items())}"


# --- axes ---------------------------------------------------------------------------------------


def _step_axis(axes: Any, low: float, high: float, name: str) -> None:
    """Set an x axis from one training step to another, ticks at whole steps."""
    ticks, limits = [low], (low - 1, low + 1)
    if high > low:
        every = svg.nice_ticks(low, high, is_whole=True)
        ticks, limits = [tick for tick in every if low <= tick <= high], (low, high)
    axes.set_xlim(limits)
    axes.set_xticks(ticks, svg.tick_texts(ticks))
    axes.set_xlabel(name)


def _size_axis(
    axes: Any, sizes: Sequence[float], places: Sequence[float], name: str, *, is_log: bool
) -> None:
    """Set an x axis that holds all sizes, with ticks at `places` that do not run together."""
    low, high = min(sizes), max(sizes)
    if low > 0 and (high >= 4 * low or is_log):
        axes.set_xscale("log")
        room = (high / low) ** 0.03
        axes.set_xlim(low / room, high * room)
    else:
        room = 0.03 * (high - low) or 1.0
        axes.set_xlim(low - room, high + room)
    ticks = _apart(axes, places)
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.minorticks_off()
    axes.set_xlabel(name)


def _value_axis(
    axes: Any, values: Sequence[float], *, from_zero: bool, is_whole: bool = False
) -> None:
    """Set a y axis from tick to tick that holds all values, logarithmic if these span LOG_FROM."""
    low, high = min(values), max(values)
    if not from_zero and svg.is_logarithmic(low, high):
        axes.set_yscale("log")
        ticks = svg.decades(low, high)
        texts = [f"{tick:g}" for tick in ticks]
    else:
        low, high = (min(low, 0.0), max(high, 0.0)) if from_zero else (low, high)
        ticks = svg.nice_ticks(low, high, is_whole=is_whole)
        texts = svg.tick_texts(ticks)
    axes.set_ylim(ticks[0], ticks[-1])
    axes.set_yticks(ticks, texts)
    axes.minorticks_off()


def _apart(axes: Any, places: Sequence[float]) -> list[float]:
    """Return those x whose numbers do not run into each other below the axis."""
    kept, after = [], -math.inf
    for x in places:
        half, at = PER_LETTER * len(f"{x:g}") / 2, axes.transData.transform((x, 1))[0]
        if at - half > after:
            kept.append(x)
            after = at + half + PER_LETTER
    return kept
