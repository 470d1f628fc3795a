"""Pipeline schedules as pure data: generated, validated, simulated, lowered to ticks. Standard library only.

Names are loaded when they are used: settings need `Remat` alone, and not every family.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppctl.schedule.families.registry import FAMILIES, LOOPED_WHOLE, ON_RING, advice, build
    from ppctl.schedule.ir import Schedule, Task, Value, reads, writes

__all__ = [
    "FAMILIES",
    "LOOPED_WHOLE",
    "ON_RING",
    "Schedule",
    "Task",
    "Value",
    "advice",
    "build",
    "reads",
    "writes",
]

# `validate` and `walk` are modules here, which a function of the same name could not stand in for
_HOMES = {
    **dict.fromkeys(("FAMILIES", "LOOPED_WHOLE", "ON_RING", "advice", "build"), "families.registry"),
    **dict.fromkeys(("Schedule", "Task", "Value", "reads", "writes"), "ir"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ppctl.schedule' has no attribute {name!r}")
    return getattr(import_module(f"ppctl.schedule.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
