from __future__ import annotations

from ppctl.schedule.ir import Schedule, Task
from ppctl.schedule.program import Program
from ppctl.schedule.placement import v_shape


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V: two chunks a rank, placed down and back up, so that no rank idles and none holds more than p activations.

    Makespan m(F+I+W) + (p-1)F/2 and period m(F+I+W) at F = I = W and m >= 2p-1; for I >= F >= W the period is
    (p-1)(I-W) longer. Peak activations min(m, p) on every rank. p = num_ranks. Fewer microbatches are the order of 2p-1
    without the others.
    Source: Qi et al. 2023, arXiv 2401.10241, section 6 and figure 6.
    """
    ranks = []
    for r in range(num_ranks):
        program = Program(down=r, up=2 * num_ranks - 1 - r)
        # warm-up: forwards of the way down until the first comes back, then as many of both, then the way up alone
        program.add(2 * (num_ranks - r) - 1, "F down")
        program.add(r, "F up", "F down")
        program.add(num_ranks - r, "F up", "I up", "W up")
        # steady state: six tasks a microbatch, no one waits
        program.add(max(2 * num_ranks - 1, num_microbatches) - program.count["F down"], "F down", *_BACK_DOWN, *_UP)
        program.add(program.count["F down"] - program.count["F up"], *_BACK_DOWN, *_UP)
        # cool-down: input gradients first, the weight gradients fill what is left
        program.add(r, "I down", "I up")
        program.add(num_ranks - r, "I down", "W down")
        program.add(program.count["I up"] - program.count["W up"], "W up")
        program.add(program.count["I down"] - program.count["W down"], "W down")
        ranks.append(tuple(task for task in program.tasks if task.microbatch < num_microbatches))
    return Schedule("zb_v", tuple(ranks), v_shape(num_ranks), num_microbatches)


_BACK_DOWN = ("I down", "W down")
_UP = ("F up", "I up", "W up")
