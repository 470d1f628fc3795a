"""`schedule=auto`: the shortest schedule under a cap on activations, at given costs.

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
from ppctl.schedule.activations import peak_activations
from ppctl.schedule.bounds import makespan_bound_s, period_bound_s
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.blocks import Block, blocks, steady_peak
from ppctl.schedule.families.passes import merge_backward, split_backward
from ppctl.schedule.families.registry import FAMILIES, build
from ppctl.schedule.ir import Schedule
from ppctl.schedule.search.climb import climb, length_s
from ppctl.schedule.search.greedy import fill
from ppctl.schedule.search.orders import Jobs, Orders
from ppctl.schedule.search.squeeze import squeeze_pattern
from ppctl.schedule.validate import validate

MOST_TASKS = 400_000  # of a schedule that is searched; above, the search takes minutes
# Budgets in tasks of all schedules together, not in seconds: the answer must not depend on the machine.
PROBED_TASKS = 1_000_000  # of building blocks squeezed with few microbatches: about 5 s
SQUEEZED_TASKS = 3_000_000  # of the best of them, squeezed in full: about 15 s
FILLED_TASKS = 3_000_000  # of one round of greedy runs: about 12 s
NUM_SQUEEZED, NUM_FILLED, NUM_CLIMBED = 32, 12, 6  # of the best so far: blocks squeezed in full, greedy runs, climbs
CLIMBED_TASKS = 4_000_000  # simulated by one climb, about 1 s
SQUEEZE_PATIENCE = (0.0, 0.35, 0.5, 0.75)
GREEDY_PATIENCE = (0.0, 0.5, 1.0)
NO_GAP = 1e-9


@dataclass(frozen=True)
class FoundSchedule:
    """A schedule under the cap. `label` says which: a family with its knobs, and what was done to it."""

    label: str
    schedule: Schedule
    length_s: float  # makespan, or period where that is what counts
    is_published: bool  # a family as it stands


@dataclass(frozen=True)
class Choice:
    """The answer: `best` of `candidates` (ascending, one for each length), none of them above `cap` activations.

    lower_bound_s: no order of these tasks on any placement that was tried is shorter, whatever it holds. by_period: the
    period counts, not the makespan.
    """

    best: FoundSchedule
    candidates: tuple[FoundSchedule, ...]
    cap: float
    lower_bound_s: float
    num_published: int  # families compared, each knob counted
    num_blocks: tuple[int, int]  # building blocks squeezed, and how many there are within the cap
    by_period: bool

    @property
    def gap_fraction(self) -> float:
        """The share of the best's length that lies above the lower bound, 0..1."""
        return 1 - self.lower_bound_s / self.best.length_s

    @property
    def is_proven(self) -> bool:
        """Return whether nothing on these placements can be shorter."""
        return self.gap_fraction <= NO_GAP

    @property
    def best_published(self) -> FoundSchedule | None:
        """The best family as it stands, or None where none fits."""
        return next((candidate for candidate in self.candidates if candidate.is_published), None)


def choose(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs,
    cap: float | None = None,
    *,
    max_chunks: int = 4,
    may_split: bool = True,
    by_period: bool = False,
    makespan_s: Callable[[Schedule], float] | None = None,
) -> Choice:
    """The shortest schedule found that holds at most `cap` activations on every rank.

    cap: in units of one microbatch through 1/p of the model; None: p, what 1F1B holds. max_chunks: stages a rank at
    most. may_split: whether backwards may be split into input and weight gradients. by_period: shorten the period, a
    step without a barrier before the optimizer. makespan_s: how long a schedule takes where ranks do not run freely
    (ScheduleError: it cannot run there); published schedules alone are compared.
    ScheduleError where nothing fits, or for schedules too large to search.

    >>> choice = choose(4, 8, Costs())
    >>> choice.best.length_s, choice.gap_fraction
    (24.75, 0.0)
    """
    cap = num_ranks if cap is None else cap
    if 3 * num_ranks * num_microbatches > MOST_TASKS:
        raise ScheduleError(
            f"3*num_ranks*num_microbatches = 3*{num_ranks}*{num_microbatches} = {3 * num_ranks * num_microbatches:,} "
            f"tasks are more than the {MOST_TASKS:,} that auto searches. Choose one of `ppctl schedule list`."
        )
    search = _Search(costs, cap, may_split, by_period, makespan_s)
    for label, schedule in published(num_ranks, num_microbatches, max_chunks):
        search.add_published(label, schedule)
    if not search.priorities:
        raise ScheduleError(
            f"the costs are those of each stage, of as many stages as no schedule of {num_ranks} ranks and up to "
            f"{max_chunks} chunks has. Give one for each of {num_ranks}, {2 * num_ranks}, ... stages, or numbers."
        )
    if makespan_s is None and not search.is_proven:
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
    costs: Costs
    cap: float
    may_split: bool
    by_period: bool
    makespan_s: Callable[[Schedule], float] | None = None
    found: list[_Start] = field(default_factory=list[_Start])  # within the cap
    priorities: list[tuple[str, Jobs]] = field(
        default_factory=list[tuple[str, Jobs]]
    )  # what greedy runs start from, within it or not
    bounds_s: list[float] = field(default_factory=list[float])
    smallest: tuple[float, str] = (math.inf, "")  # peak of what holds least, and its label
    num_blocks: tuple[int, int] = (0, 0)

    @property
    def is_proven(self) -> bool:
        """Return whether nothing can be shorter than what was found."""
        return bool(self.found) and min(s.length_s for s in self.found) <= min(self.bounds_s) * (1 + NO_GAP)

    def add_published(self, label: str, schedule: Schedule) -> None:
        """Add a published schedule if it fits, and what greedy runs need of it."""
        try:
            self.costs.check(schedule.num_stages)
        except ConfigError:  # costs of each stage of another number of stages
            return
        splits = any(task.kind == "I" for tasks in schedule.ranks for task in tasks)
        if splits and not self.may_split:
            label, schedule = f"{label}, whole backwards", merge_backward(schedule)
        free = Jobs(split_backward(schedule) if self.may_split else schedule, self.costs)
        self.priorities.append((label, free))
        bound_s = period_bound_s if self.by_period else makespan_bound_s
        self.bounds_s.append(bound_s(free.schedule, self.costs))
        self.smallest = min(self.smallest, (max(peak_activations(schedule)), label))
        jobs = Jobs(schedule, self.costs)
        if all(jobs.fits(order, self._chunks(jobs)) for order in jobs.first):
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
        try:
            self.costs.check(2 * num_ranks)
        except ConfigError:  # costs of each stage of another number of stages
            return
        within = [block for block in blocks(num_ranks) if steady_peak(block) <= self.cap + 1]
        within.sort(key=lambda block: (abs(steady_peak(block) - self.cap), block))
        few = min(num_microbatches, 2 * num_ranks)
        within, num_all = within[: PROBED_TASKS // (6 * num_ranks * few)], len(within)
        self.num_blocks = (len(within), num_all)
        expected: list[tuple[float, int, Block]] = []
        for number, block in enumerate(within):
            jobs = self._squeezed(block, few, 0.5)
            if jobs is not None:
                expected.append((_expected_s(jobs, num_microbatches), number, block))
        most = min(NUM_SQUEEZED, self._affordable(SQUEEZED_TASKS, len(SQUEEZE_PATIENCE)))
        for _, number, block in sorted(expected)[:most]:
            for patience in SQUEEZE_PATIENCE:
                jobs = self._squeezed(block, num_microbatches, patience)
                if jobs is not None:
                    self._add(f"V block {number}", jobs, jobs.first)

    def improve(self) -> None:
        """Add greedy runs of the best so far, then climbs the best of all."""
        for start in self._best(min(NUM_FILLED, self._affordable(FILLED_TASKS, 2 * len(GREEDY_PATIENCE)))):
            self._fill(start.label, start.jobs, start.orders)
        for start in self._best(NUM_CLIMBED):
            cap = self._chunks(start.jobs)
            found_s, orders = climb(start.jobs, start.orders, cap, CLIMBED_TASKS, by_period=self.by_period)
            if found_s < start.length_s:
                self._add(f"{start.label}, climbed", start.jobs, orders)

    def choice(self, num_ranks: int, num_microbatches: int) -> Choice:
        """The answer. ScheduleError where nothing fits."""
        if not self.found:
            peak, label = self.smallest
            raise ScheduleError(
                f"schedule.max_activations={self.cap:g}: no schedule of {num_ranks} ranks and {num_microbatches} "
                f"microbatches was found that holds so little ({label} holds least, {peak:g}). "
                f"Use schedule.max_activations={peak:g} or more."
            )
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
            filled = fill(jobs, orders, self._chunks(jobs), patience, weight_grads_last=last)
            if filled is not None:
                self._add(label, jobs, filled)

    def _affordable(self, budget: int, runs_each: int) -> int:
        """How many schedules of the usual size may be run that often within a budget, at least 2."""
        num_tasks = statistics.median(len(jobs.tasks) for _, jobs in self.priorities)
        return max(2, int(budget / (runs_each * num_tasks)))

    def _squeezed(self, block: Block, num_microbatches: int, patience: float) -> Jobs | None:
        try:
            return Jobs(
                squeeze_pattern("block", block, num_microbatches, int(2 * self.cap + 1e-9), self.costs, patience),
                self.costs,
            )
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

    def _chunks(self, jobs: Jobs) -> int:
        """The cap in chunks of the schedule."""
        return int(self.cap * jobs.schedule.num_chunks + 1e-9)


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
