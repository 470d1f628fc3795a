"""Memory of a schedule: activations live from the start of a forward to the end of its B or W."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ppctl.schedule.costs import Costs
from ppctl.schedule.ir import Schedule, Task


def memory_steps(tasks: Iterable[Task]) -> Iterator[tuple[Task, int]]:
    """Yield (task, change of the number of stashes) of a rank's program: +1 at the start of F, -1 at the end of B or W.

    An I frees nothing: what its W needs lives on (the convention of the zero-bubble papers).
    """
    for task in tasks:
        if task.kind == "F":
            yield task, 1
        elif task.kind in "BW":
            yield task, -1


def peak_activations(schedule: Schedule) -> tuple[float, ...]:
    """For each rank, the most activations held at once, in units of one microbatch through 1/p of the model.

    The stash of a chunk counts 1/V.

    >>> from ppctl.schedule.families.one_f_one_b import one_f_one_b
    >>> peak_activations(one_f_one_b(3, 8))
    (3.0, 2.0, 1.0)
    """
    num_chunks = schedule.num_chunks
    return tuple(_peak((change for _, change in memory_steps(tasks))) / num_chunks for tasks in schedule.ranks)


def peak_bytes(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """For each rank, the most bytes of activations held at once, by `costs.activation_bytes`."""
    costs.check(schedule.num_stages)
    size = [costs.stage_bytes(stage, schedule.num_chunks) for stage in range(schedule.num_stages)]
    return tuple(_peak(change * size[task.stage] for task, change in memory_steps(tasks)) for tasks in schedule.ranks)


def _peak(changes: Iterable[float]) -> float:
    live = peak = 0
    for change in changes:
        live += change
        peak = max(peak, live)
    return peak
