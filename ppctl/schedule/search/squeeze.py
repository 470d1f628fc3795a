"""From a repeated pattern of F and I on a V-shaped placement to every rank's order of F, I and W.

Pipeline parallelism with controllable memory (Qi et al. 2024, arXiv 2405.15362, section 3): a schedule is a building
block repeated every six ticks, then squeezed. Here the squeeze is one run of the ranks at given costs, in which each
runs the earliest task of its pattern that is ready, and a waiting weight gradient where none is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ppctl.errors import ScheduleError
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.rank_of import v_shape
from ppctl.schedule.ir import Kind, Schedule, Task
from ppctl.schedule.search.event_loop import NEVER, Wake, run_ranks
from ppctl.schedule.search.ledger import Ledger
from ppctl.schedule.walk import Rule

UNIT = Costs()
PERIOD = 6  # ticks of a microbatch on every rank: F, I and W of two chunks
F_DOWN, F_UP, I_UP, I_DOWN = range(4)  # a rank's four lines of the pattern, in the order a microbatch runs them


def squeeze_pattern(
    name: str,
    starts: Sequence[Sequence[int]],
    num_microbatches: int,
    cap: int,
    costs: Costs = UNIT,
    patience: float = 0.0,
    ledger: Ledger | None = None,
) -> Schedule:
    """The schedule of a building block: starts[r] are the ticks of microbatch 0's F down, F up, I up, I down on rank r.

    The other arguments are those of `squeeze`.
    """
    priority = [[[start + PERIOD * m for m in range(num_microbatches)] for start in row] for row in starts]
    return squeeze(name, priority, num_microbatches, cap, costs, patience, ledger)


def squeeze(
    name: str,
    priority: Sequence[Sequence[Sequence[int]]],
    num_microbatches: int,
    cap: int,
    costs: Costs = UNIT,
    patience: float = 0.0,
    ledger: Ledger | None = None,
    *,
    reorder: bool = True,
) -> Schedule:
    """The schedule whose ranks run their F and I by `priority[rank][line][microbatch]`, lowest first.

    cap: the most that a rank holds, in the units of `ledger` (None: activations, in chunks). costs: of the run that
    makes the order. patience: a rank waits for a task that comes within this share of a weight gradient's time, instead
    of running a weight gradient.
    reorder: before rank 0's first backward and after a rank's last entry (F down), a rank whose next task is not ready
    takes another that is, as the paper's reordering does.
    ScheduleError where the pattern cannot run under the cap.
    """
    num_ranks = len(priority)
    empty = Schedule(name, ((),) * num_ranks, v_shape(num_ranks), num_microbatches)
    rule = Rule.of(empty)
    arrivals = rule.arrivals(costs.hop_s)
    written_s = [NEVER] * rule.num_values
    ledger = Ledger.counted(empty) if ledger is None else ledger
    ranks = [_Rank(r, empty, arrivals, written_s, priority[r], cap, costs, ledger) for r in range(num_ranks)]
    first_backward_s = NEVER  # of rank 0

    def act(r: int, now_s: float) -> tuple[float, list[Wake]]:
        """Run a task of rank r. It acts again at its end, or when what it waits for has arrived; so does its reader."""
        nonlocal first_backward_s
        warm = reorder and now_s <= first_backward_s
        task, later_s = ranks[r].next_task(now_s, warm=warm, cool=reorder, patience=patience)
        if task is None:
            return now_s, [(later_s, r)] if later_s < NEVER else []
        stage, kind, m = task
        if r == 0 and kind == "I":
            first_backward_s = min(first_backward_s, now_s)
        end_s = now_s + ranks[r].seconds[kind, stage]
        for base in rule.writes[kind][stage]:
            written_s[base + m] = end_s
        reads_it = stage + 1 if kind == "F" else stage - 1
        if kind != "W" and 0 <= reads_it < 2 * num_ranks and empty.rank_of[reads_it] != r:
            return end_s, [(end_s, r), (end_s + costs.hop_s, empty.rank_of[reads_it])]
        return end_s, [(end_s, r)]

    run_ranks(num_ranks, act)
    left = 6 * num_ranks * num_microbatches - sum(len(rank.done) for rank in ranks)
    if left:
        raise ScheduleError(f"{name}: {left} tasks cannot run under a cap of {cap}.")
    return Schedule(name, tuple(tuple(rank.done) for rank in ranks), empty.rank_of, num_microbatches)


class _Rank:
    """One rank on its way through its four lines."""

    def __init__(
        self,
        r: int,
        schedule: Schedule,
        arrivals: dict[Kind, list[tuple[tuple[int, float], ...]]],
        written_s: list[float],
        priority: Sequence[Sequence[int]],
        cap: int,
        costs: Costs,
        ledger: Ledger,
    ):
        down, up = r, schedule.num_stages - 1 - r
        self.cells: tuple[tuple[int, Kind], ...] = ((down, "F"), (up, "F"), (up, "I"), (down, "I"))
        self.needs = [arrivals[kind][stage] for stage, kind in self.cells]  # of each line
        self.seconds = {(kind, stage): costs.seconds(kind, stage, 2) for kind in "FIW" for stage in (down, up)}
        self.written_s, self.priority, self.cap = written_s, priority, cap
        self.num_microbatches = schedule.num_microbatches
        self.at = [0, 0, 0, 0]  # microbatches done, by line
        self.heads = [(of_line[0], line) for line, of_line in enumerate(priority)]  # of lines with microbatches to come
        self.live = ledger.held[r]
        rise = [ledger.rise(stage, kind) for stage, kind in self.cells]
        self.takes = [n + (ledger.reserve if line < I_UP else 0) for line, n in enumerate(rise)]  # to begin each line
        self.change = {(kind, s): ledger.change(s, kind) for kind in "FIW" for s in (down, up)}
        self.pending: deque[Task] = deque()  # weight gradients to come
        self.done: list[Task] = []

    def next_task(self, now_s: float, *, warm: bool, cool: bool, patience: float) -> tuple[Task | None, float]:
        """Return the task to run now, marked as done; else None and when to try again, as far as that is known."""
        cool = cool and self.at[F_DOWN] == self.num_microbatches
        todo = sorted(self.heads) if cool or warm else [min(self.heads)] if self.heads else []
        later_s = NEVER
        for n, (_, line) in enumerate(todo):
            if n > 0 and not ((cool and line >= I_UP) or (warm and (line != F_DOWN or self._has_room()))):
                continue
            if self.live + self.takes[line] > self.cap:
                continue
            m = self.at[line]
            arrives_s = 0.0
            for base, hop_s in self.needs[line]:
                arrives_s = max(arrives_s, self.written_s[base + m] + hop_s)
            if arrives_s <= now_s:
                return self._run(line), now_s
            later_s = min(later_s, arrives_s)
            if not (cool or warm):
                break
        if self.pending:
            weight_grad = self.pending[0]
            if later_s >= now_s + patience * self.seconds["W", weight_grad.stage]:
                self.live += self.change["W", weight_grad.stage]
                self.done.append(self.pending.popleft())
                return weight_grad, now_s
        return None, later_s

    def _run(self, line: int) -> Task:
        stage, kind = self.cells[line]
        task = Task(stage, kind, self.at[line])
        self.heads.remove((self.priority[line][task.microbatch], line))
        self.at[line] += 1
        if self.at[line] < self.num_microbatches:
            self.heads.append((self.priority[line][self.at[line]], line))
        self.live += self.change[kind, stage]
        if kind == "I":
            self.pending.append(Task(stage, "W", task.microbatch))
        self.done.append(task)
        return task

    def _has_room(self) -> bool:
        """Return whether a microbatch may enter early.

        All that are in must find room for their way up, and so must it.
        """
        coming_back = self.at[F_DOWN] - self.at[F_UP]
        up = self.change["F", self.cells[F_UP][0]]
        return self.live + coming_back * up + self.takes[F_DOWN] + up <= self.cap
