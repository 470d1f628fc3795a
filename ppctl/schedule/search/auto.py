"""`schedule=auto`: the shortest schedule under a cap on memory, in activations or in bytes, at given costs.

Every family with its knobs, every V-shaped building block, and greedy runs of both under the cap; the best of these are
then climbed. The answer is never worse than the best published schedule that fits, and the same on every process.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product

from ppctl.errors import ConfigError, ScheduleError
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.blocks import Block, blocks, steady_excess
from ppctl.schedule.families.passes import merge_backward, split_backward
from ppctl.schedule.families.rank_of import v_shape
from ppctl.schedule.families.registry import FAMILIES, build
from ppctl.schedule.ir import Schedule
from ppctl.schedule.search.choice import GIB, NO_GAP, Choice, FoundSchedule
from ppctl.schedule.search.climb import climb, length_s
from ppctl.schedule.search.greedy import fill
from ppctl.schedule.search.ledger import CostsOf, Ledger, Placed
from ppctl.schedule.search.memory_bound import bound_under_cap_s
from ppctl.schedule.search.orders import Jobs, Orders
from ppctl.schedule.search.squeeze import squeeze_pattern
from ppctl.schedule.validate import validate

MOST_TASKS = 400_000  # of a schedule that is searched; above, the search takes minutes
# Budgets in tasks of all schedules together, not in seconds: the answer must not depend on the machine.
PROBED_TASKS = 1_000_000  # of building blocks squeezed with few microbatches: about 5 s
SQUEEZED_TASKS = 3_000_000  # of the best of them, squeezed in full: about 15 s
FILLED_TASKS = 3_000_000  # of one round of greedy runs: about 12 s
NUM_SQUEEZED, NUM_FILLED, NUM_CLIMBED = 32, 12, 6  # of the best so far: blocks squeezed in full, greedy runs, climbs
CLIMBED_TASKS = 2_000_000  # run by one climb, about 1 s
SQUEEZE_PATIENCE = (0.0, 0.35, 0.5, 0.75)
GREEDY_PATIENCE = (0.0, 0.5, 1.0)


def choose(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | CostsOf,
    cap: float | None = None,
    *,
    limit_bytes: float | None = None,
    max_chunks: int = 4,
    may_split: bool = True,
    by_period: bool = False,
    makespan_s: Callable[[Schedule], float] | None = None,
    rank_bytes: Callable[[Schedule], int] | None = None,
) -> Choice:
    """The shortest schedule found that holds at most `cap` activations, or limit_bytes, on every rank.

    costs: of all placements, or a function from the rank of each stage to them, so that stages may differ in every
    placement that is tried. cap: in units of one microbatch through 1/p of the model; None: p, what 1F1B holds.
    limit_bytes: of all that a rank holds (`Placed`), instead of it. max_chunks: stages a rank at most. may_split:
    whether backwards may be split into input and weight gradients. by_period: shorten the period, a step without a
    barrier before the optimizer. makespan_s: how long a schedule takes where ranks do not run freely (ScheduleError: it
    cannot run there); published schedules alone are compared. rank_bytes: what the fullest rank holds there.
    ScheduleError where nothing fits, or for schedules too large to search.

    >>> choice = choose(4, 8, Costs())
    >>> choice.best.length_s, choice.gap_fraction
    (24.75, 0.0)
    """
    assert cap is None or limit_bytes is None, "one cap"
    if 3 * num_ranks * num_microbatches > MOST_TASKS:
        raise ScheduleError(
            f"3*num_ranks*num_microbatches = 3*{num_ranks}*{num_microbatches} = {3 * num_ranks * num_microbatches:,} "
            f"tasks are more than the {MOST_TASKS:,} that auto searches. Choose one of `ppctl schedule list`."
        )
    if limit_bytes is None and cap is None:
        cap = num_ranks
    search = _Search(
        Placed(costs).anywhere if isinstance(costs, Costs) else costs,
        cap,
        limit_bytes,
        may_split,
        by_period,
        makespan_s,
        rank_bytes,
    )
    for label, schedule in published(num_ranks, num_microbatches, max_chunks):
        search.add_published(label, schedule)
    if not search.priorities:
        if isinstance(costs, Costs) or search.refusal is None:
            raise ScheduleError(
                f"the costs are those of each stage, of as many stages as no schedule of {num_ranks} ranks and up to "
                f"{max_chunks} chunks has. Give one for each of {num_ranks}, {2 * num_ranks}, ... stages, or numbers."
            )
        raise search.refusal  # of the first placement
    if makespan_s is None and search.may_fit and not search.is_proven:
        search.fill_all()
        if may_split and max_chunks >= 2 and num_ranks > 1:
            search.squeeze_blocks(num_ranks, num_microbatches)
        search.improve()
    return search.choice(num_ranks, num_microbatches)


def published(num_ranks: int, num_microbatches: int, max_chunks: int) -> Iterator[tuple[str, Schedule]]:
    """Yield (label, schedule) of every family with its knobs that serves these sizes, the simple ones first."""
    for family in sorted(FAMILIES.values(), key=lambda family: (bool(family.knobs), family.num_chunks > 1)):
        for knobs in family.searched_knobs(max_chunks):
            with suppress(ScheduleError):  # sizes that the family refuses
                schedule = build(family.name, num_ranks, num_microbatches, **knobs)
                if schedule.num_chunks <= max_chunks:
                    shown = ", ".join(f"{key}={value:g}" for key, value in knobs.items())
                    yield f"{family.name} ({shown})" if shown else family.name, schedule


@dataclass
class _Start:
    """Orders that a search goes on from; ties are broken by `number`."""

    length_s: float
    number: int
    label: str
    jobs: Jobs
    orders: Orders
    published: Schedule | None = None  # the family's own schedule, where the orders are its own


@dataclass
class _Search:
    costs_of: CostsOf
    cap: float | None
    limit_bytes: float | None
    may_split: bool
    by_period: bool
    makespan_s: Callable[[Schedule], float] | None = None
    rank_bytes: Callable[[Schedule], int] | None = None
    found: list[_Start] = field(default_factory=list[_Start])  # within the cap
    priorities: list[tuple[str, Jobs]] = field(
        default_factory=list[tuple[str, Jobs]]
    )  # what greedy runs start from, within it or not
    bounds_s: list[float] = field(default_factory=list[float])  # infinite without room for a microbatch
    smallest: tuple[float, str] = (math.inf, "")  # what the fullest rank holds of what holds least, and its label
    num_blocks: tuple[int, int] = (0, 0)
    refusal: ConfigError | None = None  # of the first placement that the model cannot have
    placed: dict[tuple[int, ...], Placed | None] = field(default_factory=dict[tuple[int, ...], Placed | None])

    @property
    def may_fit(self) -> bool:
        """Return whether any placement has room for a microbatch."""
        return min(self.bounds_s) < math.inf

    @property
    def is_proven(self) -> bool:
        """Return whether nothing can be shorter than what was found."""
        return bool(self.found) and min(s.length_s for s in self.found) <= min(self.bounds_s) * (1 + NO_GAP)

    def placement(self, rank_of: tuple[int, ...]) -> Placed | None:
        """The costs of a placement; None where the model cannot have it."""
        if rank_of not in self.placed:
            self.placed[rank_of] = None
            try:
                placed = self.costs_of(rank_of)
                placed.check(len(rank_of))
                self.placed[rank_of] = placed
            except ConfigError as error:
                self.refusal = self.refusal or error
        return self.placed[rank_of]

    def ledger(self, placed: Placed, schedule: Schedule) -> Ledger:
        """Return the memory that tasks hold, in the units of `limit`."""
        return Ledger.counted(schedule) if self.limit_bytes is None else placed.ledger(schedule)

    def limit(self, schedule: Schedule) -> int:
        """The cap: in chunks of the schedule, or in bytes."""
        if self.limit_bytes is not None:
            return int(self.limit_bytes)
        assert self.cap is not None, "one of the caps is there"
        return int(self.cap * schedule.num_chunks + 1e-9)

    def add_published(self, label: str, schedule: Schedule) -> None:
        """Add a published schedule if it fits, and what greedy runs need of it."""
        placed = self.placement(schedule.rank_of)
        if placed is None:
            return
        costs, ledger, limit = placed.costs, self.ledger(placed, schedule), self.limit(schedule)
        splits = any(task.kind == "I" for tasks in schedule.ranks for task in tasks)
        if splits and not self.may_split:
            label, schedule = f"{label}, whole backwards", merge_backward(schedule)
        free = Jobs(split_backward(schedule) if self.may_split else schedule, costs, ledger)
        self.priorities.append((label, free))
        self.bounds_s.append(bound_under_cap_s(free.schedule, costs, ledger, limit, by_period=self.by_period))
        try:
            holds = max(ledger.peaks(schedule)) if self.rank_bytes is None else self.rank_bytes(schedule)
        except ScheduleError:  # it cannot run in lockstep
            return
        unit = schedule.num_chunks if self.limit_bytes is None else 1
        self.smallest = min(self.smallest, (holds / unit, label))
        if holds <= limit:
            jobs = Jobs(schedule, costs, ledger)
            self._add(label, jobs, jobs.first, schedule if self.may_split or not splits else None)

    def fill_all(self) -> None:
        """Add greedy runs of the published schedules under the cap: of all, or of the shortest of large ones."""
        runs = [jobs.run(jobs.first) for _, jobs in self.priorities]
        took_s = [math.inf if run is None else run.makespan_s for run in runs]
        order = sorted(range(len(took_s)), key=took_s.__getitem__)
        for i in order[: self._affordable(FILLED_TASKS, 2 * len(GREEDY_PATIENCE))]:
            label, jobs = self.priorities[i]
            self._fill(label, jobs, jobs.first)

    def squeeze_blocks(self, num_ranks: int, num_microbatches: int) -> None:
        """Add V-shaped building blocks squeezed under the cap: those that do best with few microbatches."""
        placed = self.placement(v_shape(num_ranks))
        if placed is None:
            return
        empty = Schedule("block", ((),) * num_ranks, v_shape(num_ranks), num_microbatches)
        ledger = self.ledger(placed, empty)
        limit = 2 * self.cap if self.cap is not None else self.limit(empty)
        more = max(a + b for a, b in zip(ledger.stash, reversed(ledger.stash), strict=True))  # a microbatch
        excess = {block: steady_excess(block, ledger, limit) for block in blocks(num_ranks)}
        within = [block for block, above in excess.items() if above <= more]
        within.sort(key=lambda block: (abs(excess[block]), block))
        few = min(num_microbatches, 2 * num_ranks)
        within, num_all = within[: PROBED_TASKS // (6 * num_ranks * few)], len(within)
        self.num_blocks = (len(within), num_all)
        expected: list[tuple[float, int, Block]] = []
        for number, block in enumerate(within):
            jobs = self._squeezed(block, few, 0.5, placed)
            if jobs is not None:
                expected.append((_expected_s(jobs, num_microbatches), number, block))
        most = min(NUM_SQUEEZED, self._affordable(SQUEEZED_TASKS, len(SQUEEZE_PATIENCE)))
        for _, number, block in sorted(expected)[:most]:
            for patience in SQUEEZE_PATIENCE:
                jobs = self._squeezed(block, num_microbatches, patience, placed)
                if jobs is not None:
                    self._add(f"V block {number}", jobs, jobs.first)

    def improve(self) -> None:
        """Add greedy runs of the best so far, then climbs the best of all."""
        for start in self._best(min(NUM_FILLED, self._affordable(FILLED_TASKS, 2 * len(GREEDY_PATIENCE)))):
            self._fill(start.label, start.jobs, start.orders)
        for start in self._best(NUM_CLIMBED):
            cap = self.limit(start.jobs.schedule)
            found_s, orders = climb(start.jobs, start.orders, cap, CLIMBED_TASKS, by_period=self.by_period)
            if found_s < start.length_s:
                self._add(f"{start.label}, climbed", start.jobs, orders)

    def choice(self, num_ranks: int, num_microbatches: int) -> Choice:
        """The answer. ScheduleError where nothing fits."""
        if not self.found:
            raise self._too_little(num_ranks, num_microbatches)
        best = self._best(len(self.found))
        fits = [start for start in self.found if start.published is not None]
        if fits and not any(start.published is not None for start in best):
            best.append(min(fits, key=lambda start: start.length_s))
        candidates = tuple(self._candidate(start) for start in best)
        return Choice(
            candidates[0],
            candidates,
            self.cap,
            min(self.bounds_s),
            len(self.priorities),
            self.num_blocks,
            self.by_period,
            self.limit_bytes,
            self._held_bytes(best[0], candidates[0].schedule),
        )

    def _held_bytes(self, start: _Start, schedule: Schedule) -> int | None:
        if self.limit_bytes is None:
            return None
        if self.rank_bytes is not None:
            return self.rank_bytes(schedule)
        placed = self.placement(schedule.rank_of)
        assert placed is not None, "it was found there"
        return max(placed.ledger(schedule).peaks(schedule))

    def _too_little(self, num_ranks: int, num_microbatches: int) -> ScheduleError:
        """The error where nothing fits: what holds least, and how much that is."""
        (least, label), unit = self.smallest, ""
        asked, name = self.cap, "schedule.max_activations"
        if self.limit_bytes is not None:
            asked, name, unit = self.limit_bytes / GIB, "schedule.max_memory_gib", " GiB"
            least = math.ceil(least / GIB * 1000) / 1000  # so that it is enough
        return ScheduleError(
            f"{name}={asked:g}: no schedule of {num_ranks} ranks and {num_microbatches} microbatches was found that "
            f"holds so little ({label} holds least, {least:g}{unit}). Use {name}={least:g} or more."
        )

    def _candidate(self, start: _Start) -> FoundSchedule:
        schedule = start.published or validate(start.jobs.as_schedule(start.orders, f"auto: {start.label}"))
        return FoundSchedule(start.label, schedule, start.length_s, start.published is not None)

    def _best(self, count: int) -> list[_Start]:
        """The best `count`, one for each length (a family as it stands before one that was changed)."""
        best: list[_Start] = []
        for start in sorted(self.found, key=lambda s: (float(f"{s.length_s:.9g}"), s.published is None, s.number)):
            if not best or start.length_s > best[-1].length_s * (1 + NO_GAP):
                best.append(start)
        return best[:count]

    def _fill(self, label: str, jobs: Jobs, orders: Orders) -> None:
        label = label if label.endswith(", greedy") else f"{label}, greedy"
        for patience, last in product(GREEDY_PATIENCE, (False, True)):
            filled = fill(jobs, orders, self.limit(jobs.schedule), patience, weight_grads_last=last)
            if filled is not None:
                self._add(label, jobs, filled)

    def _affordable(self, budget: int, runs_each: int) -> int:
        """How many schedules of the usual size may be run that often within a budget, at least 2."""
        num_tasks = statistics.median(len(jobs.tasks) for _, jobs in self.priorities)
        return max(2, int(budget / (runs_each * num_tasks)))

    def _squeezed(self, block: Block, num_microbatches: int, patience: float, placed: Placed) -> Jobs | None:
        empty = Schedule("block", ((),) * len(block), v_shape(len(block)), num_microbatches)
        ledger = self.ledger(placed, empty)
        how = self.limit(empty), placed.costs, patience, ledger
        try:
            return Jobs(squeeze_pattern("block", block, num_microbatches, *how), placed.costs, ledger)
        except ScheduleError:  # the block cannot run under the cap
            return None

    def _add(self, label: str, jobs: Jobs, orders: Orders, published: Schedule | None = None) -> None:
        if self.makespan_s is None:
            run = jobs.run(orders)
            assert run is not None, f"{label}: orders that cannot run"
            found_s = length_s(run, orders, self.by_period)
        else:
            try:
                found_s = self.makespan_s(jobs.schedule)
            except ScheduleError:
                return
        self.found.append(_Start(found_s, len(self.found), label, jobs, orders, published))


def _expected_s(jobs: Jobs, num_microbatches: int) -> float:
    """The makespan with more microbatches, as far as the middle ones of these tell how long each takes."""
    run = jobs.run(jobs.first)
    assert run is not None, "a squeezed block runs"
    few = jobs.schedule.num_microbatches
    if few == num_microbatches:
        return run.makespan_s
    ends_s = [run.end_s[number] for number, task in enumerate(jobs.tasks) if task.stage == 0 and task.kind == "I"]
    each_s = (ends_s[3 * few // 4] - ends_s[few // 4]) / (3 * few // 4 - few // 4)
    return run.makespan_s + (num_microbatches - few) * each_s
