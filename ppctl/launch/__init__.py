"""Processes: started, supervised, joined; sweeps."""
