"""Schedules run on devices: mesh, layout, the reference, spmd and mpmd."""
