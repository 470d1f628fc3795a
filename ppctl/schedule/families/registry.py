"""Every schedule family that ppctl ships. A generator that is not here is not shipped.

Not here: Chimera and DualPipe, which hold each stage on two ranks. `rank_of` gives a stage one, and a second copy would
be a special case in validation, transfers and memory; DualPipeV is DualPipe without it.
"""

from __future__ import annotations

from collections.abc import Callable

from ppctl.errors import ScheduleError
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.advice import interleaved_is_faster, needs_split_backward
from ppctl.schedule.families.dualpipe_v import dualpipe_v
from ppctl.schedule.families.gis import gis
from ppctl.schedule.families.gpipe import gpipe
from ppctl.schedule.families.hanayo import hanayo
from ppctl.schedule.families.interleaved import interleaved
from ppctl.schedule.families.looped_bfs import looped_bfs
from ppctl.schedule.families.one_f_one_b import eager_1f1b, one_f_one_b
from ppctl.schedule.families.size_checks import at_least
from ppctl.schedule.families.v_shaped import v_half, v_min
from ppctl.schedule.families.zb_v import zb_v
from ppctl.schedule.families.zero_bubble import interleaved_zb, zb_h1, zb_h2
from ppctl.schedule.ir import Schedule
from ppctl.schedule.ticks import runs_in_fb_ticks, runs_on_ring
from ppctl.schedule.validate import validate

FAMILIES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_1f1b,
    "interleaved": interleaved,
    "looped_bfs": looped_bfs,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "interleaved_zb": interleaved_zb,
    "zb_v": zb_v,
    "v_half": v_half,
    "v_min": v_min,
    "gis": gis,
    "dualpipe_v": dualpipe_v,
    "hanayo": hanayo,
}

# the families that executor=spmd runs; those of them with looped placement and whole backwards, which it runs in pairs
ON_RING = tuple(name for name, generate in FAMILIES.items() if runs_on_ring(generate(2, 4)))
LOOPED_WHOLE = tuple(name for name in ON_RING if runs_in_fb_ticks(FAMILIES[name](2, 4)))

ADVICE: dict[str, Callable[[Schedule, Costs], str | None]] = {
    "v_half": needs_split_backward,
    "v_min": needs_split_backward,
    "hanayo": interleaved_is_faster,
}


def build(name: str, num_ranks: int, num_microbatches: int, **knobs: float) -> Schedule:
    """The validated schedule of family `name`. ScheduleError for sizes the family cannot serve.

    >>> [str(task) for task in build("1f1b", 2, 2).ranks[1]]
    ['1F0', '1B0', '1F1', '1B1']
    """
    if name not in FAMILIES:
        raise ScheduleError(f"schedule={name} is not one of {', '.join(FAMILIES)}.")
    at_least(name, "num_ranks", num_ranks, 1)
    at_least(name, "num_microbatches", num_microbatches, 1)
    return validate(FAMILIES[name](num_ranks, num_microbatches, **knobs))


def advice(schedule: Schedule, costs: Costs) -> str | None:
    """What speaks against `schedule` at these costs, in a line, or None.

    >>> advice(build("zb_v", 4, 8), Costs())
    """
    return ADVICE[schedule.name](schedule, costs) if schedule.name in ADVICE else None
