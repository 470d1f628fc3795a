"""The drawing surface of static figures: axes of matplotlib, whose svg becomes a part of a page.

An svg takes its letters and colours from the page (THEME, `.lines` in page.css), so that it is read
on light and on dark paper, and holds no ids and no links, so that a page may have many. Matplotlib
is imported when a figure is drawn.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any
from xml.etree import ElementTree

from ppctl.reports.charts.thinning import Points

WIDTH, HEIGHT = 460, 300  # units of an svg, each about a pixel
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 44
LETTER_HEIGHT = 13
SOFT, GRID, DARK, PAPER = "#010101", "#020202", "#030303", "#040404"  # replaced by the page's
THEME = {SOFT: "var(--soft)", GRID: "var(--line)", DARK: "var(--ink)", PAPER: "var(--paper)"}

NUM_TICKS = 5  # of an axis, about
LOG_FROM = 100.0  # greatest over least value from which on an axis of values is logarithmic
LEAST = 1e-100  # on a logarithmic axis
MOST_DECADES = 6  # with a tick each
SAME = 1e-5  # spans below, as a share of the values, are drawn as one value


@contextmanager
def figure_axes(
    *,
    left: float = LEFT,
    right: float = WIDTH - RIGHT,
    top: float = TOP,
    bottom: float = BOTTOM,
    height: float = HEIGHT,
) -> Iterator[Any]:
    """Yield axes with these margins in a figure of WIDTH, a point of which is a unit of the svg."""
    import matplotlib
    from matplotlib.figure import Figure

    # the letters are the page's, a label may hold a $, and the same run gives the same bytes
    look: Any = {"svg.fonttype": "none", "svg.hashsalt": "ppctl", "text.parse_math": False}
    look |= {"font.size": LETTER_HEIGHT, "lines.scale_dashes": False}
    with matplotlib.rc_context(look), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the page's font may have it
        figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72)
        figure.patch.set_visible(False)
        size = (right - left) / WIDTH, (height - top - bottom) / height
        axes = figure.add_axes((left / WIDTH, bottom / height, *size), frame_on=False)
        axes.tick_params(length=0, left=False, bottom=False, pad=7)
        axes.grid(axis="y", color=GRID, linewidth=1)
        axes.set_axisbelow(True)
        yield axes


def plot(axes: Any, points: Points, name: str, title: str = "", **look: Any) -> None:
    """Draw points as a line, or as marks, in an element of the class `name` with a title."""
    if not points:
        return
    x, y = zip(*((x, math.nan if y is None else y) for x, y in points), strict=True)
    if "marker" in look:
        look = {"linewidth": 0, "markeredgewidth": 0} | look
    look |= {"clip_on": False, "scalex": False, "scaley": False}
    axes.plot(x, y, gid=f"{name}|{drawable(title)}", **look)


def put_text(
    axes: Any, at: tuple[float, float], words: str, name: str, *, offset=(0, 0), **look: Any
) -> None:
    """Write words at a place of the data, `offset` away from it; the element has a class `name`."""
    x, y = axes.transData.transform(at) + offset
    axes.text(x, y, drawable(words), transform=None, gid=f"{name}|", **look)


def drawable(text: str) -> str:
    """Return a text without letters that no svg can hold: file names may have any bytes."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def svg_of(axes: Any, about: str) -> str:
    """Return the figure of axes as an svg element that `about` describes in words."""
    out, figure = io.StringIO(), axes.figure
    figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    root = ElementTree.fromstring(out.getvalue())
    paths = (node for node in root.iter() if node.get("id") and node.get("d"))
    marks = {node.get("id", ""): node.get("d", "") for node in paths}
    inside = "".join(_element(node, marks) for node in root)
    for colour, variable in THEME.items():
        inside = inside.replace(colour, variable)
    frame = f'class="lines" viewBox="0 0 {WIDTH} {figure.bbox.height:g}" role="img"'
    return f'<svg {frame} aria-label="{escape(drawable(about))}">{inside}</svg>'


def _element(node: ElementTree.Element, marks: Mapping[str, str]) -> str:
    """Return an element of matplotlib's svg without ids, references and fonts.

    A group with an id CLASS|TITLE gets these; of others the elements are kept. `marks`: paths that
    elements refer to.
    """
    tag, get = node.tag.rpartition("}")[2], node.attrib.get
    x, y, style = _short(get("x")), _short(get("y")), get("style", "")
    if tag == "g":
        inside = "".join(_element(each, marks) for each in node)
        name, is_ours, title = get("id", "").partition("|")
        about = f"<title>{escape(title)}</title>" if title else ""
        return f'<g class="{name}">{about}{inside}</g>' if is_ours and inside else inside
    if tag == "text":
        anchor = re.search(r"text-anchor: (\w+)", style)
        side = f' text-anchor="{anchor[1]}"' if anchor else ""
        return f'<text x="{x}" y="{y}"{side}>{escape(node.text or "")}</text>'
    look = f' style="{style}"' if style else ""
    if tag == "path" and style != "fill: none":  # a line of no width below marks
        return f'<path d="{_short(get("d"))}"{look}/>'
    if tag == "use":
        shape = _short(marks[get("{http://www.w3.org/1999/xlink}href", "").lstrip("#")])
        return f'<path transform="translate({x} {y})" d="{shape}"{look}/>'
    return ""


def _short(numbers: str | None) -> str:
    """Return numbers of an svg, of a path for instance, with one decimal."""
    text = re.sub(r"\s*\n\s*|(\.\d)\d+", r"\1", numbers or "")
    return text.replace(" L ", "L").replace(" M ", "M").strip()


# --- ticks --------------------------------------------------------------------------------------


def is_logarithmic(low: float, high: float) -> bool:
    """Return whether an axis of values is better logarithmic."""
    return low > LEAST and high >= LOG_FROM * low


def decades(low: float, high: float) -> list[float]:
    """Return powers of ten around positive values, a few.

    >>> decades(0.02, 30)
    [0.01, 0.1, 1.0, 10.0, 100.0]
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high) - 1e-9)
    every = math.ceil((last - first) / MOST_DECADES)
    return [10.0**power for power in range(first, last + every, every)]


def nice_ticks(low: float, high: float, *, is_whole: bool = False) -> list[float]:
    """Return a few ticks around values, at steps of 1, 2 or 5 times a power of ten.

    >>> nice_ticks(0, 0.47), nice_ticks(3, 3.5, is_whole=True)
    ([0.0, 0.1, 0.2, 0.3, 0.4, 0.5], [3.0, 4.0])
    """
    from matplotlib.ticker import MaxNLocator

    if high - low <= SAME * max(abs(low), abs(high)):
        room = 0.1 * abs(high) or 1.0
        low, high = low - (room if low else 0.0), high + room
    locator = MaxNLocator(NUM_TICKS, steps=(1, 2, 5, 10), integer=is_whole, min_n_ticks=1)
    ticks = [float(f"{tick:.12g}") for tick in locator.tick_values(low, high)]
    first = max((i for i, tick in enumerate(ticks) if tick <= low), default=0)
    last = min((i for i, tick in enumerate(ticks) if tick >= high), default=len(ticks) - 1)
    return ticks[first : last + 1]


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """Return ticks as people read them.

    >>> tick_texts([0, 500, 1000]), tick_texts([20000, 25000]), tick_texts([0.05, 0.1])
    (['0', '500', '1,000'], ['20k', '25k'], ['0.05', '0.1'])
    """
    units = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
    size, unit = next((each for each in units if 10 * each[0] <= ticks[-1] < 1e15), (1.0, ""))
    return ["0" if tick == 0 else f"{tick / size:,g}{unit}" for tick in ticks]
