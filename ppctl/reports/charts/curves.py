"""Curves over the steps of a run as one svg: however many steps there are, the page stays small and spikes are seen."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from ppctl.reports.charts.axis import Axis, step_axis, value_axis
from ppctl.reports.charts.lines import BOTTOM, HEIGHT, LEFT, MOST_LINES, RIGHT, TOP, WIDTH, mark
from ppctl.reports.charts.palette import LINES

COLUMNS = 600  # of a curve: more than a window shows pixels of a figure
TREND = 80  # medians of a curve of many points
PER_LETTER = 8.0  # of a label
MOST_LETTERS = 14  # of a label
LABEL_GAP = 18  # between labels, in the units of HEIGHT
NUM_MARKS = 4  # on each of several curves

Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Curve:
    """One curve of a figure; points ascend by x, and None is a gap."""

    label: str
    points: Points
    lost: Sequence[float] = ()  # where a value was not finite: crosses at the upper edge
    is_marked: bool = False  # a mark at every point


def figure(curves: Sequence[Curve], *, title: str, x_name: str, from_zero: bool = False) -> str:
    """The svg of at most MOST_LINES curves, of which one has a value; several carry their labels.

    Of many points a pale curve has the least and the greatest in every pixel column, a strong one their medians.
    """
    assert 0 < len(curves) <= MOST_LINES, "a colour and a mark each"
    values = [y for curve in curves for _, y in curve.points if y is not None]
    every_x = [x for curve in curves for x in (*(x for x, _ in curve.points), *curve.lost)]
    across, up = step_axis(min(every_x), max(every_x)), value_axis(values, from_zero=from_zero)
    letters = max(len(cut(curve.label)) for curve in curves) if len(curves) > 1 else 0
    right = WIDTH - RIGHT - (14 + PER_LETTER * letters if letters else 0)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            round(LEFT + (right - LEFT) * across.share(x), 1),
            round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * up.share(y), 1),
        )

    drawn = [*grid(across, up, right), x_title(x_name, right)]
    ends = []
    for number, curve in enumerate(curves):
        placed = [(x, None) if y is None else place(x, y) for x, y in thin(curve.points, COLUMNS)]
        trend = [place(*point) for point in medians(curve.points, TREND)]
        drawn += _drawn(number, placed, trend)
        strong = trend or [(x, y) for x, y in placed if y is not None]
        if curve.is_marked or letters:
            every = 1 if curve.is_marked else max(1, len(strong) // NUM_MARKS)
            drawn += [mark(number, *point, is_hollow=False) for point in strong[::-1][::every]]
        drawn += _crosses(number, curve, sorted({place(x, up.high)[0] for x in curve.lost}))
        if letters and strong:
            ends.append((strong[-1], number, curve.label))
    drawn += _labels(ends, right)
    told = "; ".join([f"{title}, by {x_name}", *map(_summary, curves)])
    return svg(told, drawn)


def thin(points: Points, columns: int) -> list[tuple[float, float | None]]:
    """The first, least, greatest and last point of each of so many columns, and a gap if it has one; all, of few.

    >>> thin([(x, 9.0 if x == 5 else 0.0) for x in range(100)], 2)
    [(0, 0.0), (5, 9.0), (49, 0.0), (50, 0.0), (99, 0.0)]
    """
    if len(points) <= 2 * columns:
        return list(points)
    kept: list[tuple[float, float | None]] = []
    for column in _columns(points, columns):
        found = [(y, i) for i, (_, y) in enumerate(column) if y is not None]
        indices = {0, len(column) - 1}
        if found:
            indices |= {min(found)[1], max(found, key=lambda each: each[0])[1]}
        indices |= set([i for i, (_, y) in enumerate(column) if y is None][:1])
        kept += [column[i] for i in sorted(indices)]
    return kept


def medians(points: Points, columns: int) -> list[tuple[float, float]]:
    """The median of each of so many columns, at its middle point; nothing where there are few points."""
    if len(points) <= 4 * columns:
        return []
    found = ([(x, y) for x, y in column if y is not None] for column in _columns(points, columns))
    return [(column[len(column) // 2][0], statistics.median(y for _, y in column)) for column in found if column]


def cut(label: str) -> str:
    """A label with an ellipsis in the place of what is too much.

    >>> cut("short"), cut("a_name_that_is_long")
    ('short', 'a_name_…s_long')
    """
    keep = MOST_LETTERS // 2
    return label if len(label) <= MOST_LETTERS else f"{label[:keep]}…{label[len(label) - keep + 1 :]}"


def grid(across: Axis, up: Axis, right: float) -> Iterator[str]:
    """Lines and texts of both axes."""
    for tick in up.ticks:
        y = round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * up.share(tick), 1)
        yield f'<line class="grid" x1="{LEFT}" x2="{right:.1f}" y1="{y}" y2="{y}"/>'
        yield f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{up.text(tick)}</text>'
    after = -1.0
    for tick in across.ticks:
        x, text = LEFT + (right - LEFT) * across.share(tick), across.text(tick)
        half = PER_LETTER * len(text) / 2
        if x - half > after:  # letters would run into each other
            yield f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{text}</text>'
            after = x + half + PER_LETTER


def x_title(name: str, right: float) -> str:
    """What stands below the axis."""
    return f'<text x="{(LEFT + right) / 2:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(name)}</text>'


def svg(told: str, drawn: Sequence[str]) -> str:
    """The figure of these elements; `told` says it in words."""
    return (
        f'<svg class="lines" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(told)}">'
        f"{''.join(drawn)}</svg>"
    )


def _columns(points: Points, columns: int) -> Iterator[Points]:
    """The points by column; a column may have none, and then there is none."""
    low, width = points[0][0], (points[-1][0] - points[0][0]) / columns or 1.0
    begin, now = 0, 0
    for i, (x, _) in enumerate(points):
        column = min(columns - 1, int((x - low) / width))
        if column != now:
            if i > begin:
                yield points[begin:i]
            begin, now = i, column
    yield points[begin:]


def _drawn(
    number: int, placed: Sequence[tuple[float, float | None]], trend: Sequence[tuple[float, float]]
) -> Iterator[str]:
    colour = LINES[number % len(LINES)]
    parts, is_open = [], False
    for i, (x, y) in enumerate(placed):
        if y is None:
            is_open = False
            continue
        is_alone = not is_open and (i + 1 == len(placed) or placed[i + 1][1] is None)
        parts.append(f"{'L' if is_open else 'M'}{x:g} {y:g}" + ("h.01" if is_alone else ""))
        is_open = True
    name, wide = ("all pale", 1) if trend else ("all", 2)
    yield f'<path class="{name}" d="{"".join(parts)}" stroke="{colour}" stroke-width="{wide}" stroke-linecap="round"/>'
    if trend:
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in trend)
        yield f'<path class="trend" d="{path}" stroke="{colour}" stroke-width="2.5"/>'


def _crosses(number: int, curve: Curve, at: Sequence[float]) -> Iterator[str]:
    told = escape(f"{curve.label}: not finite")
    for x in at:
        path = f"M{x - 4:g} {TOP - 4}l8 8m0 -8l-8 8"
        colour = LINES[number % len(LINES)]
        yield f'<g class="lost"><title>{told}</title><path d="{path}" stroke="{colour}" stroke-width="2"/></g>'


def _labels(ends: Sequence[tuple[tuple[float, float], int, str]], right: float) -> Iterator[str]:
    """Labels beside the ends of curves, moved apart."""
    after = TOP - LABEL_GAP
    ordered = sorted(ends, key=lambda end: end[0][1])
    for i, ((x, y), number, label) in enumerate(ordered):
        latest = HEIGHT - BOTTOM - LABEL_GAP * (len(ordered) - 1 - i)
        at = after = min(max(y, after + LABEL_GAP), latest)
        yield f'<path class="leader" d="M{x + 6:g} {y:g}L{right + 9:g} {at:g}" stroke="{LINES[number % len(LINES)]}"/>'
        said = f"<title>{escape(label)}</title>{escape(cut(label))}"
        yield f'<text class="label" x="{right + 12:g}" y="{at + 4:g}">{said}</text>'


def _summary(curve: Curve) -> str:
    values = [y for _, y in curve.points if y is not None]
    if not values:
        return f"{curve.label}: no finite value"
    ends = f"first {values[0]:.4g}, last {values[-1]:.4g}, least {min(values):.4g}, greatest {max(values):.4g}"
    return f"{curve.label}: {ends}"
