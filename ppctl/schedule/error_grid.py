"""The rank-by-step grid that errors print. One row a rank, one column a step."""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.schedule.ir import Task

WIDTH = 14  # steps


def grid(ranks: Sequence[Sequence[Task]], arrow: tuple[int, int] | None = None) -> str:
    """Return the ranks' tasks, at most WIDTH steps around `arrow` = (rank, step), marked `->`."""
    center = arrow[1] if arrow else 0
    steps = max([center + 1, *map(len, ranks)])  # the arrow may point at the end of a program
    low = max(0, min(center - WIDTH // 2, steps - WIDTH))
    high = min(steps, low + WIDTH)
    lines = ["step".rjust(8) + "".join(f"{t:>9}" for t in range(low, high))]
    for r, tasks in enumerate(ranks):
        cells = [
            ("->" if arrow == (r, t) else "") + (str(tasks[t]) if t < len(tasks) else "")
            for t in range(low, high)
        ]
        lines.append(f"rank {r}".rjust(8) + "".join(f"{cell:>9}" for cell in cells))
    return "\n".join(lines)
