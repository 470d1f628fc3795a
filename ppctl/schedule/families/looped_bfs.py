from ppctl.schedule.families import family
from ppctl.schedule.families.stage_placement import loop
from ppctl.schedule.ir import Schedule, Task


def looped_bfs(num_ranks: int, num_microbatches: int, *, num_chunks: int = 2) -> Schedule:
    """Return the breadth-first schedule: all microbatches through a chunk, then the next chunk.

    Bubble (p-1)(F+B)/V for m >= p; for m < p each of the V-1 changes to the next chunk waits
    (p-m)(F+B)/V more. Peak activations m. Of the looped schedules it is the least sensitive to
    transfer latency. Backwards run in reverse order. p = num_ranks, V = num_chunks.
    Source: Lamy-Poirier 2023, arXiv 2211.05953, figure 2d.
    """
    ranks: list[tuple[Task, ...]] = []
    for r in range(num_ranks):
        stages = range(r, num_ranks * num_chunks, num_ranks)
        forwards = [Task(s, "F", m) for s in stages for m in range(num_microbatches)]
        backwards = [Task(task.stage, "B", task.microbatch) for task in reversed(forwards)]
        ranks.append((*forwards, *backwards))
    return Schedule("looped_bfs", tuple(ranks), loop(num_ranks, num_chunks), num_microbatches)


FAMILIES = (
    family.Family(
        "looped_bfs",
        looped_bfs,
        also_called=("bfs",),
        published="2022-11",
        bubble_s=family.only_if(lambda s: s.is_free and s.m >= s.p, family.looped_bubble_s),
        peak=lambda s: s.m,
        searched_knobs=family.each_num_chunks,
    ),
)
