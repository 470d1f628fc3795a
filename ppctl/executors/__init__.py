"""Executors run a schedule on a device mesh: the reference, spmd and mpmd."""
