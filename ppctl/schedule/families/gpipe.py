from dataclasses import replace

from ppctl.schedule.families.family import Family, fill_and_drain_s
from ppctl.schedule.families.looped_bfs import looped_bfs
from ppctl.schedule.ir import Schedule


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the GPipe schedule: all forwards, then all backwards in reverse order.

    Bubble (p-1)(F+B); bubble fraction (p-1)/(m+p-1); peak activations m on every rank.
    p = num_ranks, m = num_microbatches, F and B = seconds of a microbatch through 1/p of the model.
    Source: Huang et al. 2019, arXiv 1811.06965, figure 2c.
    """
    return replace(looped_bfs(num_ranks, num_microbatches, num_chunks=1), name="gpipe")


FAMILIES = (Family("gpipe", gpipe, "2018-11", bubble_s=fill_and_drain_s, peak=lambda s: s.m),)
