"""The rank-by-step grid that errors print. One row a rank, one column a step."""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.schedule.ir import Task


def grid(ranks: Sequence[Sequence[Task]], arrow: tuple[int, int] | None = None, *, width: int = 14) -> str:
    """The ranks' tasks by step, at most `width` steps around `arrow` = (rank, step), which is marked `->`."""
    center = arrow[1] if arrow else 0
    steps = max([center + 1, *map(len, ranks)])  # the arrow may point at the end of a program
    low = max(0, min(center - width // 2, steps - width))
    high = min(steps, low + width)
    lines = ["step".rjust(8) + "".join(f"{t:>9}" for t in range(low, high))]
    for r, tasks in enumerate(ranks):
        cells = [str(tasks[t]) if t < len(tasks) else "" for t in range(low, high)]
        marked = ["->" + c if arrow == (r, t) else c for t, c in zip(range(low, high), cells, strict=True)]
        lines.append(f"rank {r}".rjust(8) + "".join(f"{c:>9}" for c in marked))
    return "\n".join(lines)
