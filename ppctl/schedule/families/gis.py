from __future__ import annotations

from ppctl.errors import ScheduleError
from ppctl.schedule.families.family import Family, each_num_chunks
from ppctl.schedule.families.formulas import FormulaInputs, only_if
from ppctl.schedule.families.rank_of import loop
from ppctl.schedule.families.size_checks import require_at_least
from ppctl.schedule.ir import Schedule, Task


def gis(num_ranks: int, num_microbatches: int, *, num_chunks: int = 2, group_size: int | None = None) -> Schedule:
    """PipeOffload's group-interleaved schedule (GIS): interleaved 1F1B in groups of p/2, for 3/4 of the activations.

    Bubble 5p/4 - 1 at F = I = W = 1, V = 2, even p >= 4 and m a multiple of g; peak activations 3p/4 (even p). p =
    num_ranks, V = num_chunks, g = group_size, None is ceil(p/2). Larger groups hold more and idle less.
    ScheduleError unless ceil(p/2) <= g <= p.
    Source: Wan et al. 2025, arXiv 2503.01328, section 3.2: a building block in which a microbatch moves down one rank a
    tick and back up one rank in three, repeated every 3Vg ticks, then squeezed.
    """
    require_at_least("gis", "num_chunks", num_chunks, 1)
    least = (num_ranks + 1) // 2
    size = least if group_size is None else group_size
    if not least <= size <= num_ranks:
        raise ScheduleError(
            f"group_size={size} is outside [ceil(num_ranks/2), num_ranks] = [{least}, {num_ranks}] (gis). "
            f"Use {least} for the fewest activations, {num_ranks} for the shortest step."
        )
    last = num_chunks - 1
    ranks: list[tuple[Task, ...]] = []
    for r in range(num_ranks):
        cells: list[tuple[int, Task]] = []  # tick, task
        for m in range(num_microbatches):
            enters = m // size * 3 * num_chunks * size + 3 * (m % size)  # tick of chunk 0's forward on rank 0
            for chunk in range(num_chunks):
                forward = enters + 3 * size * chunk + r
                backward = enters + 3 * size * (last + last - chunk) + r + 3 * (num_ranks - 1 - r) + 1
                stage = chunk * num_ranks + r
                cells.append((forward, Task(stage, "F", m)))
                cells += [(backward, Task(stage, "I", m)), (backward + 1, Task(stage, "W", m))]
        ranks.append(tuple(task for _, task in sorted(cells)))
    return Schedule("gis", tuple(ranks), loop(num_ranks, num_chunks), num_microbatches)


def _has_default_groups(s: FormulaInputs) -> bool:
    return s.num_chunks == 2 and s.group_size is None


FAMILIES = (
    Family(
        "gis",
        gis,
        published="2025-03",
        bubble_s=only_if(
            lambda s: s.is_equal and s.p % 4 == 0 and _has_default_groups(s) and s.m % s.p == 0,
            lambda s: (5 * s.p / 4 - 1) * s.fiw[0],
        ),
        peak=only_if(lambda s: s.p % 2 == 0 and _has_default_groups(s) and s.m >= s.p, lambda s: 3 * s.p / 4),
        searched_knobs=each_num_chunks,
    ),
)
