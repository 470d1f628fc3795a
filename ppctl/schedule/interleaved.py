from __future__ import annotations

from ppctl.errors import ScheduleError
from ppctl.schedule.ir import Schedule, Task
from ppctl.schedule.placement import loop


def interleaved(num_ranks: int, num_microbatches: int, *, num_chunks: int = 2) -> Schedule:
    """Megatron-LM's interleaved 1F1B: V chunks a rank, microbatches in groups of p.

    Bubble (p-1)(F+B)/V; peak activations p + (p-1)/V at most (units: one microbatch through 1/p of the model).
    p = num_ranks, V = num_chunks. ScheduleError unless num_microbatches is a multiple of p.
    Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2.
    """
    if num_microbatches % num_ranks:
        raise ScheduleError(
            f"num_microbatches={num_microbatches} is not a multiple of num_ranks={num_ranks} (interleaved). "
            f"Use {num_ranks}, {2 * num_ranks}, ... or schedule=1f1b."
        )
    total = num_microbatches * num_chunks
    group = num_ranks * num_chunks

    def task(rank: int, kind: str, k: int) -> Task:
        """The k-th task of a kind on a rank: p microbatches through chunk 0, the same p through chunk 1, ..."""
        chunk = k % group // num_ranks
        if kind == "B":
            chunk = num_chunks - 1 - chunk
        return Task(chunk * num_ranks + rank, kind, k // group * num_ranks + k % num_ranks)  # type: ignore[arg-type]

    ranks = []
    for r in range(num_ranks):
        warmup = min(total, 2 * (num_ranks - 1 - r) + (num_chunks - 1) * num_ranks)
        tasks = [task(r, "F", k) for k in range(warmup)]
        for k in range(warmup, total):
            tasks += [task(r, "F", k), task(r, "B", k - warmup)]
        tasks += [task(r, "B", k) for k in range(total - warmup, total)]
        ranks.append(tuple(tasks))
    return Schedule("interleaved", tuple(ranks), loop(num_ranks, num_chunks), num_microbatches)
