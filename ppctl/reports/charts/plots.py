"""Static figures of html pages as svg: curves over steps, lines over sizes, a histogram, stacked bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppctl.reports.charts.palette import INK, LINES, PARTS, line_style
from ppctl.reports.charts.svg import (
    BOTTOM,
    DARK,
    HEIGHT,
    PAPER,
    RIGHT,
    TOP,
    WIDTH,
    decades,
    drawable,
    figure_axes,
    is_logarithmic,
    nice_ticks,
    plot,
    put_text,
    svg_of,
    tick_texts,
)
from ppctl.reports.charts.thinning import Points, medians, thin

PER_LETTER = 8.0
WIDEST_LETTER = 9.5  # in a narrow window, whose letters are larger than the figure
MOST_LINES = len(LINES) ** 2  # a colour and a mark tell them apart

COLUMNS = 600  # of a curve: more than a window shows pixels of a figure
TREND = 80  # medians of a curve of many points
MOST_LETTERS = 14  # of a label
LABEL_GAP = 18  # between labels
NUM_MARKS = 4  # on each of several curves

NUM_BINS = 40
FAR_BIN = 3.0  # times the median: beyond, values share the last bin, and a named one is said and not drawn
FAR_LIMIT = 4.0  # times the longest bar: a limit beyond is said and not drawn, or bars could not be seen
ROW, BAR = 26, 20  # height of a row of bars, and of a bar in it


@dataclass(frozen=True)
class Curve:
    """One curve of a figure; points ascend by x, and None is a gap."""

    label: str
    points: Points
    lost: Sequence[float] = ()  # where a value was not finite: crosses at the upper edge
    is_marked: bool = False  # a mark at every point


@dataclass(frozen=True)
class Line:
    """One line of a figure over a few sizes; points ascend by x."""

    label: str
    points: Sequence[tuple[float, float]]
    predicted: Sequence[tuple[float, float]] = ()  # drawn dashed, without marks
    measured: Sequence[tuple[float, float]] = ()  # marks alone, hollow


# --- figures ---------------------------------------------------------------------------------------------------------


def curves_svg(
    curves: Sequence[Curve], *, title: str, x_name: str, from_zero: bool = False, others: Sequence[Curve] = ()
) -> str:
    """Return the svg of at most MOST_LINES curves, of which one has a value; several carry their labels.

    others: curves of further figures, whose values these axes hold too, so that the figures can be compared.
    Of many points a pale curve has the least and the greatest in every pixel column, a strong one their medians.
    """
    assert 0 < len(curves) <= MOST_LINES, "a colour and a mark each"
    values = [y for curve in (*curves, *others) for _, y in curve.points if y is not None]
    every_x = [x for curve in (*curves, *others) for x in (*(x for x, _ in curve.points), *curve.lost)]
    letters = max(len(shortened(curve.label)) for curve in curves) if len(curves) > 1 else 0
    right = WIDTH - RIGHT - (14 + PER_LETTER * letters if letters else 0)
    with figure_axes(right=right) as axes:
        _step_axis(axes, min(every_x), max(every_x), x_name)
        _value_axis(axes, values, from_zero=from_zero)
        ends = [_draw_curve(axes, number, curve, is_labelled=bool(letters)) for number, curve in enumerate(curves)]
        if letters:
            _label_ends(axes, [(end, curve.label, i) for i, (end, curve) in enumerate(zip(ends, curves, strict=True))])
        return svg_of(axes, "; ".join([f"{title}, by {x_name}", *map(_summary, curves)]))


def lines_svg(
    lines: Sequence[Line],
    *,
    title: str,
    x_name: str,
    y_text: Callable[[float], str],
    from_zero: bool = True,
    is_log: bool = False,
) -> str:
    """Return the svg of at most MOST_LINES lines; `y_text` writes a y. Every mark says its numbers.

    from_zero: y from 0 up, else from the least to the greatest. x is logarithmic with `is_log`, and where it spans a
    factor of four, so that doublings stand equally far apart.
    """
    assert 0 < len(lines) <= MOST_LINES, "a colour and a mark each"
    every = [point for line in lines for points in (line.points, line.predicted, line.measured) for point in points]
    low, high = min(x for x, _ in every), max(x for x, _ in every)
    with figure_axes() as axes:
        if low > 0 and (high >= 4 * low or is_log):
            axes.set_xscale("log")
            room = (high / low) ** 0.03
            axes.set_xlim(low / room, high * room)
        else:
            room = 0.03 * (high - low) or 1.0
            axes.set_xlim(low - room, high + room)
        if from_zero:
            ticks = nice_ticks(0.0, max(y for _, y in every))
            axes.set_ylim(ticks[0], ticks[-1])
            axes.set_yticks(ticks, [y_text(tick) for tick in ticks])
        else:
            _value_axis(axes, [y for _, y in every], from_zero=False)
        marked = _apart(axes, sorted({x for line in lines for x, _ in (*line.points, *line.measured)}))
        axes.set_xticks(marked, [f"{x:g}" for x in marked])
        axes.minorticks_off()
        axes.set_xlabel(x_name)
        for number, line in enumerate(lines):
            colour, marker = line_style(number)
            plot(axes, line.predicted, "data dashed", color=colour, linewidth=1.5, dashes=(5, 4))
            plot(axes, line.points, "data", color=colour, linewidth=2.5)
            for points, fill, note in ((line.points, colour, ""), (line.measured, PAPER, " measured")):
                look = {"marker": marker, "markersize": 9, "markerfacecolor": fill, "markeredgewidth": 2}
                for x, y in points:
                    said = f"{line.label}, {x:g}: {y_text(y)}{note}"
                    plot(axes, [(x, y)], "data mark", said, color=colour, **look)
        return svg_of(axes, f"{title}, by {x_name}")


def histogram_svg(values: Sequence[float], named: Sequence[tuple[str, float]], *, title: str, x_name: str) -> str:
    """Return the svg of positive values, the first of `named` being their median, a solid line; the others are dashed.

    Values beyond FAR_BIN times the median are counted in the last bin.
    """
    limit = FAR_BIN * named[0][1]
    near = [(name, value) for name, value in named if not is_far(named[0][1], value)]
    inside = [value for value in values if value <= limit]
    low, high = (end([*inside, *(value for _, value in near)]) for end in (min, max))
    ticks = nice_ticks(0.0 if is_logarithmic(low, high) else low, high)
    texts = tick_texts(ticks)
    width, counts = (ticks[-1] - ticks[0]) / NUM_BINS, [0] * NUM_BINS
    for value in inside:
        counts[min(NUM_BINS - 1, int((value - ticks[0]) / width))] += 1
    bars = [(ticks[0] + i * width, count) for i, count in enumerate(counts) if count]
    titles = [f"{low:.4g} to {low + width:.4g}: {count:,}" for low, count in bars]
    if beyond := len(values) - len(inside):
        bars.append((ticks[-1] + 6 * width, beyond))
        titles.append(f"more than {limit:.4g}: {beyond:,}")
        ticks, texts = [*ticks, ticks[-1] + 6.5 * width], [*texts, "more"]
    with figure_axes() as axes:
        axes.set_xlim(ticks[0], ticks[-1] + (width if beyond else 0))
        axes.set_xticks(ticks, texts)
        axes.set_xlabel(x_name)
        _value_axis(axes, [count for _, count in bars], from_zero=True, is_whole=True)
        least = axes.get_ylim()[1] / (HEIGHT - TOP - BOTTOM)  # one of a hundred thousand is seen
        for (low, count), said in zip(bars, titles, strict=True):
            [bar] = axes.bar(low, max(count, least), 0.9 * width, align="edge", color=LINES[0], clip_on=False)
            bar.set_gid(f"data mark|{said}")
        for row, (name, value) in enumerate(near):
            _name_value(axes, f"{name} {value:.4g}", value, row)
        words = [f"{title}, {x_name}", *(f"{name} {value:.4g}" for name, value in named)]
        return svg_of(axes, "; ".join(words + ([f"{beyond:,} above {limit:.4g}"] if beyond else [])))


def is_far(median: float, value: float) -> bool:
    """Return whether a value lies too far from the median to be drawn with it."""
    return not median / FAR_BIN <= value <= FAR_BIN * median


def stacked_bars(
    sums: Sequence[tuple[str, Mapping[str, int]]], parts: Sequence[str], limit: int | None, text: Callable[[int], str]
) -> str:
    """Return the svg of a bar for each (name, sizes by part), parts in the order given; `text` writes a size.

    Parts carry their number or name besides their colour, a title says the size of each. There are at most as many as
    colours. Sums stand in a column at the right, where the limit crosses none of them. The limit is a dashed line with
    its label at its upper end.
    """
    assert len(parts) <= len(PARTS), "one colour each"
    longest = max(sum(sizes.values()) for _, sizes in sums)
    is_drawn = limit is not None and limit <= FAR_LIMIT * longest
    end = max(longest, limit if limit is not None and is_drawn else 0, 1)
    left = 12 + PER_LETTER * max(len(name) for name, _ in sums)
    right = WIDTH - 12 - PER_LETTER * max(len(text(sum(sizes.values()))) for _, sizes in sums)
    top, height = (0 if limit is None else ROW), ROW * len(sums)
    with figure_axes(left=left, right=right, top=top, bottom=0, height=top + height) as axes:
        axes.set(xlim=(0, end), ylim=(len(sums) - 0.5, -0.5), xticks=[])
        axes.grid(visible=False)
        axes.set_yticks(range(len(sums)), [name for name, _ in sums])
        for row, (_, sizes) in enumerate(sums):
            boxes = [(i, part, sizes[part]) for i, part in enumerate(parts) if sizes.get(part)]
            _draw_boxes(axes, row, boxes, limit, text)
            put_text(axes, (end, row), text(sum(sizes.values())), "total", ha="left", va="center", offset=(6, 0))
        if limit is not None and is_drawn:
            for colour, wide in ((PAPER, 4), (DARK, 2)):
                points = [(limit, -1.3), (limit, len(sums) - 0.5)]
                plot(axes, points, "limit", color=colour, linewidth=wide, dashes=(5, 3))
        if limit is not None:
            times = "over 1,000" if limit > 1000 * longest else f"{limit / max(longest, 1):.0f}"
            said = f"limit {text(limit)}" + ("" if is_drawn else f", {times} × the longest →")
            place = (limit if is_drawn else end, -0.5)
            is_left = not is_drawn or axes.transData.transform(place)[0] + WIDEST_LETTER * len(said) > WIDTH
            side, gap = ("right", -5 if is_drawn else WIDTH - right) if is_left else ("left", 5)
            put_text(axes, place, said, "said", ha=side, va="bottom", offset=(gap, 5))
        listed = (
            f"{name}: {text(sum(sizes.values()))}, of which "
            + ", ".join(f"{part} {text(size)}" for part, size in sizes.items() if size)
            for name, sizes in sums
        )
        return f'<figure class="bars">{svg_of(axes, "; ".join(listed))}</figure>'


def shortened(label: str) -> str:
    """Return a label with an ellipsis in the place of what is too much.

    >>> shortened("short"), shortened("a_name_that_is_long")
    ('short', 'a_name_…s_long')
    """
    keep = MOST_LETTERS // 2
    return label if len(label) <= MOST_LETTERS else f"{label[:keep]}…{label[len(label) - keep + 1 :]}"


# --- parts of a figure -----------------------------------------------------------------------------------------------


def _draw_curve(axes: Any, number: int, curve: Curve, *, is_labelled: bool) -> tuple[float, float] | None:
    """Draw a curve and return its last point, None if it has none."""
    colour, marker = line_style(number)
    few, trend = thin(curve.points, COLUMNS), medians(curve.points, TREND)
    is_alone = lambda i: all(y is None for _, y in (*few[max(0, i - 1) : i], *few[i + 1 : i + 2]))  # noqa: E731
    alone = [(x, y) for i, (x, y) in enumerate(few) if y is not None and is_alone(i)]  # of which no line is drawn
    plot(axes, few, "data all pale" if trend else "data all", color=colour, linewidth=1 if trend else 2)
    plot(axes, alone, "data", color=colour, marker="o", markersize=2)
    plot(axes, trend, "data trend", color=colour, linewidth=2.5)
    strong = trend or [(x, y) for x, y in few if y is not None]
    if curve.is_marked or is_labelled:
        every = 1 if curve.is_marked else max(1, len(strong) // NUM_MARKS)
        plot(axes, strong[::-1][::every], "data", color=colour, marker=marker, markersize=10)
    top = axes.get_ylim()[1]
    crosses = {round(float(axes.transData.transform((x, top))[0])): (x, top) for x in curve.lost}.values()
    look = {"marker": "x", "markersize": 8, "markeredgewidth": 2}
    plot(axes, list(crosses), "data lost", f"{curve.label}: not finite", color=colour, **look)
    return strong[-1] if strong else None


def _label_ends(axes: Any, ends: Sequence[tuple[tuple[float, float] | None, str, int]]) -> None:
    """Write labels next to the ends of curves (point, label, number), moved apart, a dotted line to each."""
    right, after = axes.bbox.x1, HEIGHT - TOP + LABEL_GAP
    placed = [(axes.transData.transform(point), label, number) for point, label, number in ends if point]
    for i, ((x, y), label, number) in enumerate(sorted(placed, key=lambda each: -each[0][1])):
        lowest = BOTTOM + LABEL_GAP * (len(placed) - 1 - i)
        at = after = max(min(y, after - LABEL_GAP), lowest)
        look = {"linewidth": 1, "dashes": (2, 3), "transform": None}
        plot(axes, [(x + 6, y), (right + 9, at)], "data leader", color=line_style(number)[0], **look)
        words = axes.text(right + 12, at, drawable(shortened(label)), transform=None, va="center")
        words.set_gid(f"label|{drawable(label)}")


def _name_value(axes: Any, words: str, value: float, row: int) -> None:
    """Draw a line across a histogram at a value, the first one solid, with words next to it."""
    low, high = axes.get_ylim()
    dashes = () if row == 0 else (5, 4)
    for colour, width, name in ((PAPER, 5, "halo"), (DARK, 2, "named")):
        plot(axes, [(value, low), (value, high)], name, color=colour, linewidth=width, dashes=dashes)
    is_left = axes.transData.transform((value, 0))[0] + PER_LETTER * len(words) > axes.bbox.x1
    side, gap = ("right", -6) if is_left else ("left", 6)
    put_text(axes, (value, high), words, "said", ha=side, va="top", offset=(gap, -17 * row))


def _draw_boxes(
    axes: Any, row: int, boxes: Sequence[tuple[int, str, int]], limit: int | None, text: Callable[[int], str]
) -> None:
    """Draw the (number, part, size) of a sum next to each other, with as many letters in each as fit off the limit."""
    at, scale = 0, axes.bbox.width / axes.get_xlim()[1]
    for number, part, size in boxes:
        cut = at + size if limit is None else min(max(limit, at), at + size)
        low, high = max((at, cut), (cut, at + size), key=lambda side: side[1] - side[0])
        wide = (high - low) * scale
        letters = next((each for each in (part, str(number + 1)) if PER_LETTER * len(each) + 4 < wide), "")
        look = {"color": PARTS[number], "edgecolor": INK, "linewidth": 0.6, "clip_on": False}
        [box] = axes.barh(row, size, BAR / ROW, at, **look)
        box.set_gid(f"mark|{part} {text(size)}")
        put_text(axes, ((low + high) / 2, row), letters, "letters", ha="center", va="center")
        at += size


def _summary(curve: Curve) -> str:
    values = [y for _, y in curve.points if y is not None]
    if not values:
        return f"{curve.label}: no finite value"
    ends = f"first {values[0]:.4g}, last {values[-1]:.4g}, least {min(values):.4g}, greatest {max(values):.4g}"
    return f"{curve.label}: {ends}"


# --- axes ------------------------------------------------------------------------------------------------------------


def _step_axis(axes: Any, low: float, high: float, name: str) -> None:
    """Set an x axis from one training step to another, ticks at whole steps."""
    ticks = [tick for tick in nice_ticks(low, high, is_whole=True) if low <= tick <= high] if high > low else [low]
    axes.set_xlim((low, high) if high > low else (low - 1, low + 1))
    axes.set_xticks(ticks, tick_texts(ticks))
    axes.set_xlabel(name)


def _value_axis(axes: Any, values: Sequence[float], *, from_zero: bool, is_whole: bool = False) -> None:
    """Set a y axis that begins and ends at a tick and holds all values, logarithmic where they span LOG_FROM."""
    low, high = min(values), max(values)
    if not from_zero and is_logarithmic(low, high):
        axes.set_yscale("log")
        ticks = decades(low, high)
        texts = [f"{tick:g}" for tick in ticks]
    else:
        low, high = (min(low, 0.0), max(high, 0.0)) if from_zero else (low, high)
        ticks = nice_ticks(low, high, is_whole=is_whole)
        texts = tick_texts(ticks)
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
