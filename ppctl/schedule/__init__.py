"""Pipeline schedules as pure data: generated, validated, simulated, lowered to ticks. Standard library only."""

from ppctl.schedule.families.registry import FAMILIES, LOOPED_WHOLE, ON_RING, advice, build
from ppctl.schedule.ir import Schedule, Task, Value, reads, writes
from ppctl.schedule.validate import validate, walk

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
    "validate",
    "walk",
    "writes",
]
