"""V-shaped building blocks with uniform offsets, and the schedules that they are squeezed into.

Pipeline parallelism with controllable memory (Qi et al. 2024, arXiv 2405.15362, section 3 and
appendix A): a building block says when each rank runs the F and I of microbatch 0. It is repeated
every six ticks, then squeezed. Here the squeeze is a run of the ranks at given costs: each runs the
earliest ready task of its pattern, else a weight gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, permutations

from ppctl.errors import ScheduleError
from ppctl.schedule.costs import Costs
from ppctl.schedule.execution_order import NEVER, Arrivals, Rule, Wake, run_ranks
from ppctl.schedule.families.stage_placement import v_shape
from ppctl.schedule.ir import Kind, Schedule, Task
from ppctl.schedule.search.placement_costs import Ledger

UNIT = Costs()
PERIOD = 6  # ticks of a microbatch on every rank: F, I and W of two chunks
F_DOWN, F_UP, I_UP, I_DOWN = range(4)  # a rank's lines of the pattern, in a microbatch's order
Block = tuple[tuple[int, int, int, int], ...]  # by rank the ticks of F down, F up, I up, I down
STEPS = range(1, PERIOD)  # ticks from a rank to the next on the way down; one tick on the way up


def blocks(num_ranks: int) -> Iterator[Block]:
    """Yield the distinct building blocks in which no rank runs two of its four lines at once.

    Which ones these are: docs/derivations.md, "Building blocks of V-shaped schedules".

    >>> len(list(blocks(8)))
    480
    """
    seen: set[Block] = set()
    for later in permutations(STEPS, 3):
        for steps in _steps(num_ranks):
            down = tuple(accumulate(steps, initial=0))
            # ticks modulo the period; F down and I up go down the ranks, F up and I down come back
            phases = [
                (tick, later[0] - r, later[1] + tick, later[2] - r) for r, tick in enumerate(down)
            ]
            if any(len({phase % PERIOD for phase in row}) < 4 for row in phases):
                continue
            block = _unrolled(down, [tuple(phase % PERIOD for phase in row) for row in phases])
            if block not in seen:
                seen.add(block)
                yield block


def steady_excess(block: Block, ledger: Ledger, limit: float) -> float:
    """Return how far the fullest rank is above `limit` in the steady state, in the ledger's units.

    An activation lives from the start of F to the end of W, right after I at the earliest; the
    gradient that I hands to W instead lives for two ticks.

    >>> steady_excess(next(blocks(2)), Ledger((0, 0), (1, 1, 1, 1)), 3)
    0.3333333333333335
    """
    last = len(ledger.stash) - 1
    of_ranks: list[float] = []
    for r, row in enumerate(block):
        size = 0
        for stage, life in ((r, row[I_DOWN] - row[F_DOWN]), (last - r, row[I_UP] - row[F_UP])):
            handed = ledger.stash if ledger.pending is None else ledger.pending
            size += ledger.stash[stage] * (life + (ledger.pending is not None)) + 2 * handed[stage]
        of_ranks.append(ledger.held[r] + size / PERIOD)
    return max(of_ranks) - limit


def _steps(num_ranks: int) -> Iterator[tuple[int, ...]]:
    for first in STEPS:
        yield (first,) * (num_ranks - 1)
        for second in range(1, first):
            for change in range(1, num_ranks - 1):
                yield (first,) * change + (second,) * (num_ranks - 1 - change)


def _unrolled(down: tuple[int, ...], phases: list[tuple[int, ...]]) -> Block:
    """Return the block whose lines follow each other as early as their phases allow."""
    last = len(down) - 1
    f_up = _next(down[last], phases[last][F_UP])  # on the last rank, the turn of the V
    i_up = _next(f_up + last, phases[0][I_UP])  # on rank 0, where the loss is
    i_down = _next(i_up + down[last], phases[last][I_DOWN])
    return tuple(
        (tick, f_up + last - r, i_up + tick, i_down + last - r) for r, tick in enumerate(down)
    )


def _next(tick: int, phase: int) -> int:
    """Return the first tick after `tick` with this phase.

    >>> _next(7, 2), _next(8, 2)
    (8, 14)
    """
    return tick + 1 + (phase - tick - 1) % PERIOD


def repeated(starts: Sequence[Sequence[int]], num_microbatches: int) -> list[list[list[int]]]:
    """Return the priority of a building block, repeated every PERIOD ticks.

    starts[r]: the ticks of microbatch 0's F down, F up, I up, I down on rank r.
    """
    ticks = range(0, PERIOD * num_microbatches, PERIOD)
    return [[[start + tick for tick in ticks] for start in row] for row in starts]


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
    """Return the schedule of ranks that run F and I by `priority[rank][line][microbatch]`.

    The lowest priority runs first.
    cap: the most that a rank holds, in the units of `ledger` (None: activations, in chunks). costs:
    of the run that makes the order. patience: a rank waits for a task that comes within this share
    of a weight gradient's time, instead of running that.
    reorder: before rank 0's first backward and after a rank's last entry (F down), a rank whose
    next task is not ready takes another that is, as the paper's reordering does.
    ScheduleError where the pattern cannot run under the cap.
    """
    # 1. the ranks with their patterns
    num_ranks = len(priority)
    empty = Schedule(name, ((),) * num_ranks, v_shape(num_ranks), num_microbatches)
    rule = Rule.of(empty)
    arrivals = rule.arrivals(costs.transfer_s)
    written_s = [NEVER] * rule.num_values
    ledger = Ledger.counted(empty) if ledger is None else ledger
    shared = empty, arrivals, written_s, cap, costs, ledger
    ranks = [_Rank(r, lines, *shared) for r, lines in enumerate(priority)]
    first_backward_s = NEVER  # of rank 0

    def act(r: int, now_s: float) -> tuple[float, list[Wake]]:
        """Run a task of rank r, or wait for one. The reader of its value is woken."""
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
        wakes = [(end_s, r)]
        if kind != "W" and 0 <= reads_it < 2 * num_ranks and empty.rank_of[reads_it] != r:
            wakes.append((end_s + costs.transfer_s, empty.rank_of[reads_it]))
        return end_s, wakes

    # 2. the run, and the tasks that it left
    run_ranks(num_ranks, act)
    left = 6 * num_ranks * num_microbatches - sum(len(rank.done) for rank in ranks)
    if left:
        raise ScheduleError(f"{name}: {left} tasks cannot run under a cap of {cap}.")
    return replace(empty, ranks=tuple(tuple(rank.done) for rank in ranks))


class _Rank:
    """One rank on its way through its four lines."""

    def __init__(
        self,
        r: int,
        priority: Sequence[Sequence[int]],
        schedule: Schedule,
        arrivals: Arrivals,
        written_s: list[float],
        cap: int,
        costs: Costs,
        ledger: Ledger,
    ):
        down, up = r, schedule.num_stages - 1 - r
        # 1. of each line of the pattern its stage, kind, reads and seconds
        self.cells: tuple[tuple[int, Kind], ...] = ((down, "F"), (up, "F"), (up, "I"), (down, "I"))
        self.needs = [arrivals[kind][stage] for stage, kind in self.cells]
        places = [(kind, stage) for kind in "FIW" for stage in (down, up)]
        self.seconds = {(kind, stage): costs.seconds(kind, stage, 2) for kind, stage in places}
        self.written_s, self.priority, self.cap = written_s, priority, cap
        self.num_microbatches = schedule.num_microbatches
        # 2. progress and memory
        self.at = [0, 0, 0, 0]  # microbatches done, by line
        self.heads = [(of_line[0], line) for line, of_line in enumerate(priority)]  # to come
        self.live = ledger.held[r]
        rise = [ledger.rise(stage, kind) for stage, kind in self.cells]
        reserves = (ledger.reserve, ledger.reserve, 0, 0)
        self.takes = [n + more for n, more in zip(rise, reserves, strict=True)]  # by line
        self.change = {(kind, stage): ledger.change(stage, kind) for kind, stage in places}
        self.pending: deque[Task] = deque()  # weight gradients to come
        self.done: list[Task] = []

    def next_task(
        self, now_s: float, *, warm: bool, cool: bool, patience: float
    ) -> tuple[Task | None, float]:
        """Return the task to run now, marked as done; else None and when to try again, if known."""
        # 1. the first line whose task is ready and fits; others than the first if warm or cool
        cool = cool and self.at[F_DOWN] == self.num_microbatches
        todo = sorted(self.heads) if cool or warm else [min(self.heads)] if self.heads else []
        later_s = NEVER
        for n, (_, line) in enumerate(todo):
            may_enter = line != F_DOWN or self._has_room()
            if n > 0 and not ((cool and line >= I_UP) or (warm and may_enter)):
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
        # 2. a weight gradient, unless such a task comes soon
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
        """Return whether a microbatch may enter early, with room for all to come back up."""
        coming_back = self.at[F_DOWN] - self.at[F_UP]
        up = self.change["F", self.cells[F_UP][0]]
        return self.live + coming_back * up + self.takes[F_DOWN] + up <= self.cap
