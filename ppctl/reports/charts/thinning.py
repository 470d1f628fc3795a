"""Few points for many: the figure of any number of steps stays small, and every spike is seen."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

Points = Sequence[tuple[float, float | None]]  # ascending by x; None is a gap


def thin(points: Points, columns: int) -> list[tuple[float, float | None]]:
    """Return each column's first, least, greatest and last point and a gap; of few points, all.

    >>> thin([(x, 9.0 if x == 5 else 0.0) for x in range(100)], 2)
    [(0, 0.0), (5, 9.0), (49, 0.0), (50, 0.0), (99, 0.0)]
    """
    if len(points) <= 2 * columns:
        return list(points)
    kept: list[tuple[float, float | None]] = []
    for column in _columns(points, columns):
        values = [(y, i) for i, (_, y) in enumerate(column) if y is not None]
        gaps = [i for i, (_, y) in enumerate(column) if y is None]
        indices = {0, len(column) - 1, *gaps[:1]}
        if values:
            indices |= {min(values)[1], max(values, key=lambda each: each[0])[1]}
        kept += [column[i] for i in sorted(indices)]
    return kept


def medians(points: Points, columns: int) -> list[tuple[float, float]]:
    """Return the median of each column at its middle point; nothing where there are few points."""
    if len(points) <= 4 * columns:
        return []
    middles = []
    for column in _columns(points, columns):
        known = [(x, y) for x, y in column if y is not None]
        if known:
            middles.append((known[len(known) // 2][0], statistics.median(y for _, y in known)))
    return middles


def _columns(points: Points, columns: int) -> Iterator[Points]:
    """Yield the points of each column that has some."""
    low, width = points[0][0], (points[-1][0] - points[0][0]) / columns or 1.0
    begin, now = 0, 0
    for i, (x, _) in enumerate(points):
        column = min(columns - 1, int((x - low) / width))
        if column != now:
            if i > begin:
                yield points[begin:i]
            begin, now = i, column
    yield points[begin:]
