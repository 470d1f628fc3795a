"""`ppctl tune`: find the fastest mesh, schedule, partition, microbatches and remat for so many devices."""

from ppctl.planner.tune import tune

__all__ = ["tune"]
