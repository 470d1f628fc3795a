"""Bars of bytes by part, as html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ppctl.reports.charts.palette import PARTS
from ppctl.reports.page_kit import text
from ppctl.reports.terminal_output import size_text

FAR_LIMIT = 4.0  # longest bars: a larger limit is only written, or bars could not be seen
LEAST_LETTERS = 0.04  # share of the axis from which on a part carries its number


def memory_bars(
    sums: Sequence[tuple[str, Mapping[str, int]]],
    parts: Sequence[str],
    limit: int | None = None,
    about: Mapping[str, str] | None = None,
) -> str:
    """Return a bar for each (name, bytes by part), parts in the order given, and their legend.

    Parts have a number besides their colour; about: each part in words. The limit is a dashed line
    with its label above the bars. There are at most as many parts as colours.
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
