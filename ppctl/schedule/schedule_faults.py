"""Errors of schedules: the rank-by-step grid with an arrow, and why ranks wait for ever."""

from collections.abc import Sequence

from ppctl.errors import ScheduleError
from ppctl.schedule.ir import Schedule, Task, writes

GRID_WIDTH = 14  # steps


def grid(ranks: Sequence[Sequence[Task]], arrow: tuple[int, int] | None = None) -> str:
    """Return the ranks' tasks: at most GRID_WIDTH steps around the marked `arrow` (rank, step)."""
    center = arrow[1] if arrow else 0
    steps = max([center + 1, *map(len, ranks)])  # the arrow may point at the end of a program
    low = max(0, min(center - GRID_WIDTH // 2, steps - GRID_WIDTH))
    high = min(steps, low + GRID_WIDTH)
    lines = ["step".rjust(8) + "".join(f"{t:>9}" for t in range(low, high))]
    for r, tasks in enumerate(ranks):
        cells = [
            ("->" if arrow == (r, t) else "") + (str(tasks[t]) if t < len(tasks) else "")
            for t in range(low, high)
        ]
        lines.append(f"rank {r}".rjust(8) + "".join(f"{cell:>9}" for cell in cells))
    return "\n".join(lines)


def fault(schedule: Schedule, rank: int, step: int, what: str) -> ScheduleError:
    """Return the error at one step of one rank: what is wrong, and the grid with an arrow."""
    shown = grid(schedule.ranks, (rank, step))
    return ScheduleError(f"{schedule.name}: rank {rank}, step {step}: {what}\n{shown}")


def order_that_blocks(schedule: Schedule, at: Sequence[int]) -> str:
    """Return the tasks in the wrong order where ranks can go no further than `at`; "" if unknown.

    Ranks wait for each other in a circle: each stands at a task that comes too early in its
    program. In a circle of one the task depends on the later one.
    """
    circle = sorted(_circle(schedule, at))
    pairs = [f"rank {rank} has {first} before {later}" for rank, first, later in circle]
    if len(pairs) == 1:
        return f"R{pairs[0][1:]}, on which it depends."
    return f"R{', and '.join(pairs)[1:]}: each waits for the other." if pairs else ""


def _circle(schedule: Schedule, at: Sequence[int]) -> list[tuple[int, Task, Task]]:
    """Return (rank, the task at which it stands, the later task that is needed) of the circle."""
    ranks = enumerate(schedule.ranks)
    places = {task: (rank, step) for rank, tasks in ranks for step, task in enumerate(tasks)}
    writer = {value: task for task in places for value in writes(task)}
    done = {task for tasks, step in zip(schedule.ranks, at, strict=True) for task in tasks[:step]}
    rank = next(rank for rank, tasks in enumerate(schedule.ranks) if at[rank] < len(tasks))
    task, seen = schedule.ranks[rank][at[rank]], dict[Task, int]()
    pairs: list[tuple[int, Task, Task]] = []
    while task not in seen:
        seen[task] = len(pairs)
        missing = next(value for value in schedule.reads(task) if writer.get(value) not in done)
        if missing not in writer:
            return []  # it is in no program
        needed = writer[missing]
        rank, step = places[needed]
        task = schedule.ranks[rank][at[rank]]
        if step != at[rank]:
            pairs.append((rank, task, needed))
    return pairs[seen[task] :]
