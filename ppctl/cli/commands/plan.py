"""`ppctl plan`: say what a request takes before it trains: stages, bubble and memory of each rank."""

from ppctl.planner.plan import plan

__all__ = ["plan"]
