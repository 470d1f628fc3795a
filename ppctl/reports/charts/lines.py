"""Lines over a few sizes as one svg: marks on a line for what was taken, dashes of its colour for what was expected."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from ppctl.reports.charts.palette import LINES

WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 44
PER_LETTER = 7.5  # of a label on the x axis, in the units of WIDTH
NUM_STEPS = 5  # on the y axis, about
MOST_LINES = len(LINES) ** 2  # a colour and a mark tell them apart
SHAPES = ("circle", "square", "triangle", "diamond")

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """One line of a figure; points ascend by x."""

    label: str
    points: Points
    expected: Points = ()  # drawn dashed, without marks
    others: Points = ()  # marks alone, hollow


def figure(lines: Sequence[Line], *, title: str, x_name: str, y_text: Callable[[float], str]) -> str:
    """The svg of at most MOST_LINES lines, y from 0 up; `y_text` writes a y. Every mark says its numbers in a title.

    x is logarithmic where it spans a factor of four, so that doublings stand equally far apart.
    """
    assert 0 < len(lines) <= MOST_LINES, "a colour and a mark each"
    every = [point for line in lines for points in (line.points, line.expected, line.others) for point in points]
    marked = sorted({x for line in lines for x, _ in (*line.points, *line.others)})
    low, high = min(x for x, _ in every), max(x for x, _ in every)
    step = nice_step(max(y for _, y in every) or 1.0, NUM_STEPS)
    top = step * math.ceil(max(y for _, y in every) / step + 1e-9) or step
    is_log = low > 0 and high >= 4 * low
    scale = math.log if is_log else float

    def place(x: float, y: float) -> tuple[float, float]:
        share = (scale(x) - scale(low)) / ((scale(high) - scale(low)) or 1.0)
        inner = WIDTH - LEFT - RIGHT
        at = LEFT + 0.03 * inner + 0.94 * inner * share if high > low else LEFT + inner / 2
        return round(at, 1), round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / top, 1)

    drawn = []
    for k in range(round(top / step) + 1):
        _, y = place(low, k * step)
        drawn.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        drawn.append(f'<text x="{LEFT - 7}" y="{y + 4}" text-anchor="end">{escape(y_text(k * step))}</text>')
    after = -math.inf
    for x in marked:
        at, text = place(x, 0)[0], f"{x:g}"
        half = PER_LETTER * len(text) / 2
        if at - half > after:  # letters would run into each other
            drawn.append(f'<text x="{at}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{text}</text>')
            after = at + half + PER_LETTER
    middle = (LEFT + WIDTH - RIGHT) / 2
    drawn.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_name)}</text>')
    for number, line in enumerate(lines):
        drawn += _drawn(number, line, place, y_text)
    told = escape(f"{title}, by {x_name}")
    return f'<svg class="lines" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{told}">{"".join(drawn)}</svg>'


def key(number: int, *, is_expected: bool = False) -> str:
    """The sample of a line for a legend."""
    colour = LINES[number % len(LINES)]
    sample = "" if is_expected else mark(number, 15, 9, is_hollow=False)
    return (
        '<svg class="key" viewBox="0 0 30 18" aria-hidden="true">'
        f'<path d="M1 9H29" stroke="{colour}"{_dash(is_expected)}/>{sample}</svg>'
    )


def mark(number: int, x: float, y: float, *, is_hollow: bool) -> str:
    """The mark of a line, told by colour and shape."""
    colour, shape = LINES[number % len(LINES)], SHAPES[(number + number // len(LINES)) % len(SHAPES)]
    look = f'fill="{"var(--paper)" if is_hollow else colour}" stroke="{colour}" stroke-width="2"'
    if shape == "circle":
        return f'<circle cx="{x}" cy="{y}" r="4.5" {look}/>'
    corners = {
        "square": ((-4, -4), (4, -4), (4, 4), (-4, 4)),
        "triangle": ((0, -5.5), (5.5, 4.5), (-5.5, 4.5)),
        "diamond": ((0, -6), (6, 0), (0, 6), (-6, 0)),
    }[shape]
    points = " ".join(f"{x + dx:g},{y + dy:g}" for dx, dy in corners)
    return f'<polygon points="{points}" {look}/>'


def nice_step(largest: float, number: int) -> float:
    """A step of 1, 2 or 5 times a power of ten, of which about `number` reach `largest`.

    >>> nice_step(0.47, 5), nice_step(9300, 5)
    (0.1, 2000.0)
    """
    rough = largest / number
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _drawn(
    number: int, line: Line, place: Callable[[float, float], tuple[float, float]], y_text: Callable[[float], str]
) -> list[str]:
    colour, drawn = LINES[number % len(LINES)], []
    for points, is_expected in ((line.expected, True), (line.points, False)):
        if len(points) > 1:
            path = "M" + "L".join(f"{x} {y}" for x, y in (place(*point) for point in points))
            drawn.append(f'<path d="{path}" stroke="{colour}"{_dash(is_expected)}/>')
    for points, is_hollow in ((line.points, False), (line.others, True)):
        for x, y in points:
            said = escape(f"{line.label}, {x:g}: {y_text(y)}{' measured' if is_hollow else ''}")
            drawn.append(f"<g><title>{said}</title>{mark(number, *place(x, y), is_hollow=is_hollow)}</g>")
    return drawn


def _dash(is_expected: bool) -> str:
    return ' stroke-dasharray="5 4" stroke-width="1.5"' if is_expected else ' stroke-width="2.5"'
