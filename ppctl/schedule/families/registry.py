"""The registry of schedule families: the records of all modules in this package.

A new family needs one file in this folder with a generator and its record (`FAMILIES`),
conf/schedule/<name>.yaml and a golden file.

Left out: Chimera and DualPipe, which hold each stage on two ranks. `Schedule.rank_of` has one rank
for each stage, and a second copy would be a special case in validation, transfers and memory.
DualPipeV holds each stage once.
"""

import inspect
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from numbers import Integral, Real
from typing import Any

from ppctl.errors import ScheduleError, nearest, suggested
from ppctl.schedule import families
from ppctl.schedule.families.family import Family
from ppctl.schedule.ir import Schedule
from ppctl.schedule.lockstep_ticks import runs_in_fb_ticks
from ppctl.schedule.validation import validate


def _discover() -> dict[str, Family]:
    """Return the families by name, in the order of their publication."""
    found: list[Family] = []
    for module in pkgutil.iter_modules(families.__path__, f"{families.__name__}."):
        if module.name != __name__:
            found.extend(getattr(import_module(module.name), "FAMILIES", ()))
    found.sort(key=lambda family: (family.published, family.name))
    return {family.name: family for family in found}


FAMILIES = _discover()
BASELINE = "1f1b"  # family for one rank, and for ties of equal schedules

# names of the families that executor=spmd runs, and of those that it runs in forward-backward ticks
# (a rank may run an F and a B in one tick)
ON_RING = tuple(family.name for family in FAMILIES.values() if family.runs_on_ring)
LOOPED_WHOLE = tuple(name for name in ON_RING if runs_in_fb_ticks(FAMILIES[name].sample))


def also_called(name: str) -> list[str]:
    """Return the families that have this name in papers or other tools.

    >>> also_called("Zero-Bubble")
    ['zb_h1', 'zb_v']
    """
    plain = name.lower().replace("-", "_")
    return [family.name for family in FAMILIES.values() if plain in family.also_called]


@dataclass(frozen=True)
class FamilyWithKnobs:
    """A schedule family with its settings. Made by `family`."""

    name: str
    knobs: Mapping[str, float]

    def build(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """Return the validated schedule. ScheduleError for unsupported sizes."""
        family = FAMILIES[self.name]
        family.check_size(num_ranks, num_microbatches, **self.knobs)
        return validate(family.generate(num_ranks, num_microbatches, **self.knobs))


def family(name: str, **knobs: Any) -> FamilyWithKnobs:
    """Return a schedule family with its settings, to pass to `ppctl.pipeline` with any mesh.

    Args:
        name: a family that `ppctl schedule list` prints, such as "interleaved".
        knobs: settings of the family, such as num_chunks=2; others keep the family's defaults.

    Raises:
        ScheduleError: for an unknown family or setting, or a setting of the wrong type.

    >>> family("interleaved", num_chunks=2).build(num_ranks=2, num_microbatches=4).num_stages
    4
    """
    if name not in FAMILIES:
        raise ScheduleError(f"schedule={name} is not one of {', '.join(FAMILIES)}.")
    known = FAMILIES[name].knobs
    for knob, value in knobs.items():
        if knob not in known:
            remedy = suggested(nearest(knob, known)[:1])
            what = f"{knob}={value} is no setting of schedule={name}"
            raise ScheduleError(f"{what} (settings: {', '.join(known) or 'none'}).{remedy}")
        parameter = inspect.signature(FAMILIES[name].generate, eval_str=True).parameters[knob]
        kind = Integral if parameter.annotation is int else Real
        if not isinstance(value, kind):
            what = "a whole number" if kind is Integral else "a number"
            raise ScheduleError(f"{knob}={value!r} is not {what} (schedule={name}). Use one.")
    return FamilyWithKnobs(name, knobs)


def build(name: str, num_ranks: int, num_microbatches: int, **knobs: Any) -> Schedule:
    """Return the validated schedule of a family.

    Args:
        name: a family that `ppctl schedule list` prints, such as "1f1b".
        num_ranks: p, the number of pipeline ranks.
        num_microbatches: m, the number of microbatches in a step.
        knobs: settings of the family, as in `family`.

    Raises:
        ScheduleError: for an unknown family or setting, or sizes that the family does not support.

    >>> [str(task) for task in build("1f1b", 2, 2).ranks[1]]
    ['1F0', '1B0', '1F1', '1B1']
    """
    return family(name, **knobs).build(num_ranks, num_microbatches)
