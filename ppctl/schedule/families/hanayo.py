import heapq

from ppctl.schedule.families import family
from ppctl.schedule.families.stage_placement import waves
from ppctl.schedule.ir import Schedule, Task


def hanayo(num_ranks: int, num_microbatches: int, *, num_waves: int = 1) -> Schedule:
    """Return the Hanayo schedule: w waves of two chunks a rank, backwards before forwards.

    Bubble (p-1)(F+B)/(2w) at F = B and m a multiple of p; longer, and growing with m, at B = 2F.
    Peak activations min(m, p). p = num_ranks, w = num_waves.
    Source: Liu et al. 2023, arXiv 2308.15762, section 3 (placement and rule; the paper prints no
    order). Each rank runs one ready task a tick: backwards before forwards, old microbatches before
    new ones.
    """
    rank_of = waves(num_ranks, num_waves)
    last = len(rank_of) - 1
    # ready tasks of each rank as a heap: backwards first, then the oldest microbatch
    ready: list[list[tuple[bool, int, Task]]] = [[] for _ in range(num_ranks)]
    ranks: list[list[Task]] = [[] for _ in range(num_ranks)]

    def offer(task: Task) -> None:
        heapq.heappush(ready[rank_of[task.stage]], (task.kind == "F", task.microbatch, task))

    for m in range(num_microbatches):
        offer(Task(0, "F", m))
    while any(ready):
        ran = [(r, heapq.heappop(queue)[2]) for r, queue in enumerate(ready) if queue]
        for r, task in ran:  # one task a rank; its values can be read in the next tick
            ranks[r].append(task)
            stage, kind, m = task
            if kind == "F":
                offer(Task(stage + 1, "F", m) if stage < last else Task(stage, "B", m))
            elif stage > 0:
                offer(Task(stage - 1, "B", m))
    return Schedule("hanayo", tuple(map(tuple, ranks)), rank_of, num_microbatches)


def _is_even(s: family.FormulaInputs) -> bool:
    """Return whether F = B, transfers are free and m is a multiple of p."""
    f, i, w = s.fiw
    return s.is_free and f == i + w and s.m % s.p == 0


FAMILIES = (
    family.Family(
        "hanayo",
        hanayo,
        also_called=("wave",),
        published="2023-08",
        bubble_s=family.only_if(_is_even, lambda s: (s.p - 1) * s.work_s / (2 * s.num_waves)),
        peak=family.peak_of_1f1b,
        searched_knobs=lambda max_chunks: [{"num_waves": w} for w in range(1, max_chunks // 2 + 1)],
    ),
)
