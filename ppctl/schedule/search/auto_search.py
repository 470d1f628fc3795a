"""`schedule=auto`: the shortest schedule under a cap on memory, at given costs.

Candidates are every family with its knobs, V-shaped building blocks, and greedy reorderings of both
under the cap (`reordering`). Hill climbing then shortens the best candidates. The result is
never worse than the best published schedule that fits. It is the same on every process and machine,
since the search stops after a number of tasks, not of seconds.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from operator import add

from ppctl.errors import ConfigError, ScheduleError
from ppctl.schedule.costs import Costs
from ppctl.schedule.execution_order import Jobs, Orders
from ppctl.schedule.families.building_blocks import blocks, repeated, squeeze, steady_excess, v_jobs
from ppctl.schedule.families.registry import FAMILIES, build
from ppctl.schedule.families.stage_placement import v_shape
from ppctl.schedule.ir import Schedule, split_backward
from ppctl.schedule.lower_bounds import bound_under_cap_s
from ppctl.schedule.placement_costs import CostsOf, Ledger, Placed
from ppctl.schedule.search.auto_choice import GIB, NO_GAP, Choice, FoundSchedule
from ppctl.schedule.search.reordering import climb, fill
from ppctl.schedule.validation import validate

MOST_TASKS = 400_000  # maximum tasks of a searched schedule: with more, the search takes minutes
SQUEEZED_TASKS = 3_000_000  # budget for squeezed blocks, in tasks: about 12 s
FILLED_TASKS = 3_000_000  # budget for one round of greedy runs, in tasks: about 12 s
NUM_FILLED, NUM_CLIMBED = 12, 6  # numbers of best schedules to rerun greedily, and to climb from
CLIMBED_TASKS = 2_000_000  # budget for one climb, in tasks: about 2 s
SQUEEZE_PATIENCE = (0.5, 0.75)  # values of `patience` to try, see `squeeze`
GREEDY_PATIENCE = (0.0, 0.5, 1.0)  # values of `patience` to try, see `fill`


def choose(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | CostsOf,
    cap: float | None = None,
    *,
    limit_bytes: float | None = None,
    max_chunks: int = 4,
    makespan_s: Callable[[Schedule], float] | None = None,
    rank_bytes: Callable[[Schedule], int] | None = None,
) -> Choice:
    """Return the shortest schedule found with at most `cap` activations, or limit_bytes, a rank.

    ScheduleError if nothing fits, or for schedules too large to search.

    Args:
        costs: costs for all placements, or a function from the rank of each stage to its costs.
        cap: maximum activations of a rank, in microbatches through 1/p of the model (p ranks);
            None: p, the peak of 1F1B.
        limit_bytes: cap on all memory of a rank (`Placed`), instead of `cap`.
        max_chunks: maximum number of stages on a rank.
        makespan_s: function from a schedule to its seconds on a lockstep executor; ScheduleError
            if the executor cannot run it. If set, only published schedules are compared.
        rank_bytes: function from a schedule to the bytes of that executor's fullest rank.

    >>> choice = choose(4, 8, Costs())
    >>> choice.best.length_s, choice.gap_fraction
    (24.75, 0.0)
    """
    # 1. the sizes and the cap
    assert cap is None or limit_bytes is None, "one cap"
    num_tasks = 3 * num_ranks * num_microbatches
    if num_tasks > MOST_TASKS:
        raise ScheduleError(
            f"3*num_ranks*num_microbatches = 3*{num_ranks}*{num_microbatches} = {num_tasks:,} "
            f"tasks are more than the {MOST_TASKS:,} that auto searches. Choose one of `ppctl "
            "schedule list`."
        )
    if limit_bytes is None and cap is None:
        cap = num_ranks
    costs_of = Placed(costs).anywhere if isinstance(costs, Costs) else costs
    search = _Search(costs_of, cap, limit_bytes, makespan_s, rank_bytes)
    # 2. the published schedules
    for label, schedule in published(num_ranks, num_microbatches, max_chunks):
        search.add_published(label, schedule)
    if not search.priorities:
        if isinstance(costs, Costs) or search.refusal is None:
            raise ScheduleError(
                f"no schedule of {num_ranks} ranks and up to {max_chunks} chunks has as many "
                "stages as the costs have entries. Give one for each of "
                f"{num_ranks}, {2 * num_ranks}, ... stages, or numbers."
            )
        raise search.refusal  # error of the first refused placement
    # 3. greedy runs of these, blocks, hill climbing, if a placement has room for a microbatch
    if makespan_s is None and min(search.bounds_s) < math.inf and not search.is_proven:
        search.fill_all()
        if max_chunks >= 2 and num_ranks > 1:
            search.squeeze_blocks(num_ranks, num_microbatches)
        search.improve()
    return search.choice(num_ranks, num_microbatches)


def published(
    num_ranks: int, num_microbatches: int, max_chunks: int
) -> Iterator[tuple[str, Schedule]]:
    """Yield (label, schedule) for every family and choice of knobs, simple families first."""
    for family in sorted(FAMILIES.values(), key=lambda one: (bool(one.knobs), one.num_chunks > 1)):
        for knobs in family.searched_knobs(max_chunks):
            with suppress(ScheduleError):  # sizes that the family refuses
                schedule = build(family.name, num_ranks, num_microbatches, **knobs)
                if schedule.num_chunks <= max_chunks:
                    shown = ", ".join(f"{key}={value:g}" for key, value in knobs.items())
                    yield f"{family.name} ({shown})" if shown else family.name, schedule


@dataclass
class _Start:
    """A schedule found so far, as orders to continue from. `number` breaks ties."""

    length_s: float
    number: int
    label: str
    jobs: Jobs
    orders: Orders
    published: Schedule | None = None  # the family's schedule, if the orders are unchanged


@dataclass
class _Search:
    costs_of: CostsOf
    cap: float | None
    limit_bytes: float | None
    makespan_s: Callable[[Schedule], float] | None
    rank_bytes: Callable[[Schedule], int] | None

    def __post_init__(self) -> None:
        self.found: list[_Start] = []  # schedules within the cap
        self.priorities: list[tuple[str, Jobs]] = []  # orders for greedy runs; may exceed the cap
        self.bounds_s: list[float] = []  # lower bounds in seconds; infinite: no microbatch fits
        # (memory of the fullest rank, label) of the schedule that needs the least memory
        self.smallest = math.inf, ""
        self.num_blocks = 0, 0
        self.refusal: ConfigError | None = None  # error of the first refused placement
        self.placed: dict[tuple[int, ...], Placed | None] = {}

    @property
    def is_proven(self) -> bool:
        """Return whether no schedule can be shorter than those found."""
        least_s = min((start.length_s for start in self.found), default=math.inf)
        return bool(self.found) and least_s <= min(self.bounds_s) * (1 + NO_GAP)

    def placement(self, rank_of: tuple[int, ...]) -> Placed | None:
        """Return the costs of a placement; None if they raise ConfigError (see `refusal`)."""
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
        """Return the memory of tasks, in the units of `limit`."""
        return Ledger.counted(schedule) if self.limit_bytes is None else placed.ledger(schedule)

    def limit(self, schedule: Schedule) -> int:
        """Return a rank's cap: in stashes (a microbatch through one chunk), or in bytes."""
        if self.limit_bytes is not None:
            return int(self.limit_bytes)
        assert self.cap is not None, "one of the caps is set"
        return int(self.cap * schedule.num_chunks + 1e-9)

    def holds(self, schedule: Schedule) -> int:
        """Return the peak memory of the fullest rank, in the units of `limit`."""
        if self.rank_bytes is not None:
            return self.rank_bytes(schedule)
        placed = self.placement(schedule.rank_of)
        assert placed is not None, "a schedule that was found has a placement"
        return max(self.ledger(placed, schedule).peaks(schedule))

    def add_published(self, label: str, schedule: Schedule) -> None:
        """Add a published schedule if it fits; add its order as priorities for greedy runs."""
        placed = self.placement(schedule.rank_of)
        if placed is None:
            return
        # 1. the bound of its tasks, and its order as priorities
        costs, limit, split = placed.costs, self.limit(schedule), split_backward(schedule)
        free = Jobs(split, costs, self.ledger(placed, split))
        self.priorities.append((label, free))
        self.bounds_s.append(bound_under_cap_s(split, costs, free.ledger, limit))
        # 2. the schedule itself, if it fits
        try:
            holds = self.holds(schedule)
        except ScheduleError:  # the executor cannot run it
            return
        unit = schedule.num_chunks if self.limit_bytes is None else 1
        self.smallest = min(self.smallest, (holds / unit, label))
        if holds <= limit:
            jobs = Jobs(schedule, costs, self.ledger(placed, schedule))
            self._add(label, jobs, jobs.first, schedule)

    def fill_all(self) -> None:
        """Add greedy runs of the published schedules, shortest first, within the budget."""
        runs = [jobs.run(jobs.first) for _, jobs in self.priorities]
        took_s = [math.inf if run is None else run.makespan_s for run in runs]
        order = sorted(range(len(took_s)), key=took_s.__getitem__)
        for i in order[: self._num_affordable]:
            label, jobs = self.priorities[i]
            self._fill(label, jobs, jobs.first)

    def squeeze_blocks(self, num_ranks: int, num_microbatches: int) -> None:
        """Add V-shaped building blocks, squeezed under the cap; those nearest to the cap first."""
        placed = self.placement(v_shape(num_ranks))
        if placed is None:
            return
        # 1. the blocks at most one microbatch above the cap, nearest to the cap first
        empty = Schedule("block", ((),) * num_ranks, v_shape(num_ranks), num_microbatches)
        ledger = self.ledger(placed, empty)
        limit = self.limit(empty)
        more = max(map(add, ledger.stash, reversed(ledger.stash)))
        excess = {block: steady_excess(block, ledger, limit) for block in blocks(num_ranks)}
        within = [block for block, above in excess.items() if above <= more]
        within.sort(key=lambda block: (abs(excess[block]), block))
        # 2. squeeze as many of them as the budget allows
        jobs = v_jobs(num_ranks, num_microbatches, placed.costs, ledger)
        tried = within[: max(2, SQUEEZED_TASKS // (len(SQUEEZE_PATIENCE) * len(jobs.tasks)))]
        self.num_blocks = (len(tried), len(within))
        for (number, block), patience in product(enumerate(tried), SQUEEZE_PATIENCE):
            orders = squeeze(jobs, repeated(block, num_microbatches), limit, patience)
            if orders is not None:
                self._add(f"V block {number}", jobs, orders)

    def improve(self) -> None:
        """Add greedy runs of the best schedules so far, then hill climbs from the best of all."""
        for start in self._best(min(NUM_FILLED, self._num_affordable)):
            self._fill(start.label, start.jobs, start.orders)
        for start in self._best(NUM_CLIMBED):
            limit = self.limit(start.jobs.schedule)
            found_s, orders = climb(start.jobs, start.orders, limit, CLIMBED_TASKS)
            if found_s < start.length_s:
                self._add(f"{start.label}, climbed", start.jobs, orders)

    def choice(self, num_ranks: int, num_microbatches: int) -> Choice:
        """Return the result. ScheduleError if nothing fits."""
        if not self.found:
            raise self._too_little(num_ranks, num_microbatches)
        best = self._best(len(self.found))
        fits = [start for start in self.found if start.published is not None]
        if fits and not any(start.published is not None for start in best):
            best.append(min(fits, key=lambda start: start.length_s))
        candidates = tuple(self._candidate(start) for start in best)
        tried = min(self.bounds_s), len(self.priorities), self.num_blocks
        held = None if self.limit_bytes is None else self.holds(candidates[0].schedule)
        return Choice(candidates[0], candidates, self.cap, *tried, self.limit_bytes, held)

    def _too_little(self, num_ranks: int, num_microbatches: int) -> ScheduleError:
        """Return the error if no schedule fits the cap; it names the schedule of least memory."""
        (least, label), unit = self.smallest, ""
        asked, name = self.cap, "schedule.max_activations"
        if self.limit_bytes is not None:
            asked, name, unit = self.limit_bytes / GIB, "schedule.max_memory_gib", " GiB"
            least = math.ceil(least / GIB * 1000) / 1000  # rounded up, so that it fits
        what = f"no schedule of {num_ranks} ranks and {num_microbatches} microbatches fits"
        return ScheduleError(
            f"{name}={asked:g}: {what} ({label} holds least, {least:g}{unit}). "
            f"Use {name}={least:g} or more."
        )

    def _candidate(self, start: _Start) -> FoundSchedule:
        schedule, is_published = start.published, start.published is not None
        if schedule is None:
            schedule = validate(start.jobs.as_schedule(start.orders, f"auto: {start.label}"))
        return FoundSchedule(start.label, schedule, start.length_s, is_published)

    def _best(self, count: int) -> list[_Start]:
        """Return the `count` shortest schedules, one for each length; published ones win ties."""

        def rank(start: _Start) -> tuple[float, bool, int]:
            return float(f"{start.length_s:.9g}"), start.published is None, start.number

        best: list[_Start] = []
        for start in sorted(self.found, key=rank):
            if not best or start.length_s > best[-1].length_s * (1 + NO_GAP):
                best.append(start)
        return best[:count]

    def _fill(self, label: str, jobs: Jobs, orders: Orders) -> None:
        label = label if label.endswith(", greedy") else f"{label}, greedy"
        for patience, last in product(GREEDY_PATIENCE, (False, True)):
            filled = fill(jobs, orders, self.limit(jobs.schedule), patience, weight_grads_last=last)
            if filled is not None:
                self._add(label, jobs, filled)

    @property
    def _num_affordable(self) -> int:
        """Return the number of schedules, 2 or more of median size, whose reruns fit the budget."""
        num_tasks = statistics.median(len(jobs.tasks) for _, jobs in self.priorities)
        return max(2, int(FILLED_TASKS / (2 * len(GREEDY_PATIENCE) * num_tasks)))

    def _add(
        self, label: str, jobs: Jobs, orders: Orders, published: Schedule | None = None
    ) -> None:
        if self.makespan_s is None:
            run = jobs.run(orders)
            assert run is not None, f"{label}: orders that cannot run"
            found_s = run.makespan_s
        else:
            try:
                found_s = self.makespan_s(jobs.schedule)
            except ScheduleError:
                return
        self.found.append(_Start(found_s, len(self.found), label, jobs, orders, published))
