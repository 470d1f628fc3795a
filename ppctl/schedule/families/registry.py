"""Every schedule family that ppctl ships: the records of the modules of this package. What is not here is not shipped.

A new family is one file in this folder with a generator and its record (`FAMILIES`), conf/schedule/<name>.yaml and a
golden file.

Not here: Chimera and DualPipe, which hold each stage on two ranks. `rank_of` gives a stage one, and a second copy would
be a special case in validation, transfers and memory; DualPipeV is DualPipe without it.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

from ppctl.errors import ScheduleError
from ppctl.schedule import families
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.family import Family
from ppctl.schedule.families.size_checks import require_at_least
from ppctl.schedule.ir import Schedule
from ppctl.schedule.validate import validate


def _discover() -> dict[str, Family]:
    """The families by name, in the order of their publication."""
    found: list[Family] = []
    for module in pkgutil.iter_modules(families.__path__, f"{families.__name__}."):
        if module.name != __name__:
            found.extend(getattr(import_module(module.name), "FAMILIES", ()))
    return {family.name: family for family in sorted(found, key=lambda family: (family.published, family.name))}


FAMILIES = _discover()
BASELINE = "1f1b"  # all that one rank needs, and the one to name where several do the same

# the families that executor=spmd runs; those of them that it runs in forward-backward ticks
ON_RING = tuple(family.name for family in FAMILIES.values() if family.runs_on_ring)
LOOPED_WHOLE = tuple(name for name in ON_RING if FAMILIES[name].runs_forward_backward)


def also_called(name: str) -> list[str]:
    """Return the families that papers or other tools call so.

    >>> also_called("Zero-Bubble")
    ['zb_h1', 'zb_v']
    """
    plain = name.lower().replace("-", "_")
    return [family.name for family in FAMILIES.values() if plain in family.also_called]


def build(name: str, num_ranks: int, num_microbatches: int, **knobs: Any) -> Schedule:
    """Return the validated schedule of family `name`. ScheduleError for sizes the family cannot serve.

    >>> [str(task) for task in build("1f1b", 2, 2).ranks[1]]
    ['1F0', '1B0', '1F1', '1B1']
    """
    if name not in FAMILIES:
        raise ScheduleError(f"schedule={name} is not one of {', '.join(FAMILIES)}.")
    require_at_least(name, "num_ranks", num_ranks, 1)
    require_at_least(name, "num_microbatches", num_microbatches, 1)
    unknown = [knob for knob in knobs if knob not in FAMILIES[name].knobs]
    if unknown:
        known = ", ".join(FAMILIES[name].knobs) or "none"
        raise ScheduleError(f"{unknown[0]}={knobs[unknown[0]]} is no setting of schedule={name} (settings: {known}).")
    return validate(FAMILIES[name].generate(num_ranks, num_microbatches, **knobs))


def advice(schedule: Schedule, costs: Costs) -> str | None:
    """Return in a line what speaks against `schedule` at these costs, or None.

    >>> advice(build("zb_v", 4, 8), Costs())
    """
    return FAMILIES[schedule.name].advise(schedule, costs) if schedule.name in FAMILIES else None


def makespan_formula_s(family: str, num_ranks: int, num_microbatches: int, costs: Costs, **knobs: Any) -> float | None:
    """Return the seconds by the closed form of `family` for stages of equal cost, or None where it does not hold.

    >>> makespan_formula_s("interleaved", 8, 32, Costs(), num_chunks=4)
    101.25
    """
    return FAMILIES[family].makespan_s(num_ranks, num_microbatches, costs, **knobs)


def peak_formula(family: str, num_ranks: int, num_microbatches: int, **knobs: Any) -> float | None:
    """Return the activations of the rank that holds most, in units of one microbatch through 1/p of the model, or None.

    >>> peak_formula("interleaved", 8, 32, num_chunks=2)
    11.5
    """
    return FAMILIES[family].peak_activations(num_ranks, num_microbatches, **knobs)
