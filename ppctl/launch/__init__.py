"""Starting, supervising and joining processes; sweeps."""
