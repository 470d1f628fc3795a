"""Stacked bars in html: what makes up each of several sums, and the limit that they stand under."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from ppctl.reports.charts.palette import INK, PARTS

FAR = 4.0  # times the longest bar: a limit beyond is said, not drawn, or bars could not be seen
ROOM = 1.08  # the scale's end over the longest bar or the limit
PER_LETTER = 0.009  # of the scale's width, at the width of a window on a desk; a narrower one cuts letters off


def stacked(
    sums: Sequence[tuple[str, Mapping[str, int]]], parts: Sequence[str], limit: int | None, text: Callable[[int], str]
) -> str:
    """A bar for each (name, sizes by part), parts in the order given; `text` writes a size. At most as many as colours.

    Parts carry their number or name besides their colour; a title says the size of each.
    """
    assert len(parts) <= len(PARTS), "one colour each"
    longest = max(sum(sizes.values()) for _, sizes in sums)
    is_drawn = limit is not None and limit <= FAR * longest
    end = ROOM * max(longest, limit if limit is not None and is_drawn else 0, 1)
    line = "" if limit is None or not is_drawn else _line("halo", limit / end) + _line("limit", limit / end)
    said = "" if limit is None else f"limit {text(limit)}" + ("" if is_drawn else ", beyond the right edge &rarr;")
    side, at = ("end", 1.0) if limit is None or not is_drawn or limit > end / 2 else ("start", limit / end)
    words = f'<text x="{at:.2%}" y="15" text-anchor="{side}">{said}</text>'
    rows = [f'<span></span><svg class="said">{words}</svg><span></span>'] if said else []
    for name, sizes in sums:
        total, at, boxes = sum(sizes.values()), 0.0, []
        for number, part in enumerate(parts):
            if sizes.get(part):
                boxes.append(_box(at / end, sizes[part] / end, number, part, text(sizes[part])))
                at += sizes[part]
        listed = ", ".join(f"{part} {text(size)}" for part, size in sizes.items() if size)
        label = escape(f"{name}: {text(total)}, of which {listed}")
        rows.append(
            f'<span>{escape(name)}</span><svg role="img" aria-label="{label}">{"".join(boxes)}{line}</svg>'
            f"<span>{text(total)}</span>"
        )
    return f'<div class="bars">{"".join(rows)}</div>'


def swatch(number: int) -> str:
    """A part's colour and number, for a legend."""
    return (
        f'<svg class="swatch" aria-hidden="true"><rect width="100%" height="100%" fill="{PARTS[number]}"/>'
        f'<text x="50%" y="14" text-anchor="middle" fill="{INK}">{number + 1}</text></svg>'
    )


def _box(at: float, wide: float, number: int, part: str, size: str) -> str:
    letters = part if wide > PER_LETTER * len(part) + 0.01 else str(number + 1) if wide > 2 * PER_LETTER else ""
    return (
        f'<svg x="{at:.3%}" y="2" width="{wide:.3%}" height="20"><title>{escape(f"{part} {size}")}</title>'
        f'<rect width="100%" height="100%" fill="{PARTS[number]}" stroke="{INK}" stroke-width="0.6"/>'
        f'<text x="50%" y="14.5" text-anchor="middle" fill="{INK}">{escape(letters)}</text></svg>'
    )


def _line(name: str, share: float) -> str:
    return f'<line class="{name}" x1="{share:.3%}" x2="{share:.3%}" y1="0" y2="100%"/>'
