"""Pipeline schedules as pure data: generated, validated, priced, lowered to ticks. Standard library only."""

from ppctl.schedule.ir import Schedule, Task, Value, reads, writes
from ppctl.schedule.registry import FAMILIES, build
from ppctl.schedule.validate import validate, walk

__all__ = ["FAMILIES", "Schedule", "Task", "Value", "build", "reads", "validate", "walk", "writes"]
