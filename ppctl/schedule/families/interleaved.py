from itertools import product

from ppctl.schedule.families import family
from ppctl.schedule.families.stage_placement import loop
from ppctl.schedule.ir import Kind, Schedule, Task


def interleaved(
    num_ranks: int, num_microbatches: int, *, num_chunks: int = 2, warmup_hops: float = 2
) -> Schedule:
    """Return Megatron-LM's interleaved 1F1B: V chunks a rank, microbatches in groups of p.

    Bubble (p-1)(F+B)/V; peak activations p + (h-1)(p-1)/V at most (units: one microbatch through
    1/p of the model). p = num_ranks, V = num_chunks, h = warmup_hops in [1, 2]: rank r's warm-up is
    floor(h(p-1-r)) + (V-1)p forwards of chunks. h = 2 hides transfers, h = 1 holds p activations.
    ScheduleError unless num_microbatches is a multiple of p.
    Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2 (h = 2); other h by simulation.
    """
    family.require_multiple_of_ranks("interleaved", num_microbatches, num_ranks)
    return alternating("interleaved", num_ranks, num_microbatches, num_chunks, warmup_hops)


def alternating(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 1,
    warmup_hops: float = 1,
    *,
    is_split: bool = False,
) -> Schedule:
    """Return the schedule of ranks that alternate forwards and backwards after a warm-up.

    Rank r's warm-up is floor(h(p-1-r)) + (V-1)p forwards of chunks, with h = warmup_hops. Backwards
    run the chunks from the last to the first. is_split: each backward is an I, and on rank r
    its W follows floor(h*r) backwards later, or earlier with few microbatches.

    >>> [" ".join(map(str, tasks)) for tasks in alternating("1f1b", 2, 2).ranks]
    ['0F0 0F1 0B0 0B1', '1F0 1B0 1F1 1B1']
    """
    order = chunk_order(num_microbatches, num_chunks, num_ranks)
    total, ranks = len(order), list[tuple[Task, ...]]()
    for r in range(num_ranks):
        forwards = [Task(chunk * num_ranks + r, "F", m) for chunk, m in order]
        last = (num_chunks - 1) * num_ranks + 2 * r  # sum of the rank's first and last stage index
        kind: Kind = "I" if is_split else "B"
        backwards = [Task(last - stage, kind, m) for stage, _, m in forwards]
        warmup = family.floor_hops(warmup_hops, num_ranks - 1 - r) + (num_chunks - 1) * num_ranks
        # with few microbatches, a delay above r would only make the rank end after the others
        delay = min(int(warmup_hops * r), r + max(0, total - num_ranks)) if is_split else total
        tasks = forwards[:warmup]
        for k, backward in enumerate(backwards):
            tasks += [*forwards[warmup + k : warmup + k + 1], backward]
            if k >= delay:
                tasks.append(backwards[k - delay]._replace(kind="W"))
        if is_split:
            tasks += [task._replace(kind="W") for task in backwards[max(0, total - delay) :]]
        ranks.append(tuple(tasks))
    return Schedule(name, tuple(ranks), loop(num_ranks, num_chunks), num_microbatches)


def chunk_order(num_microbatches: int, num_chunks: int, group_size: int) -> list[tuple[int, int]]:
    """Return (chunk, microbatch) of a rank's forwards in order: group by group, chunk by chunk.

    >>> chunk_order(4, 2, 2)
    [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    """
    microbatches = range(num_microbatches)
    groups = [microbatches[m : m + group_size] for m in microbatches[::group_size]]
    return [(chunk, m) for group in groups for chunk in range(num_chunks) for m in group]


def _searched_knobs(max_chunks: int) -> list[family.KnobValues]:
    knobs = product(range(2, max_chunks + 1), family.WARMUP_HOPS)
    return [{"num_chunks": v, "warmup_hops": hops} for v, hops in knobs]


FAMILIES = (
    family.Family(
        "interleaved",
        interleaved,
        also_called=("vpp", "megatron"),
        published="2021-04",
        bubble_s=family.only_if(lambda s: s.is_free, family.looped_bubble_s),
        peak=lambda s: min(s.m, s.p + (s.warmup - (s.p - 1)) / s.num_chunks),
        searched_knobs=_searched_knobs,
    ),
)
