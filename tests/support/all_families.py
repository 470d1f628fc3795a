"""Every registered schedule family over a grid of sizes and knobs.

All facts of a family are read from its record, so a new family is covered by every test that uses
this file.
"""

from functools import cache
from itertools import product

from ppctl.errors import ScheduleError
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.family import SAMPLE_SIZE
from ppctl.schedule.families.registry import FAMILIES, build
from ppctl.schedule.ir import Task

# values of each knob that a user can set; a knob without a line has its default only, and fails
# test_every_knob_has_values
KNOB_VALUES = {"num_chunks": (1, 2, 3), "num_waves": (1, 2), "warmup_hops": (1, 1.5, 2)}
NOT_SETTABLE = ("group_size",)  # an argument of ppctl.build_schedule only
UNIT, FUSED, REAL = Costs(), Costs(1, 2, 0), Costs(1, 1.05, 0.75, 0.1)
COSTS = [UNIT, FUSED, REAL, Costs(1, 0.5, 0.5), Costs(0.7, 1.3, 0.4, 0.25), Costs(3, 0.25, 0.5)]


def settable(family):
    """Return the knobs of a family that a user can set, with their defaults."""
    return {k: v for k, v in FAMILIES[family].knobs.items() if k not in NOT_SETTABLE}


def knob_choices(family):
    """Return choices of a family's knobs: all values of the first, the outer values of others."""
    values = [KNOB_VALUES.get(name, (default,)) for name, default in settable(family).items()]
    values[1:] = [tuple(dict.fromkeys((each[0], each[-1]))) for each in values[1:]]
    return [dict(zip(settable(family), choice, strict=True)) for choice in product(*values)]


@cache
def takes(family, p, m):
    """Return whether a family has schedules of this size."""
    try:
        build(family, p, m)
    except ScheduleError:
        return False
    return True


# families that take microbatches in multiples of the ranks only
GROUPED = tuple(family for family in FAMILIES if not takes(family, 4, 6))


def cases(
    ranks=(1, 2, 3, 4, 5, 8),
    microbatches=lambda p: sorted({1, 2, 3, p, 2 * p - 1, 2 * p, 3 * p + 1, 4 * p}),
):
    """Return (family, p, m, knobs) of every family, m below, at and next to multiples of p."""
    return [
        (family, p, m, knobs)
        for family in FAMILIES
        for knobs in knob_choices(family)
        for p in ranks
        for m in microbatches(p)
        if family not in GROUPED or m % p == 0
    ]


def make(case):
    family, p, m, knobs = case
    return build(family, p, m, **knobs)


def num_chunks(family, knobs):
    """Return V of a family with these knobs."""
    return FAMILIES[family].generate(*SAMPLE_SIZE, **knobs).num_chunks


def split_tasks(schedule):
    """Yield the schedule's tasks, each B as an I and a W."""
    for program in schedule.ranks:
        for task in program:
            yield from [
                Task(task.stage, k, task.microbatch)
                for k in ("IW" if task.kind == "B" else task.kind)
            ]
