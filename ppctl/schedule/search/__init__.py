"""Schedules found by search: under memory caps, at given costs."""
