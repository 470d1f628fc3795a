from ppctl.schedule.families import family
from ppctl.schedule.families.building_blocks import squeezed
from ppctl.schedule.families.interleaved import alternating
from ppctl.schedule.families.stage_placement import RankProgram, v_shape
from ppctl.schedule.ir import Kind, Schedule, Task


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return ZB-H1: 1F1B with split backwards; rank r delays each W by r microbatches.

    Bubble (p-1) max(F+I-W, F, I) for m >= p; peak activations min(m, p) on every rank. p =
    num_ranks; I and W are the input- and weight-gradient halves of a backward.
    Source: Qi et al. 2023, arXiv 2401.10241, section 2.1.
    """
    return alternating("zb_h1", num_ranks, num_microbatches, is_split=True)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return ZB-H2: twice the warm-up and delay of ZB-H1, so no rank idles between its tasks.

    Makespan m(F+I+W) + (p-1)F at F = I = W; period m(F+I+W) + (p-1) max(0, F+I-2W, I-F), for m >=
    2p-1. The period is the step time without a barrier between steps. Peak activations
    min(m, 2p-1) on every rank. p = num_ranks.
    Source: Qi et al. 2023, arXiv 2401.10241, section 2.2.
    """
    return alternating("zb_h2", num_ranks, num_microbatches, warmup_hops=2, is_split=True)


def interleaved_zb(num_ranks: int, num_microbatches: int, *, num_chunks: int = 2) -> Schedule:
    """Return interleaved 1F1B with split backwards: ZB-H1 over V chunks a rank.

    Bubble (p-1) max(F+I-W, F, I)/V; peak activations p on every rank. p = num_ranks,
    V = num_chunks. ScheduleError unless num_microbatches is a multiple of p.
    Source: section 2.1 of arXiv 2401.10241 on the order of 2104.04473, as in PyTorch's
    ScheduleInterleavedZeroBubble; closed form by simulation.
    """
    family.require_multiple_of_ranks("interleaved_zb", num_microbatches, num_ranks)
    return alternating("interleaved_zb", num_ranks, num_microbatches, num_chunks, is_split=True)


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return ZB-V: two chunks a rank in a V, no idle time between tasks, p activations at most.

    Makespan m(F+I+W) + (p-1)F/2 at F = I = W and m >= p; period m(F+I+W) + (p-1)(I-W) for
    I >= F >= W and m >= 2p-1. The period is the step time without a barrier between steps. Peak
    activations min(m, p) on every rank. p = num_ranks. For m < 2p-1 the schedule is that of 2p-1
    microbatches, without the tasks of the last 2p-1-m; weight gradients move into the gaps.
    Source: Qi et al. 2023, arXiv 2401.10241, section 6 and figure 6.
    """
    full = max(2 * num_ranks - 1, num_microbatches)
    ranks = tuple(_zb_v_steps(r, num_ranks, full) for r in range(num_ranks))
    if full == num_microbatches:
        return Schedule("zb_v", ranks, v_shape(num_ranks), num_microbatches)
    priority, cap = _priority(ranks, num_microbatches), 2 * num_ranks
    return squeezed("zb_v", priority, num_microbatches, cap, reorder=False)


def _zb_v_steps(r: int, num_ranks: int, num_microbatches: int) -> tuple[Task, ...]:
    """Return rank r's program for at least 2p-1 microbatches."""
    program = RankProgram(down=r, up=2 * num_ranks - 1 - r)
    back_down, up = ("I down", "W down"), ("F up", "I up", "W up")
    # warm-up: forwards down until the first comes back, then both ways, then only the way up
    program.add(2 * (num_ranks - r) - 1, "F down")
    program.add(r, "F up", "F down")
    program.add(num_ranks - r, *up)
    # steady state: six tasks a microbatch without waits; then the same without new microbatches
    program.add(num_microbatches - program.count["F down"], "F down", *back_down, *up)
    program.add(num_microbatches - program.count["F up"], *back_down, *up)
    # cool-down: input gradients first, weight gradients fill the gaps
    program.add(r, "I down", "I up")
    program.add(num_ranks - r, *back_down)
    program.add(num_microbatches - program.count["W up"], "W up")
    program.add(num_microbatches - program.count["W down"], "W down")
    return tuple(program.tasks)


def _priority(ranks: tuple[tuple[Task, ...], ...], num_microbatches: int) -> list[list[list[int]]]:
    """Return priority[rank][line][microbatch] for `squeezed`: each task's index in its program."""
    found: list[list[list[int]]] = []
    for r, tasks in enumerate(ranks):
        step = {task: t for t, task in enumerate(tasks)}
        up = 2 * len(ranks) - 1 - r
        lines: tuple[tuple[int, Kind], ...] = ((r, "F"), (up, "F"), (up, "I"), (r, "I"))
        microbatches = range(num_microbatches)
        found.append([[step[Task(s, kind, m)] for m in microbatches] for s, kind in lines])
    return found


FAMILIES = (
    family.Family(
        "zb_h1",
        zb_h1,
        also_called=("zero_bubble", "zb", "zb1p"),
        published="2023-11",
        bubble_s=family.only_if(lambda s: s.is_free and s.m >= s.p, family.zero_bubble_s),
        peak=family.peak_of_1f1b,
    ),
    family.Family(
        "zb_h2",
        zb_h2,
        published="2023-11",
        bubble_s=family.only_if(lambda s: s.is_equal and s.m >= 2 * s.p - 1, family.forward_trip_s),
        peak=lambda s: min(s.m, 2 * s.p - 1),
    ),
    family.Family(
        "interleaved_zb",
        interleaved_zb,
        published="2023-11",
        bubble_s=family.only_if(lambda s: s.is_free, family.zero_bubble_s),
        peak=lambda s: s.p,
        searched_knobs=family.each_num_chunks,
    ),
    family.Family(
        "zb_v",
        zb_v,
        also_called=("zero_bubble", "zb", "zbv"),
        published="2023-11",
        bubble_s=family.only_if(
            lambda s: s.is_equal and s.m >= s.p, lambda s: family.forward_trip_s(s) / 2
        ),
        peak=family.peak_of_1f1b,
    ),
)
