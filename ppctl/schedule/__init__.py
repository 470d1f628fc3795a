"""Pipeline schedules as pure data: generated, simulated, lowered. Standard library only."""
