"""Every registered schedule family over a grid of sizes and knobs, for the tests beside this file."""

from ppctl.schedule.costs import Costs
from ppctl.schedule.families.registry import FAMILIES, build
from ppctl.schedule.ir import Task

# each family's knobs; a family without an entry has none
KNOBS = {
    "eager_1f1b": [{"warmup_hops": h} for h in (1, 1.5, 2)],
    "interleaved": [{"num_chunks": V, "warmup_hops": h} for V in (1, 2, 3) for h in (1, 2)],
    "looped_bfs": [{"num_chunks": V} for V in (1, 2, 3)],
    "interleaved_zb": [{"num_chunks": V} for V in (1, 2, 4)],
    "gis": [{"num_chunks": V} for V in (1, 2, 3)],
    "hanayo": [{"num_waves": w} for w in (1, 2)],
}
GROUPED = ("interleaved", "interleaved_zb")  # microbatches in multiples of p
SPLIT = ("zb_h1", "zb_h2", "interleaved_zb", "zb_v", "v_half", "v_min", "gis")
UNIT, FUSED, REAL = Costs(), Costs(1, 2, 0), Costs(1, 1.05, 0.75, 0.1)
COSTS = [UNIT, FUSED, REAL, Costs(1, 0.5, 0.5), Costs(0.7, 1.3, 0.4, 0.25), Costs(3, 0.25, 0.5)]


def cases(
    ranks=(1, 2, 3, 4, 5, 8),
    microbatches=lambda p: sorted({1, 2, 3, p, 2 * p - 1, 2 * p, 3 * p + 1, 4 * p}),
):
    """(family, p, m, knobs) of every registered family, m below, at and beside the multiples of p."""
    return [
        (family, p, m, knobs)
        for family in FAMILIES
        for knobs in KNOBS.get(family, [{}])
        for p in ranks
        for m in microbatches(p)
        if family not in GROUPED or m % p == 0
    ]


def make(case):
    family, p, m, knobs = case
    return build(family, p, m, **knobs)


def chunks(family, knobs):
    """V of a family."""
    of_shape = {
        "zb_v": 2,
        "v_half": 2,
        "v_min": 2,
        "dualpipe_v": 2,
        "hanayo": 2 * knobs.get("num_waves", 1),
    }
    return of_shape.get(family, knobs.get("num_chunks", 1))


def split_tasks(schedule):
    """The schedule's tasks with every B counted as the I and the W that it is."""
    for program in schedule.ranks:
        for task in program:
            yield from [
                Task(task.stage, k, task.microbatch)
                for k in ("IW" if task.kind == "B" else task.kind)
            ]
