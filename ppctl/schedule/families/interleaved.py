from __future__ import annotations

from collections.abc import Callable

from ppctl.errors import ScheduleError
from ppctl.schedule.families.family import WARMUP_HOPS, Family, KnobValues
from ppctl.schedule.families.formulas import looped_bubble_s, only_if
from ppctl.schedule.families.rank_of import loop
from ppctl.schedule.families.size_checks import hops_floor, require_at_least, require_multiple_of_ranks
from ppctl.schedule.ir import Kind, Schedule, Task


def interleaved(
    num_ranks: int,
    num_microbatches: int,
    *,
    num_chunks: int = 2,
    warmup_hops: float = 2,
    group_size: int | None = None,
) -> Schedule:
    """Megatron-LM's interleaved 1F1B: V chunks a rank, microbatches in groups of p.

    Bubble (p-1)(F+B)/V; peak activations p + (h-1)(p-1)/V at most (units: one microbatch through 1/p of the model).
    p = num_ranks, V = num_chunks, h = warmup_hops in [1, 2]: rank r's warm-up is floor(h(p-1-r)) + (V-1)g chunks. h = 2
    hides transfers, h = 1 holds p activations. g = group_size >= p microbatches pass through a chunk before the next
    one, None is p: more hide more latency and hold (g-p)(V-1)/V more.
    ScheduleError unless num_microbatches fills groups of g, the last one of p at least.
    Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2; h by simulation; g: Megatron-LM's
    microbatch_group_size_per_vp_stage.
    """
    name = "interleaved"
    require_at_least(name, "num_chunks", num_chunks, 1)
    if group_size is None:
        group_size = num_ranks
        require_multiple_of_ranks(name, num_microbatches, num_ranks)
    require_at_least(name, "group_size", group_size, num_ranks)
    if num_microbatches < group_size or 0 < num_microbatches % group_size < num_ranks:
        raise ScheduleError(
            f"num_microbatches={num_microbatches} in groups of group_size={group_size} leaves a group of "
            f"{num_microbatches % group_size}, below num_ranks={num_ranks} ({name}). "
            f"Use {group_size}, {2 * group_size}, ... or group_size={num_ranks}."
        )
    task, total = task_order(num_ranks, num_microbatches, num_chunks, group_size)
    ranks: list[tuple[Task, ...]] = []
    for r in range(num_ranks):
        warmup = min(total, hops_floor(name, warmup_hops, num_ranks - 1 - r) + (num_chunks - 1) * group_size)
        tasks = [task(r, "F", k) for k in range(warmup)]
        for k in range(warmup, total):
            tasks += [task(r, "F", k), task(r, "B", k - warmup)]
        tasks += [task(r, "B", k) for k in range(total - warmup, total)]
        ranks.append(tuple(tasks))
    return Schedule(name, tuple(ranks), loop(num_ranks, num_chunks), num_microbatches)


def task_order(
    num_ranks: int, num_microbatches: int, num_chunks: int, group_size: int
) -> tuple[Callable[[int, Kind, int], Task], int]:
    """(the k-th task of a kind on a rank, how many there are). Backwards run the chunks from the last to the first.

    >>> task, total = task_order(2, 2, 2, 2)
    >>> [str(task(1, "F", k)) for k in range(total)], str(task(1, "B", 0))
    (['1F0', '1F1', '3F0', '3F1'], '3B0')
    """
    forwards = chunk_order(num_microbatches, num_chunks, group_size)

    def task(rank: int, kind: Kind, k: int) -> Task:
        chunk, m = forwards[k]
        return Task((chunk if kind == "F" else num_chunks - 1 - chunk) * num_ranks + rank, kind, m)

    return task, len(forwards)


def chunk_order(num_microbatches: int, num_chunks: int, group_size: int) -> list[tuple[int, int]]:
    """(chunk, microbatch) in the order of a rank's forwards: a group through chunk 0, the same through chunk 1, ...

    >>> chunk_order(4, 2, 2)
    [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    """
    groups = [range(m, min(m + group_size, num_microbatches)) for m in range(0, num_microbatches, group_size)]
    return [(chunk, m) for group in groups for chunk in range(num_chunks) for m in group]


def _searched_knobs(max_chunks: int) -> list[KnobValues]:
    return [{"num_chunks": v, "warmup_hops": hops} for v in range(2, max_chunks + 1) for hops in WARMUP_HOPS]


FAMILIES = (
    Family(
        "interleaved",
        interleaved,
        also_called=("vpp", "megatron"),
        published="2021-04",
        bubble_s=only_if(lambda s: s.is_free, looped_bubble_s),
        peak=only_if(
            lambda s: s.group_size in (None, s.p),
            lambda s: min(s.m, s.p + (s.warmup - (s.p - 1)) / s.num_chunks),
        ),
        searched_knobs=_searched_knobs,
    ),
)
