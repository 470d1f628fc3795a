"""Search for schedules at given costs, under memory caps."""
