"""The fastest layouts of a model on so many devices: mesh, schedule, partition, microbatches and remat together.

Every combination is bounded from below by its work and its memory; in the order of these bounds layouts are priced by
simulation, until no bound is below the last of the best. Standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any

from ppctl.costs import Costs
from ppctl.errors import ConfigError, ScheduleError
from ppctl.partition import balanced
from ppctl.plan.analytic import Layout, Machine, ParamBytes, priced
from ppctl.plan.prices import Prices, StepTime, stage_costs, step_time
from ppctl.plan.roofline import ModelWork
from ppctl.plan.sizes import Microbatch, spmd_bytes, workspace_bytes
from ppctl.schedule.formulas import makespan_formula_s
from ppctl.schedule.ir import Schedule
from ppctl.schedule.registry import FAMILIES, ON_RING, build
from ppctl.schedule.ticks import Ticks, ticks

CHUNKS = {"interleaved": (2, 4, 8), "looped_bfs": (2, 4, 8), "interleaved_zb": (2, 4), "gis": (2, 4)}
MOST_TASKS = 3000  # of one simulation; longer schedules are extrapolated from two shorter ones
EXACT_TASKS = 150_000  # of the best ones, which are simulated as they are
SLACK = 0.97  # closed forms hold for equal stages; others may be shorter by this much
MOST_WAVES = 8  # microbatches, in units of pp, above which a bubble is no reason for more of them


@dataclass(frozen=True)
class Space:
    """What may be chosen."""

    num_devices: int
    num_layers: int
    batch_size: int
    row_bytes: int
    families: tuple[str, ...] = ON_RING
    remats: tuple[str, ...] = ("none", "layer", "full")
    max_chunks: int = 4
    meshes: tuple[tuple[int, int, int], ...] | None = None  # None: all of num_devices


@dataclass(frozen=True)
class Candidate:
    """A layout with its price."""

    mesh: tuple[int, int, int]  # dp, pp, fsdp
    family: str
    knobs: tuple[tuple[str, int], ...]
    num_microbatches: int
    remat: str
    partition: tuple[int, ...]  # layers of each stage
    time: StepTime
    memory: Mapping[str, int] = field(compare=False)  # bytes of the largest device, by part

    @property
    def total_bytes(self) -> int:
        return sum(self.memory.values())


@dataclass(frozen=True)
class Found:
    """The best layouts, fastest first, and what was looked at."""

    best: tuple[Candidate, ...]
    without_pipeline: Candidate | None  # the best one with pp=1
    num_layouts: int  # mesh x microbatches x remat
    num_too_large: int  # of these: no room for state and one microbatch
    num_priced: int  # schedules simulated
    smallest_bytes: int | None  # that any layout needs at least, where none fits


@dataclass(frozen=True)
class _Group:
    """A mesh with microbatches and a setting of remat: schedules and partitions are still open."""

    mesh: tuple[int, int, int]
    microbatch: Microbatch
    prices: Prices  # of a rank with an equal share
    bound_s: float


class Search:
    """One search; `limit_bytes` is the memory of a device (None: as much as it takes)."""

    def __init__(
        self,
        space: Space,
        work: ModelWork,
        params: ParamBytes,
        machine: Machine,
        limit_bytes: int | None,
        prices: Callable[[Prices, int, str], Prices] = lambda prices, rows, remat: prices,
    ):
        self.space, self.work, self.params, self.machine, self.limit_bytes = space, work, params, machine, limit_bytes
        self.corrected = prices
        self.num_layouts = self.num_too_large = self.num_priced = 0
        self.smallest: int | None = None

    def run(self, keep: int = 10) -> Found:
        """The best `keep` layouts."""
        groups = sorted(self._groups(), key=lambda group: group.bound_s)
        best: list[Candidate] = []
        alone: Candidate | None = None
        for group in groups:
            is_alone = group.mesh[1] == 1
            worst_s = best[keep - 1].time.total_s if len(best) >= keep else float("inf")
            if group.bound_s > worst_s and not (is_alone and (alone is None or group.bound_s < alone.time.total_s)):
                continue
            for candidate in self._schedules(group, worst_s):
                best.append(candidate)
                if is_alone and (alone is None or candidate.time.total_s < alone.time.total_s):
                    alone = candidate
            best = self._best_of(best, keep)
        best = self._best_of([self._exact(candidate) for candidate in best], keep)
        return Found(
            tuple(best), alone, self.num_layouts, self.num_too_large, self.num_priced, self.smallest if not best else None
        )

    @staticmethod
    def _best_of(found: list[Candidate], keep: int) -> list[Candidate]:
        return sorted(found, key=lambda c: (c.time.total_s, c.total_bytes, c.family))[:keep]

    # what is left open, and its bounds

    def _groups(self) -> Iterator[_Group]:
        for mesh, remat in product(self._meshes(), self.space.remats):
            dp, pp, fsdp = mesh
            share, left = divmod(self.space.batch_size, dp * fsdp)
            if left or pp > self.space.num_layers:
                continue
            for number in _divisors(share):
                if number > MOST_WAVES * pp and number > share // 2:
                    continue
                self.num_layouts += 1
                microbatch = Microbatch(share // number, number, self.space.row_bytes, remat)
                group = self._bounded(mesh, microbatch)
                if group is None:
                    self.num_too_large += 1
                else:
                    yield group

    def _meshes(self) -> Sequence[tuple[int, int, int]]:
        if self.space.meshes is not None:
            return self.space.meshes
        n = self.space.num_devices
        return [(dp, pp, n // (dp * pp)) for pp in _divisors(n) for dp in _divisors(n // pp)]

    def _bounded(self, mesh: tuple[int, int, int], microbatch: Microbatch) -> _Group | None:
        """The group with the least that any schedule of it takes; None where it has no room."""
        dp, pp, fsdp = mesh
        layers = -(-self.space.num_layers // pp)
        layout = Layout(dp, pp, fsdp, layers, 1)
        prices = self._prices(layout, microbatch)
        least = spmd_bytes(self.work, self.params, layout, microbatch, {"stash": layers, "value": int(pp > 1)})
        if not self._has_room(least):
            return None
        all_s = self.space.num_layers * prices.layer.all_s + prices.embed.all_s + prices.head.all_s
        work_s = microbatch.number * all_s / pp
        used = min(1.0, prices.capacity / (dp * pp * fsdp))  # of every device, where they share cores
        return _Group(mesh, microbatch, prices, work_s / used + (pp > 1) * 2 * (pp - 1) * prices.hop_s + prices.once_s)

    def _has_room(self, memory: Mapping[str, int]) -> bool:
        needed = sum(memory.values())
        if self.limit_bytes is None or needed <= self.limit_bytes:
            return True
        self.smallest = needed if self.smallest is None else min(needed, self.smallest)
        return False

    def _prices(self, layout: Layout, microbatch: Microbatch) -> Prices:
        rows, remat = microbatch.rows, microbatch.remat
        prices = priced(self.work, self.params, self.machine, layout, microbatch_rows=rows, remat=remat)
        return self.corrected(prices, rows, remat)

    # what a group leaves open

    def _schedules(self, group: _Group, worst_s: float) -> Iterator[Candidate]:
        """The schedules of a group that fit and may be faster than `worst_s`, priced."""
        open_ = sorted((self._expected_s(group, *each), each) for each in self._families(group))
        for expected_s, (family, knobs) in open_:
            if expected_s * SLACK > worst_s:
                break
            with_price = self._candidate(group, family, knobs, MOST_TASKS)
            if with_price is not None:
                yield with_price

    def _families(self, group: _Group) -> Iterator[tuple[str, tuple[tuple[str, int], ...]]]:
        pp, number = group.mesh[1], group.microbatch.number
        if pp == 1:
            yield ("1f1b", ()) if "1f1b" in self.space.families else (self.space.families[0], ())
            return
        for family in self.space.families:
            for chunks in CHUNKS.get(family, (1,)):
                if chunks > self.space.max_chunks or chunks * pp > self.space.num_layers:
                    continue
                if family == "gpipe" and number > 2 * pp and self.limit_bytes is None:
                    continue  # 1f1b does the same with less
                yield family, ((("num_chunks", chunks),) if family in CHUNKS else ())

    def _expected_s(self, group: _Group, family: str, knobs: tuple[tuple[str, int], ...]) -> float:
        """Seconds of a step by the closed form of a family, where stages are equal; the group's bound without one."""
        prices, pp = group.prices, group.mesh[1]
        all_s = [self.space.num_layers * s for s in (prices.layer.forward_s, prices.layer.input_grad_s, prices.layer.weight_grad_s)]
        ends = prices.embed.all_s + prices.head.all_s
        costs = Costs(*(s / pp + ends / (3 * pp) for s in all_s), transfer_s=prices.hop_s)
        if pp == 1 or prices.capacity < group.mesh[0] * pp * group.mesh[2]:
            return group.bound_s
        formula_s = makespan_formula_s(family, pp, group.microbatch.number, costs, **dict(knobs))
        return group.bound_s if formula_s is None else max(group.bound_s, formula_s + prices.once_s)

    def _candidate(
        self, group: _Group, family: str, knobs: tuple[tuple[str, int], ...], most_tasks: int
    ) -> Candidate | None:
        """A schedule with the partition that balances it, priced; None where it is none, or has no room."""
        pp, wanted = group.mesh[1], group.microbatch.number
        numbers = _shorter(pp, wanted, dict(knobs).get("num_chunks", 2), most_tasks)
        try:
            schedules = [_built(family, pp, number, knobs) for number in numbers]
        except (ScheduleError, ConfigError):
            return None
        layout, partition, costs, prices = self._divided(group, schedules[0])
        if layout is None:
            return None
        lowered = [self._lowered(group, schedule, costs) for schedule in schedules]
        self.num_priced += 1
        slots = [_slots(each) for each in lowered]
        memory = spmd_bytes(
            self.work, self.params, layout, group.microbatch, _along(numbers, slots, wanted)
        )
        memory["temporaries"] = workspace_bytes(self.work, self.params, layout, group.microbatch)
        if not self._has_room(memory):
            return None
        times = [
            step_time(prices, schedule, each, costs, layout.rows)
            for schedule, each in zip(schedules, lowered, strict=True)
        ]
        fields = _along(numbers, [vars(time) for time in times], wanted)
        bubble = 1 - fields["work_s"] / (fields["pipeline_s"] * pp * layout.rows)
        time = StepTime(fields["pipeline_s"], prices.once_s, fields["work_s"], bubble)
        return Candidate(group.mesh, family, knobs, wanted, group.microbatch.remat, partition, time, memory)

    def _divided(self, group: _Group, schedule: Schedule) -> Any:
        prices = group.prices
        one = prices.layer.all_s or 1.0
        try:
            partition = balanced(
                self.space.num_layers,
                schedule.rank_of,
                embed=prices.embed.all_s / one,
                head=prices.head.all_s / one,
            )
        except ConfigError:
            return None, (), None, None
        sizes = tuple(map(len, partition))
        largest = max(sizes)
        dp, pp, fsdp = group.mesh
        layout = Layout(dp, pp, fsdp, largest * schedule.num_chunks, largest)
        prices = self._prices(layout, group.microbatch)
        return layout, sizes, stage_costs(prices, sizes, keeps_input=group.microbatch.remat == "full"), prices

    def _lowered(self, group: _Group, schedule: Schedule, costs: Costs) -> Ticks:
        keeps_input = group.microbatch.remat == "full"
        return ticks(schedule, costs, keep_input=keeps_input, head_in_forward=not keeps_input)

    def _exact(self, candidate: Candidate) -> Candidate:
        """The candidate, simulated as it is where that takes no more than a few seconds."""
        dp, pp, fsdp = candidate.mesh
        rows = self.space.batch_size // (dp * fsdp * candidate.num_microbatches)
        microbatch = Microbatch(rows, candidate.num_microbatches, self.space.row_bytes, candidate.remat)
        group = self._bounded(candidate.mesh, microbatch)
        assert group is not None, "it fitted before"
        found = self._candidate(group, candidate.family, candidate.knobs, EXACT_TASKS)
        return candidate if found is None else found


@lru_cache(maxsize=None)
def _built(family: str, num_ranks: int, num_microbatches: int, knobs: tuple[tuple[str, int], ...]) -> Schedule:
    return build(family, num_ranks, num_microbatches, **dict(knobs))


def _shorter(num_ranks: int, wanted: int, num_chunks: int, most_tasks: int) -> list[int]:
    """Numbers of microbatches to simulate: the one wanted, or two smaller ones past the warm-up."""
    few, many = 2 * num_ranks, 3 * num_ranks
    if 3 * num_ranks * num_chunks * wanted <= most_tasks or wanted <= many:
        return [wanted]
    left = wanted % num_ranks
    return [few + left, many + left]


def _along(numbers: Sequence[int], values: Sequence[Mapping[str, float]], wanted: int) -> dict[str, Any]:
    """What every number would be with `wanted` microbatches, if it grows by equal steps."""
    if len(numbers) == 1:
        return dict(values[0])
    share = (wanted - numbers[0]) / (numbers[1] - numbers[0])
    first, last = values
    return {name: first[name] + share * (last[name] - first[name]) for name in first}


def _slots(lowered: Ticks) -> dict[str, int]:
    return lowered.num_slots


def _divisors(n: int) -> list[int]:
    """All divisors, ascending.

    >>> _divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
