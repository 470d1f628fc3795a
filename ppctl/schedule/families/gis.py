from itertools import product

from ppctl.schedule.families.family import Family, each_num_chunks, only_if
from ppctl.schedule.families.stage_placement import loop
from ppctl.schedule.ir import Schedule, Task


def gis(num_ranks: int, num_microbatches: int, *, num_chunks: int = 2) -> Schedule:
    """Return PipeOffload's group-interleaved schedule (GIS): interleaved 1F1B in groups of p/2.

    Bubble 5p/4 - 1 at F = I = W = 1, V = 2, even p >= 4 and m a multiple of g; peak activations
    3p/4 (even p). p = num_ranks, V = num_chunks, g = ceil(p/2).
    Source: Wan et al. 2025, arXiv 2503.01328, section 3.2. In its building block the forward of a
    microbatch moves down one rank every tick, and its backward up one rank every three ticks.
    The block of each group is repeated every 3Vg ticks, then squeezed.
    """
    size = (num_ranks + 1) // 2
    # unroll the building block for each microbatch; sort the tasks of a rank by tick
    ranks: list[tuple[Task, ...]] = []
    for r in range(num_ranks):
        cells: list[tuple[int, Task]] = []  # tick, task
        for m, chunk in product(range(num_microbatches), range(num_chunks)):
            stage, chunks_after = chunk * num_ranks + r, num_chunks - 1 - chunk
            group, place = divmod(m, size)
            enters = 3 * (group * num_chunks * size + place)  # tick of chunk 0's F on rank 0
            forward = enters + 3 * size * chunk + r
            turn = enters + 3 * size * (num_chunks - 1 + chunks_after)
            backward = turn + r + 3 * (num_ranks - 1 - r) + 1
            cells += [(forward, Task(stage, "F", m)), (backward, Task(stage, "I", m))]
            cells.append((backward + 1, Task(stage, "W", m)))
        ranks.append(tuple(task for _, task in sorted(cells)))
    return Schedule("gis", tuple(ranks), loop(num_ranks, num_chunks), num_microbatches)


FAMILIES = (
    Family(
        "gis",
        gis,
        published="2025-03",
        bubble_s=only_if(
            lambda s: s.is_equal and s.p % 4 == 0 and s.num_chunks == 2 and s.m % s.p == 0,
            lambda s: (5 * s.p / 4 - 1) * s.fiw[0],
        ),
        peak=only_if(
            lambda s: s.p % 2 == 0 and s.num_chunks == 2 and s.m >= s.p, lambda s: 3 * s.p / 4
        ),
        searched_knobs=each_num_chunks,
    ),
)
