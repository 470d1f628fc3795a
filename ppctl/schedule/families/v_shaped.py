from ppctl.schedule.families.building_blocks import repeated, squeezed
from ppctl.schedule.families.family import Family, only_if
from ppctl.schedule.ir import Schedule


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return V-Half, a V schedule with half the activations and half the bubble of 1F1B.

    Bubble (3p-7)/2 at F = I = W = 1 and even p >= 4, m >= p; peak activations floor((p+2)/2). p =
    num_ranks. Needs I and W as separate tasks: with whole backwards it is slower than 1F1B.
    Source: Qi et al. 2024, arXiv 2405.15362, section 3.3 and figure 4.
    """
    p = num_ranks
    # extra ticks, so that no two of a rank's F down, F up, I up, I down share a tick modulo 6
    wait = 3 if p % 2 == 0 else 0
    turn, end = 3 * p - 1 + wait, 6 * p - 2 + wait
    starts = [[2 * r, 3 * p - 2 - r, turn + 2 * r, end - r] for r in range(p)]
    priority, cap = repeated(starts, num_microbatches), 2 * ((p + 2) // 2)
    return squeezed("v_half", priority, num_microbatches, cap)


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return V-Min: a third of 1F1B's activations, the least for a V whose bubble is constant in m.

    Bubble 2p-5/2 (p not a multiple of 3) or 2p-7/2 at F = I = W = 1, growing with m at other
    ratios; peak activations floor((p+4)/3). p = num_ranks. Needs I and W as separate tasks:
    with whole backwards it is slower than 1F1B.
    Source: Qi et al. 2024, arXiv 2405.15362, section 3.3 and figure 4.
    """
    p = num_ranks
    # extra ticks, so that no two of a rank's F down, F up, I up, I down share a tick modulo 6
    wait = 2 if p % 3 == 0 else 0
    starts = [[r, 2 * p - 1 - r, 2 * p + wait + r, 4 * p - 1 + wait - r] for r in range(p)]
    priority, cap = repeated(starts, num_microbatches), 2 * ((p + 4) // 3)
    return squeezed("v_min", priority, num_microbatches, cap)


FAMILIES = (
    Family(
        "v_half",
        v_half,
        published="2024-05",
        bubble_s=only_if(
            lambda s: s.is_equal and s.p % 2 == 0 and s.m >= s.p >= 4,
            lambda s: (3 * s.p - 7) / 2 * s.fiw[0],
        ),
        peak=only_if(lambda s: s.m >= s.p >= 4, lambda s: (s.p + 2) // 2),
    ),
    Family(
        "v_min",
        v_min,
        published="2024-05",
        bubble_s=only_if(
            lambda s: s.is_equal and s.m >= s.p >= 4,
            lambda s: (2 * s.p - (2.5 if s.p % 3 else 3.5)) * s.fiw[0],
        ),
        peak=only_if(lambda s: s.m >= s.p >= 4, lambda s: (s.p + 4) // 3),
    ),
)
