"""V-shaped building blocks with uniform offsets, and the schedules that they are squeezed into.

Pipeline parallelism with controllable memory (Qi et al. 2024, arXiv 2405.15362, section 3 and
appendix A): a building block gives the ticks of microbatch 0's F and I on each rank. It is repeated
every six ticks, then squeezed: idle ticks are removed under a memory cap. `squeeze` does this by
simulating the ranks at given costs: each runs the earliest ready task of its pattern, or else a
weight gradient.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, permutations

from ppctl.schedule.costs import Costs
from ppctl.schedule.execution_order import NEVER, ChoosingRanks, Chosen, Jobs, Orders
from ppctl.schedule.families.stage_placement import v_shape
from ppctl.schedule.ir import Kind, Schedule, Task
from ppctl.schedule.placement_costs import Ledger

PERIOD = 6  # ticks of a microbatch on every rank: F, I and W of two chunks
# lines of a rank's pattern, in the order of a microbatch: F and I of the rank's two stages, where
# DOWN is the stage on the way down the ranks, UP the one on the way back up
F_DOWN, F_UP, I_UP, I_DOWN = range(4)
# kind and way of each line, with the weight gradients last
LINES: tuple[tuple[Kind, str], ...] = (
    *(("F", "down"), ("F", "up"), ("I", "up"), ("I", "down")),
    *(("W", "up"), ("W", "down")),
)
WEIGHT_GRADS = {I_UP: 4, I_DOWN: 5}  # line of W for each line of I
Block = tuple[tuple[int, int, int, int], ...]  # [rank]: ticks of F_DOWN to I_DOWN
STEPS = range(1, PERIOD)  # possible ticks from a rank to the next on the way down; on the way up: 1


def blocks(num_ranks: int) -> Iterator[Block]:
    """Yield the distinct building blocks; a rank's four lines never share a tick.

    See docs/derivations.md, "Building blocks of V-shaped schedules".

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
    """Return the fullest rank's memory in the steady state minus `limit`, in the ledger's units.

    W runs right after I. An activation lives from the start of F to the end of W. If the ledger has
    `pending`, the activation ends with I, and `pending` lives for the two ticks of I and W.

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
    """Yield ticks from rank to rank on the way down: all equal, or fewer after some rank."""
    for first in STEPS:
        yield (first,) * (num_ranks - 1)
        for second in range(1, first):
            for change in range(1, num_ranks - 1):
                yield (first,) * change + (second,) * (num_ranks - 1 - change)


def _unrolled(down: tuple[int, ...], phases: list[tuple[int, ...]]) -> Block:
    """Return the block that runs each line as early as possible after the line before.

    down[r]: tick of F down on rank r. phases[r]: ticks of lines 0 to 3 on rank r, modulo PERIOD.
    """
    last = len(down) - 1
    f_up = _next(down[last], phases[last][F_UP])  # tick on the last rank, where the V turns
    i_up = _next(f_up + last, phases[0][I_UP])  # tick on rank 0, which computes the loss
    i_down = _next(i_up + down[last], phases[last][I_DOWN])  # tick on the last rank
    return tuple(
        (tick, f_up + last - r, i_up + tick, i_down + last - r) for r, tick in enumerate(down)
    )


def _next(tick: int, phase: int) -> int:
    """Return the first tick after `tick` that is equal to `phase` modulo PERIOD.

    >>> _next(7, 2), _next(8, 2)
    (8, 14)
    """
    return tick + 1 + (phase - tick - 1) % PERIOD


def repeated(starts: Sequence[Sequence[int]], num_microbatches: int) -> list[list[list[int]]]:
    """Return priority[rank][line][microbatch] of a building block, repeated every PERIOD ticks.

    starts[r]: the ticks of microbatch 0's F down, F up, I up, I down on rank r.
    """
    ticks = range(0, PERIOD * num_microbatches, PERIOD)
    return [[[start + tick for tick in ticks] for start in row] for row in starts]


def v_jobs(
    num_ranks: int, num_microbatches: int, costs: Costs, ledger: Ledger | None = None
) -> Jobs:
    """Return the tasks of a V schedule: on each rank line by line, weight gradients last."""
    ranks: list[tuple[Task, ...]] = []
    for r in range(num_ranks):
        stages = {"down": r, "up": 2 * num_ranks - 1 - r}
        lines: list[tuple[int, Kind]] = [(stages[way], kind) for kind, way in LINES]
        ranks.append(tuple(Task(s, k, m) for s, k in lines for m in range(num_microbatches)))
    return Jobs(
        Schedule("block", tuple(ranks), v_shape(num_ranks), num_microbatches), costs, ledger
    )


def squeeze(
    jobs: Jobs,
    priority: Sequence[Sequence[Sequence[int]]],
    cap: int,
    patience: float = 0.0,
    *,
    reorder: bool = True,
) -> Orders | None:
    """Return the orders of simulated ranks that run F and I by `priority[rank][line][microbatch]`.

    The task of the lowest number runs first. None if the pattern cannot run under the cap.

    Args:
        jobs: `v_jobs` at the costs of the run.
        cap: maximum memory of a rank, in the units of the jobs' ledger.
        patience: share of a weight gradient's time that a rank waits for its next task, instead of
            running the weight gradient.
        reorder: whether a rank may run a later task while its next one is not ready: before rank
            0's first backward and after the rank's last F down, as in the paper.
    """
    ranks = ChoosingRanks(jobs)
    patterns = [_Pattern(jobs, ranks, r, of_rank, cap) for r, of_rank in enumerate(priority)]
    first_backward_s = NEVER  # seconds, on rank 0

    def choose(r: int, now_s: float) -> Chosen:
        nonlocal first_backward_s
        warm = reorder and now_s <= first_backward_s
        tasks, at_s = patterns[r].choose(now_s, warm=warm, cool=reorder, patience=patience)
        if r == 0 and any(jobs.tasks[task].kind == "I" for task in tasks):
            first_backward_s = min(first_backward_s, now_s)
        return tasks, at_s

    return ranks.run(choose)


def squeezed(
    name: str,
    priority: Sequence[Sequence[Sequence[int]]],
    num_microbatches: int,
    cap: int,
    *,
    reorder: bool = True,
) -> Schedule:
    """Return the V schedule of a pattern, squeezed at the papers' costs (see `squeeze`).

    cap: maximum activations of a rank, in microbatches through a chunk.
    """
    jobs = v_jobs(len(priority), num_microbatches, Costs())
    orders = squeeze(jobs, priority, cap, reorder=reorder)
    assert orders is not None, f"{name}: tasks cannot run under a cap of {cap}"
    return jobs.as_schedule(orders, name)


class _Pattern:
    """The state of one rank in a squeeze: its next microbatch in each line, and its memory."""

    def __init__(
        self, jobs: Jobs, ranks: ChoosingRanks, r: int, priority: Sequence[Sequence[int]], cap: int
    ):
        self.jobs, self.ranks, self.priority, self.cap = jobs, ranks, priority, cap
        self.num_microbatches = number = jobs.schedule.num_microbatches
        self.lines = [jobs.first[r][i * number : (i + 1) * number] for i in range(len(LINES))]
        self.at = [0, 0, 0, 0]  # microbatches done, by line
        # (priority, line) of each line's next task
        self.heads = [(of_line[0], line) for line, of_line in enumerate(priority)]
        self.live = jobs.held[r]
        rise = [jobs.rise[line[0]] for line in self.lines]
        reserves = (jobs.reserve, jobs.reserve, 0, 0)
        # memory that must be free before a task of each line starts
        self.takes = [n + more for n, more in zip(rise, reserves, strict=False)]
        self.pending: deque[int] = deque()  # tasks W whose I has run, oldest first

    def choose(self, now_s: float, *, warm: bool, cool: bool, patience: float) -> Chosen:
        """Return the task to run now, or the time of the next try in seconds.

        The rank runs the line whose task is first by priority. warm: it may run any other line
        (rank 0 has run no backward yet). cool: it may run another line of I after its last F down.
        """
        # 1. the first line whose task is ready and fits; later lines only if warm or cool
        cool = cool and self.at[F_DOWN] == self.num_microbatches
        todo = sorted(self.heads) if cool or warm else [min(self.heads)] if self.heads else []
        later_s = NEVER
        for n, (_, line) in enumerate(todo):
            may_enter = line != F_DOWN or self._has_room()
            if n > 0 and not ((cool and line >= I_UP) or (warm and may_enter)):
                continue
            if self.live + self.takes[line] > self.cap:
                continue
            arrives_s = self.ranks.ready_s(self.lines[line][self.at[line]])
            if arrives_s <= now_s:
                return (self._run(line),), now_s
            later_s = min(later_s, arrives_s)
            if not (cool or warm):
                break
        # 2. a weight gradient, unless a line's task is ready soon
        if self.pending:
            weight_grad = self.pending[0]
            if later_s >= now_s + patience * self.jobs.seconds[weight_grad]:
                self.live += self.jobs.change[weight_grad]
                return (self.pending.popleft(),), now_s
        return (), later_s

    def _run(self, line: int) -> int:
        m = self.at[line]
        self.heads.remove((self.priority[line][m], line))
        self.at[line] += 1
        if self.at[line] < self.num_microbatches:
            self.heads.append((self.priority[line][self.at[line]], line))
        task = self.lines[line][m]
        self.live += self.jobs.change[task]
        if line in WEIGHT_GRADS:
            self.pending.append(self.lines[WEIGHT_GRADS[line]][m])
        return task

    def _has_room(self) -> bool:
        """Return whether a microbatch may enter early: every remaining F up must still fit."""
        coming_back = self.at[F_DOWN] - self.at[F_UP]
        up = self.jobs.change[self.lines[F_UP][0]]
        return self.live + coming_back * up + self.takes[F_DOWN] + up <= self.cap
