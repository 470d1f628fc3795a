"""From a repeated pattern of F and I on a V-shaped placement to every rank's order of F, I and W.

Pipeline parallelism with controllable memory (Qi et al. 2024, arXiv 2405.15362, section 3): a schedule is a building
block repeated every six ticks, then squeezed. Here the squeeze is one pass in ticks of F = I = W = 1, in which every
rank runs the earliest task of its pattern that is ready, and a waiting weight gradient where none is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ppctl.schedule.ir import Kind, Schedule, Task
from ppctl.schedule.placement import v_shape
from ppctl.schedule.walk import Rule

NEVER = 1 << 60
PERIOD = 6  # ticks of a microbatch on every rank: F, I and W of two chunks
F_DOWN, F_UP, I_UP, I_DOWN = range(4)  # a rank's four lines of the pattern, in the order a microbatch runs them


def squeeze_pattern(name: str, starts: Sequence[Sequence[int]], num_microbatches: int, cap: int) -> Schedule:
    """The schedule of a building block: starts[r] are the ticks of microbatch 0's F down, F up, I up, I down on rank r.

    cap: the most activations of a rank, in chunks.
    """
    priority = [[[start + PERIOD * m for m in range(num_microbatches)] for start in row] for row in starts]
    return squeeze(name, priority, num_microbatches, cap)


def squeeze(
    name: str, priority: Sequence[Sequence[Sequence[int]]], num_microbatches: int, cap: int, *, reorder: bool = True
) -> Schedule:
    """The schedule whose ranks run their F and I by `priority[rank][line][microbatch]`, lowest first.

    reorder: before rank 0's first backward and after a rank's last entry (F down), a rank whose next task is not ready
    takes another that is, as the paper's reordering does.
    """
    num_ranks = len(priority)
    num_stages = 2 * num_ranks
    lines = [_Rank(r, num_ranks, priority[r], num_microbatches, cap) for r in range(num_ranks)]
    empty = Schedule(name, ((),) * num_ranks, v_shape(num_ranks), num_microbatches)
    rule = Rule.of(empty)
    written = [NEVER] * rule.num_values
    tick, left = 0, 3 * num_stages * num_microbatches
    while left:
        warm = reorder and lines[0].at[I_UP] == 0
        ran = []
        for rank in lines:
            task = rank.next_task(rule, written, tick, warm, reorder and rank.at[F_DOWN] == num_microbatches)
            if task is not None:
                ran.append(task)
        for stage, kind, m in ran:  # what is written in a tick can be read in the next
            for base in rule.writes[kind][stage]:
                written[base + m] = tick + 1
        left -= len(ran)
        assert ran, f"{name}: no rank can go on at tick {tick}"
        tick += 1
    return Schedule(name, tuple(tuple(rank.done) for rank in lines), v_shape(num_ranks), num_microbatches)


class _Rank:
    """One rank on its way through its four lines."""

    def __init__(self, r: int, num_ranks: int, priority: Sequence[Sequence[int]], num_microbatches: int, cap: int):
        down, up = r, 2 * num_ranks - 1 - r
        self.cells: tuple[tuple[int, Kind], ...] = ((down, "F"), (up, "F"), (up, "I"), (down, "I"))
        self.priority, self.num_microbatches, self.cap = priority, num_microbatches, cap
        self.at = [0, 0, 0, 0]  # microbatches done, by line
        self.live = 0  # chunks held
        self.pending: deque[Task] = deque()  # weight gradients to come
        self.done: list[Task] = []

    def next_task(self, rule: Rule, written: list[int], tick: int, warm: bool, cool: bool) -> Task | None:
        """What the rank runs in this tick, or None; it is marked as done."""
        todo = [(self.priority[i][m], i) for i, m in enumerate(self.at) if m < self.num_microbatches]
        todo.sort()
        for n, (_, line) in enumerate(todo):
            if n > 0 and not ((cool and line >= I_UP) or (warm and (line != F_DOWN or self._has_room()))):
                continue
            (stage, kind), m = self.cells[line], self.at[line]
            if kind == "F" and self.live == self.cap:
                continue
            if all(written[base + m] <= tick for base, _ in rule.reads[kind][stage]):
                self.at[line] += 1
                self.live += kind == "F"
                if kind == "I":
                    self.pending.append(Task(stage, "W", m))
                self.done.append(Task(stage, kind, m))
                return self.done[-1]
            if not (cool or warm):
                break
        if not self.pending:
            return None
        self.live -= 1
        self.done.append(self.pending.popleft())
        return self.done[-1]

    def _has_room(self) -> bool:
        """Whether a microbatch may enter early: all that are in must find room for their way up, and so must it."""
        coming_back = self.at[F_DOWN] - self.at[F_UP]
        return self.live + coming_back + 2 <= self.cap
