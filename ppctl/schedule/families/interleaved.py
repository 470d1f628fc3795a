from __future__ import annotations

from collections.abc import Callable
from itertools import product

from ppctl.schedule.families.family import WARMUP_HOPS, Family, KnobValues
from ppctl.schedule.families.formulas import (
    hops_floor,
    looped_bubble_s,
    only_if,
    require_at_least,
    require_multiple_of_ranks,
)
from ppctl.schedule.families.stage_placement import loop
from ppctl.schedule.ir import Kind, Schedule, Task


def interleaved(
    num_ranks: int, num_microbatches: int, *, num_chunks: int = 2, warmup_hops: float = 2
) -> Schedule:
    """Megatron-LM's interleaved 1F1B: V chunks a rank, microbatches in groups of p.

    Bubble (p-1)(F+B)/V; peak activations p + (h-1)(p-1)/V at most (units: one microbatch through
    1/p of the model). p = num_ranks, V = num_chunks, h = warmup_hops in [1, 2]: rank r's warm-up is
    floor(h(p-1-r)) + (V-1)p chunks. h = 2 hides transfers, h = 1 holds p activations.
    ScheduleError unless num_microbatches is a multiple of p.
    Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2; h by simulation.
    """
    name = "interleaved"
    require_at_least(name, "num_chunks", num_chunks, 1)
    require_multiple_of_ranks(name, num_microbatches, num_ranks)
    task, total = task_order(num_ranks, num_microbatches, num_chunks)
    ranks: list[tuple[Task, ...]] = []
    for r in range(num_ranks):
        hops = hops_floor(name, warmup_hops, num_ranks - 1 - r)
        warmup = min(total, hops + (num_chunks - 1) * num_ranks)
        tasks = [task(r, "F", k) for k in range(warmup)]
        for k in range(warmup, total):
            tasks += [task(r, "F", k), task(r, "B", k - warmup)]
        tasks += [task(r, "B", k) for k in range(total - warmup, total)]
        ranks.append(tuple(tasks))
    return Schedule(name, tuple(ranks), loop(num_ranks, num_chunks), num_microbatches)


def task_order(
    num_ranks: int, num_microbatches: int, num_chunks: int
) -> tuple[Callable[[int, Kind, int], Task], int]:
    """Return (the k-th task of a kind on a rank, how many there are).

    Backwards run the chunks from the last to the first.

    >>> task, total = task_order(2, 2, 2)
    >>> [str(task(1, "F", k)) for k in range(total)], str(task(1, "B", 0))
    (['1F0', '1F1', '3F0', '3F1'], '3B0')
    """
    forwards = chunk_order(num_microbatches, num_chunks, num_ranks)

    def task(rank: int, kind: Kind, k: int) -> Task:
        chunk, m = forwards[k]
        return Task((chunk if kind == "F" else num_chunks - 1 - chunk) * num_ranks + rank, kind, m)

    return task, len(forwards)


def chunk_order(num_microbatches: int, num_chunks: int, group_size: int) -> list[tuple[int, int]]:
    """Return (chunk, microbatch) in the order of a rank's forwards: each group through all chunks.

    >>> chunk_order(4, 2, 2)
    [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    """
    microbatches = range(num_microbatches)
    groups = [microbatches[m : m + group_size] for m in microbatches[::group_size]]
    return [(chunk, m) for group in groups for chunk in range(num_chunks) for m in group]


def _searched_knobs(max_chunks: int) -> list[KnobValues]:
    knobs = product(range(2, max_chunks + 1), WARMUP_HOPS)
    return [{"num_chunks": v, "warmup_hops": hops} for v, hops in knobs]


FAMILIES = (
    Family(
        "interleaved",
        interleaved,
        also_called=("vpp", "megatron"),
        published="2021-04",
        bubble_s=only_if(lambda s: s.is_free, looped_bubble_s),
        peak=lambda s: min(s.m, s.p + (s.warmup - (s.p - 1)) / s.num_chunks),
        searched_knobs=_searched_knobs,
    ),
)
