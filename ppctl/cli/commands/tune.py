"""`ppctl tune`."""

from ppctl.planner.tune import tune

__all__ = ["tune"]
