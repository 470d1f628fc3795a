"""Weight gradients in the gaps: the pass that turns an order of F and I into one of F, I and W."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from ppctl.schedule.ir import Schedule, Task, Value, reads, writes


def fill_weight_grads(name, ranks, rank_of, num_microbatches, cap):
    num_stages, p = len(rank_of), len(ranks)
    V = num_stages // p
    written: dict[Value, int] = {}
    at = [0] * p
    live = [0] * p
    pend = [deque() for _ in range(p)]
    out = [[] for _ in range(p)]
    t = 0
    left = sum(map(len, ranks))
    while left or any(pend):
        new = []
        moved = False
        for r in range(p):
            task = None
            if at[r] < len(ranks[r]):
                nxt = ranks[r][at[r]]
                if all(written.get(v, t + 1) <= t for v in reads(nxt, num_stages)) and not (
                    nxt.kind == "F" and live[r] >= cap * V
                ):
                    task = nxt
                    at[r] += 1
                    left -= 1
            if task is None and pend[r]:
                task = pend[r].popleft()
            if task is None:
                continue
            moved = True
            out[r].append(task)
            live[r] += (task.kind == "F") - (task.kind == "W")
            if task.kind == "I":
                pend[r].append(Task(task.stage, "W", task.microbatch))
            new += [(v, t + 1) for v in writes(task, num_stages)]
        written.update(new)
        t += 1
        if not moved and all(v <= t for v in written.values()):
            raise RuntimeError("stuck")
    return Schedule(name, tuple(map(tuple, out)), rank_of, num_microbatches)
