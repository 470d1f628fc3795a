from ppctl.schedule.families import family
from ppctl.schedule.families.interleaved import alternating
from ppctl.schedule.ir import Schedule


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return 1F1B: after p-1-r warm-up forwards, rank r alternates one forward and one backward.

    Bubble (p-1)(F+B); peak activations min(m, p-r) on rank r: p at most, whatever m.
    Source: PipeDream-flush, arXiv 2006.09503; DAPPLE, Fan et al. 2021, arXiv 2007.01045.
    """
    return alternating("1f1b", num_ranks, num_microbatches)


def eager_1f1b(num_ranks: int, num_microbatches: int, *, warmup_hops: float = 2) -> Schedule:
    """Return eager 1F1B: a warm-up of floor(h(p-1-r)) forwards, h = warmup_hops in [1, 2].

    Bubble (p-1)(F+B) with free transfers, (p-1)(F+B+2c) with h = 2, m >= 2p-1 and transfers of
    c <= 0.3 min(F, B); peak activations min(m, floor(h(p-1-r))+1) on rank r: 2p-1 at most with
    h = 2, p as in 1F1B with h = 1. With h = 2 ranks run another task during each transfer.
    Source: Zhuang et al. 2022, arXiv 2211.05322 (h = 2); other h by simulation.
    """
    return alternating("eager_1f1b", num_ranks, num_microbatches, warmup_hops=warmup_hops)


def _alternation_s(s: family.FormulaInputs) -> float:
    """Return the bubble of 1F1B in seconds: (p-1)(F+B) + 2c(p-1) + 2c floor((m-1)(p-1)/p)."""
    trips = (s.p - 1) + (s.m - 1) * (s.p - 1) // s.p
    return (s.p - 1) * s.work_s + 2 * s.costs.transfer_s * trips


def _hides_latency(s: family.FormulaInputs) -> bool:
    return s.is_free or (s.has_small_hop and s.warmup_hops == 2 and s.m >= 2 * s.p - 1)


FAMILIES = (
    family.Family(
        "1f1b",
        one_f_one_b,
        also_called=("dapple", "pipedream"),
        published="2020-06",
        bubble_s=family.only_if(lambda s: s.has_small_hop, _alternation_s),
        peak=family.peak_of_1f1b,
    ),
    family.Family(
        "eager_1f1b",
        eager_1f1b,
        published="2022-11",
        bubble_s=family.only_if(_hides_latency, family.fill_and_drain_s),
        peak=lambda s: min(s.m, s.warmup + 1),
        searched_knobs=lambda _: [
            {"warmup_hops": hops} for hops in family.WARMUP_HOPS[1:]
        ],  # h = 1: 1F1B
    ),
)
