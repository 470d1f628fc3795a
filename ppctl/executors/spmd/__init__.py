"""The spmd executor: a schedule as one XLA program, a scan over ticks."""
