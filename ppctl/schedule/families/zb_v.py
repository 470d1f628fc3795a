from __future__ import annotations

from ppctl.schedule.families.family import Family
from ppctl.schedule.families.formulas import forward_trip_s, only_if, peak_of_1f1b
from ppctl.schedule.families.stage_placement import RankProgram, v_shape
from ppctl.schedule.ir import Kind, Schedule, Task
from ppctl.schedule.search.building_blocks import squeeze


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V: two chunks a rank, placed down and back up: no rank idles or holds more than p.

    Makespan m(F+I+W) + (p-1)F/2 at F = I = W and m >= p; period m(F+I+W) at m >= 2p-1, and
    (p-1)(I-W) longer for I >= F >= W. Peak activations min(m, p) on every rank. p = num_ranks.
    Fewer microbatches than 2p-1 run in the order of 2p-1 without the others, weight gradients moved
    into the gaps that these leave.
    Source: Qi et al. 2023, arXiv 2401.10241, section 6 and figure 6.
    """
    full = max(2 * num_ranks - 1, num_microbatches)
    ranks = tuple(_steps(r, num_ranks, full) for r in range(num_ranks))
    if full == num_microbatches:
        return Schedule("zb_v", ranks, v_shape(num_ranks), num_microbatches)
    priority, cap = _priority(ranks, num_microbatches), 2 * num_ranks
    return squeeze("zb_v", priority, num_microbatches, cap, reorder=False)


def _steps(r: int, num_ranks: int, num_microbatches: int) -> tuple[Task, ...]:
    """Return rank r's program for at least 2p-1 microbatches."""
    program = RankProgram(down=r, up=2 * num_ranks - 1 - r)
    back_down, up = ("I down", "W down"), ("F up", "I up", "W up")
    # warm-up: forwards down until the first comes back, then both ways, then only the way up
    program.add(2 * (num_ranks - r) - 1, "F down")
    program.add(r, "F up", "F down")
    program.add(num_ranks - r, *up)
    # steady state: six tasks a microbatch, no rank waits; then the same without new microbatches
    program.add(num_microbatches - program.count["F down"], "F down", *back_down, *up)
    program.add(num_microbatches - program.count["F up"], *back_down, *up)
    # cool-down: input gradients first, weight gradients fill what is left
    program.add(r, "I down", "I up")
    program.add(num_ranks - r, *back_down)
    program.add(num_microbatches - program.count["W up"], "W up")
    program.add(num_microbatches - program.count["W down"], "W down")
    return tuple(program.tasks)


def _priority(ranks: tuple[tuple[Task, ...], ...], num_microbatches: int) -> list[list[list[int]]]:
    """Return the step of each F and I, by rank, line of `squeeze` and microbatch."""
    found: list[list[list[int]]] = []
    for r, tasks in enumerate(ranks):
        step = {task: t for t, task in enumerate(tasks)}
        up = 2 * len(ranks) - 1 - r
        lines: tuple[tuple[int, Kind], ...] = ((r, "F"), (up, "F"), (up, "I"), (r, "I"))
        microbatches = range(num_microbatches)
        found.append([[step[Task(s, kind, m)] for m in microbatches] for s, kind in lines])
    return found


FAMILIES = (
    Family(
        "zb_v",
        zb_v,
        also_called=("zero_bubble", "zb", "zbv"),
        published="2023-11",
        bubble_s=only_if(lambda s: s.is_equal and s.m >= s.p, lambda s: forward_trip_s(s) / 2),
        peak=peak_of_1f1b,
    ),
)
