"""Greedy list scheduling: a named order as priorities, run at given costs under a given cap.

A rank that would wait runs a later task of its order that is ready, if memory allows.
"""

from __future__ import annotations

from ppctl.schedule.search.event_loop import NEVER, Wake, run_ranks
from ppctl.schedule.search.orders import Jobs, Orders

WINDOW = 48  # how far along its order a rank looks for a task that is ready


def fill(
    jobs: Jobs, orders: Orders, cap: int, patience: float = 0.0, *, weight_grads_last: bool = False
) -> Orders | None:
    """The orders in which ranks with priorities `orders` run when none waits without need; None if they get stuck.

    cap: the most that a rank may hold; orders may exceed it, the result never does. patience: a task may make
    the one that it overtakes late by this share of its own time. weight_grads_last: whatever else is ready overtakes a
    weight gradient.
    """
    fits = [jobs.fits(order, cap) for order in orders]
    rest = [list(order) for order in orders]
    done: Orders = [[] for _ in orders]
    readers: dict[int, int] = {}
    for task, reads in enumerate(jobs.needs):
        for value, hop_s in reads:
            if hop_s or value not in readers:
                readers[value] = jobs.rank[task]
    written_s: list[float] = [NEVER] * jobs.num_values
    live, rise, change, needs = list(jobs.held), jobs.rise, jobs.change, jobs.needs

    def ready_s(task: int) -> float:
        latest_s = 0.0
        for value, hop_s in needs[task]:
            arrives_s = written_s[value] + hop_s
            if arrives_s > latest_s:
                latest_s = arrives_s
        return latest_s

    def has_room(rank: int, task: int, most: int = 0) -> bool:
        """Return whether a task may run before others that hold `most` more at their peak.

        Where orders are above the cap, forwards leave the room that an I needs: no rank gets stuck for its memory.
        """
        takes = rise[task]
        if fits[rank]:
            takes = max(takes, change[task] + most) if change[task] > 0 else takes
        elif jobs.tasks[task].kind == "F":
            takes += jobs.reserve
        return live[rank] + takes <= cap

    def choose(rank: int, now_s: float) -> tuple[int | None, float]:
        """Return the place in rest[rank] of the task to run now, or None and when the first one can run."""
        order, kinds = rest[rank], jobs.tasks
        head = order[0]
        head_s = ready_s(head)
        blocked = not has_room(rank, head)
        may_start = head_s <= now_s and not blocked
        waits = weight_grads_last and kinds[head].kind == "W"
        if may_start and not waits:
            return 0, now_s
        ahead = most = 0  # what the overtaken tasks will hold, now and at their peak
        for place, task in enumerate(order[:WINDOW]):
            overtakes = place > 0 and not (may_start and kinds[task].kind == "W")
            if overtakes and (not rise[task] or has_room(rank, task, most)) and ready_s(task) <= now_s:
                late_s = now_s + jobs.seconds[task] - head_s
                if may_start or blocked or head_s == NEVER or late_s <= patience * jobs.seconds[task]:
                    return place, now_s
            if ahead + rise[task] > most:
                most = ahead + rise[task]
            ahead += change[task]
        return (0, now_s) if may_start else (None, NEVER if blocked else head_s)

    def act(rank: int, now_s: float) -> tuple[float, list[Wake]]:
        """Run a task of the rank. It acts again at its end, or when what it waits for has arrived; so do readers."""
        if not rest[rank]:
            return now_s, []
        place, later_s = choose(rank, now_s)
        if place is None:
            return now_s, [(later_s, rank)] if later_s < NEVER else []
        task = rest[rank].pop(place)
        done[rank].append(task)
        live[rank] += change[task]
        end_s = now_s + jobs.seconds[task]
        wakes = [(end_s, rank)]
        for value in jobs.makes[task]:
            written_s[value] = end_s
            reader = readers.get(value, rank)
            if reader != rank:
                wakes.append((end_s + jobs.hop_s, reader))
        return end_s, wakes

    run_ranks(jobs.num_ranks, act)
    return None if any(rest) else done
