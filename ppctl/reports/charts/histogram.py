"""A histogram as one svg: how many values fall into each bin, with some of them named."""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.reports.charts.axis import Axis, value_axis
from ppctl.reports.charts.curves import PER_LETTER, grid, svg, x_title
from ppctl.reports.charts.lines import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from ppctl.reports.charts.palette import LINES

NUM_BINS = 40
FAR = 3.0  # times the median: beyond, values share the last bin, and a named one is said and not drawn
ROOM = 64  # for the bin of those, in the units of WIDTH


def histogram(values: Sequence[float], named: Sequence[tuple[str, float]], *, title: str, x_name: str) -> str:
    """The svg of positive values, the first of `named` being their median, which is drawn solid and the others dashed.

    Values beyond FAR times the median are counted in the last bin.
    """
    median = named[0][1]
    drawn_named = [(name, value) for name, value in named if median / FAR <= value <= FAR * median]
    inside = [value for value in values if value <= FAR * median]
    across = value_axis([*inside, *(value for _, value in drawn_named)])
    if across.is_log:  # bins are equally wide
        across = value_axis([*inside, *(value for _, value in drawn_named)], from_zero=True)
    beyond = len(values) - len(inside)
    counts = [0] * NUM_BINS
    for value in inside:
        counts[min(NUM_BINS - 1, int(NUM_BINS * across.share(value)))] += 1
    up = value_axis([*counts, beyond], from_zero=True)
    right = WIDTH - RIGHT - (ROOM if beyond else 0)
    wide = (right - LEFT) / NUM_BINS
    drawn = [*grid(across, up, right)]
    for i, count in enumerate(counts):
        low, high = (across.low + (across.high - across.low) * k / NUM_BINS for k in (i, i + 1))
        if count:
            drawn.append(_bar(LEFT + i * wide, wide, count, up, f"{low:.4g} to {high:.4g}: {count:,}"))
    if beyond:
        told = f"more than {FAR * median:.4g}: {beyond:,}"
        drawn.append(_bar(WIDTH - RIGHT - 24, 16, beyond, up, told))
        drawn.append(f'<text x="{WIDTH - RIGHT - 16}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">more</text>')
    for row, (name, value) in enumerate(drawn_named):
        drawn += _named(
            f"{name} {value:.4g}", LEFT + (right - LEFT) * across.share(value), row, right, is_solid=not row
        )
    words = "; ".join(
        [f"{title}, {x_name}", *(f"{name} {value:.4g}" for name, value in named)]
        + ([f"{beyond:,} above {FAR * median:.4g}"] if beyond else [])
    )
    return svg(words, [*drawn, x_title(x_name, right)])


def is_far(median: float, value: float) -> bool:
    """Whether a value lies too far from the median to be drawn with it."""
    return not median / FAR <= value <= FAR * median


def _bar(x: float, wide: float, count: int, up: Axis, told: str) -> str:
    tall = max(1.0, (HEIGHT - TOP - BOTTOM) * up.share(count))  # one of a hundred thousand is seen
    return (
        f'<g class="bar"><title>{told}</title><rect x="{x:.1f}" y="{HEIGHT - BOTTOM - tall:.1f}" '
        f'width="{max(1.0, wide - 1):.1f}" height="{tall:.1f}" fill="{LINES[0]}"/></g>'
    )


def _named(text: str, x: float, row: int, right: float, *, is_solid: bool) -> list[str]:
    is_left = x + PER_LETTER * len(text) > right
    side, at = ("end", x - 5) if is_left else ("start", x + 5)
    dash = "" if is_solid else ' stroke-dasharray="5 4"'
    path = f"M{x:.1f} {TOP - 8}V{HEIGHT - BOTTOM}"
    y = TOP + 4 + 17 * row
    return [
        f'<path d="{path}" stroke="var(--paper)" stroke-width="5"/>',
        f'<path class="named" d="{path}" stroke="var(--ink)" stroke-width="2"{dash}/>',
        f'<text class="said" x="{at:.1f}" y="{y}" text-anchor="{side}">{text}</text>',
    ]
