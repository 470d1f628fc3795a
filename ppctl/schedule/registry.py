"""Every schedule family that ppctl ships. A generator that is not here is not shipped."""

from __future__ import annotations

from collections.abc import Callable

from ppctl.errors import ScheduleError
from ppctl.schedule.gpipe import gpipe
from ppctl.schedule.interleaved import interleaved
from ppctl.schedule.ir import Schedule
from ppctl.schedule.one_f_one_b import eager_1f1b, one_f_one_b
from ppctl.schedule.validate import validate

FAMILIES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_1f1b,
    "interleaved": interleaved,
}


def build(name: str, num_ranks: int, num_microbatches: int, **knobs: int) -> Schedule:
    """The validated schedule of family `name`. ScheduleError for sizes the family cannot serve.

    >>> [str(task) for task in build("1f1b", 2, 2).ranks[1]]
    ['1F0', '1B0', '1F1', '1B1']
    """
    if name not in FAMILIES:
        raise ScheduleError(f"schedule={name} is not one of {', '.join(FAMILIES)}.")
    return validate(FAMILIES[name](num_ranks, num_microbatches, **knobs))
