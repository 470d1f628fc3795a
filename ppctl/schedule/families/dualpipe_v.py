from ppctl.schedule.families.family import Family, forward_trip_s, only_if
from ppctl.schedule.families.stage_placement import RankProgram, v_shape
from ppctl.schedule.ir import Schedule, Task


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return DualPipeV: one direction of DualPipe folded into a V, with few split backwards.

    Makespan m(F+I+W) + (p-1)F/2 at F = I = W and m >= 2p; peak activations p + 1/2, at most m.
    p = num_ranks. A forward and a backward that DualPipe overlaps are neighbours in the order.
    Backwards are split only where ranks would idle. For m < 2p the schedule is that of 2p
    microbatches, without the tasks of the last 2p - m.
    Source: DeepSeek-V3, arXiv 2412.19437, figure 5; DualPipeV by Sea AI Lab ("cut in half") and
    github.com/deepseek-ai/DualPipe, with the same eight steps.
    """
    full = max(2 * num_ranks, num_microbatches)
    ranks: list[tuple[Task, ...]] = []
    for r in range(num_ranks):
        below = num_ranks - 1 - r  # number of ranks after this one on the way down
        program = RankProgram(down=r, up=2 * num_ranks - 1 - r)
        # 1-3: fill the pipeline, down, then both ways, then up with the first backwards
        program.add(2 * below, "F down")
        program.add(r + 1, "F down", "F up")
        program.add(below, "I up", "W up", "F up")
        # 4-5: the steady state, then without new microbatches
        program.add(full - 2 * num_ranks + r + 1, "F down", "B up", "F up", "B down")
        program.add(below, "B up", "F up", "B down")
        # 6: backwards only, both ways; the second half of them are split, and W runs later
        steps = ("B up", "B down") * (r + 1)
        program.add(1, *steps[: r + 1], *(step.replace("B", "I") for step in steps[r + 1 :]))
        # 7-8: input gradients as they arrive, weight gradients between and after them
        program.add(below, "W", "I down")
        program.add(r + 1, "W")
        ranks.append(tuple(task for task in program.tasks if task.microbatch < num_microbatches))
    return Schedule("dualpipe_v", tuple(ranks), v_shape(num_ranks), num_microbatches)


FAMILIES = (
    Family(
        "dualpipe_v",
        dualpipe_v,
        also_called=("dualpipe",),
        published="2024-12",
        bubble_s=only_if(lambda s: s.is_equal and s.m >= 2 * s.p, lambda s: forward_trip_s(s) / 2),
        peak=only_if(lambda s: s.m >= 2 * s.p, lambda s: s.p + 0.5),
    ),
)
