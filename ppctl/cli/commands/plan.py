"""`ppctl plan`."""

from ppctl.planner.plan import plan

__all__ = ["plan"]
