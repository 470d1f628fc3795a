"""The fastest layouts of a model on so many devices: mesh, schedule, partition, microbatches and remat together.

Every combination is bounded from below by its work and its memory. In the order of these bounds layouts are priced by
simulation, until no bound is below the last of the best. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from typing import Any

from ppctl.costs import Costs, task_costs
from ppctl.errors import ConfigError, ScheduleError
from ppctl.partition import balanced
from ppctl.plan.analytic import Layout, Machine, ParamBytes
from ppctl.plan.prices import StepTime, rows_s, stage_costs, ticking_s
from ppctl.plan.roofline import ModelWork
from ppctl.plan.sizes import held_bytes, workspace_bytes
from ppctl.plan.space import CHUNKED, WHOLE, Bounds, Space
from ppctl.schedule.bounds import makespan_bound_s
from ppctl.schedule.formulas import makespan_formula_s, peak_formula
from ppctl.schedule.ir import Schedule
from ppctl.schedule.lockstep import Counted, Shape, counted
from ppctl.schedule.memory import peak_activations
from ppctl.schedule.registry import build
from ppctl.schedule.ticks import in_shape, keeping, packed

MOST_TASKS = 8_000  # of one simulation; longer schedules are extrapolated from two shorter ones
FEW_RANKS = 16  # up to here two rounds of microbatches tell what one more takes, above one
SAME = 1e-9  # relative


@dataclass(frozen=True)
class Candidate:
    """A layout with its price."""

    mesh: tuple[int, int, int]  # dp, pp, fsdp
    family: str
    num_chunks: int
    num_microbatches: int
    remat: str
    partition: tuple[int, ...]  # layers of each stage
    time: StepTime
    redone_fraction: float  # of the tasks' work: what backwards recompute
    memory: Mapping[str, int] = field(compare=False)  # bytes by part, of the device that holds most

    @property
    def total_bytes(self) -> int:
        return sum(self.memory.values())

    def is_like(self, other: Candidate) -> bool:
        """Whether another family of schedules is as good, and has been found before."""
        are_equal = (self.mesh, self.num_microbatches, self.remat) == (other.mesh, other.num_microbatches, other.remat)
        is_no_faster = self.time.total_s >= other.time.total_s * (1 - SAME)
        return are_equal and is_no_faster and self.total_bytes >= other.total_bytes


@dataclass(frozen=True)
class Found:
    """The best layouts, fastest first, and what was looked at."""

    best: tuple[Candidate, ...]
    without_pipeline: Candidate | None  # the best one with pp=1
    num_layouts: int  # mesh x microbatches x remat x schedule
    num_too_large: int  # of these: no room for state and one microbatch
    num_priced: int  # simulated
    smallest_bytes: int | None  # the least that any layout needs, where none fits


class Search:
    """One search; `limit_bytes` is the memory of a device (None: as much as it takes)."""

    def __init__(
        self, space: Space, work: ModelWork, params: ParamBytes, machine: Machine, limit_bytes: int | None = None
    ):
        self.space, self.work, self.params, self.machine = space, work, params, machine
        self.limit_bytes = inf if limit_bytes is None else limit_bytes
        self.num_priced = 0

    def run(self, keep: int = 10) -> Found:
        """The best `keep` layouts."""
        opened, too_large = [], 0
        for number, (bounds, family, chunks) in enumerate(self._layouts()):
            if self._has_room(bounds.memory):
                bound_s = bounds.step_s(is_whole=family in WHOLE)
                opened.append((self._expected_s(bounds, family, chunks), number, bound_s, bounds, family, chunks))
            else:
                too_large += 1
        best: list[Candidate] = []
        alone: Candidate | None = None
        for _, _, bound_s, bounds, family, chunks in sorted(opened, key=lambda each: each[:2]):
            last_s = best[-1].time.total_s if len(best) == keep else inf
            is_alone = bounds.mesh[1] == 1 and (alone is None or bound_s < alone.time.total_s)
            if bound_s > last_s and not is_alone:
                continue
            candidate = self._candidate(bounds, family, chunks, inf if is_alone else last_s)
            if candidate is None or any(candidate.is_like(other) for other in best):
                continue
            best = sorted([*best, candidate], key=lambda c: (c.time.total_s, c.total_bytes))[:keep]
            if is_alone and (alone is None or candidate.time.total_s < alone.time.total_s):
                alone = candidate
        smallest = None if best else Search(self.space, self.work, self.params, self.machine)._smallest()
        return Found(tuple(best), alone, len(opened) + too_large, too_large, self.num_priced, smallest)

    def _expected_s(self, bounds: Bounds, family: str, chunks: int) -> float:
        """About what a layout takes, by the closed form for equal stages; once good ones are priced, few others are."""
        prices, pp, number = bounds.prices, bounds.mesh[1], bounds.microbatch.number
        layers, ends_s = self.space.num_layers / pp, (prices.embed.all_s + prices.head.all_s) / pp
        kinds = (prices.layer.forward_s, prices.layer.input_grad_s, prices.layer.weight_grad_s)
        costs = Costs(*(layers * each_s + ends_s / 3 for each_s in kinds), transfer_s=prices.hop_s)
        formula_s = makespan_formula_s(family, pp, number, costs, **_knobs(family, chunks))
        if formula_s is None:  # at these costs
            formula_s = makespan_formula_s(family, pp, number, replace(costs, transfer_s=0.0), **_knobs(family, chunks))
        whole_s = makespan_formula_s("1f1b", pp, number, replace(costs, transfer_s=0.0))
        return prices.once_s + (formula_s or whole_s or number * costs.seconds("F", 0, 1) * 3)

    def _layouts(self) -> Iterator[tuple[Bounds, str, int]]:
        """All: with the mesh and its microbatches, (family, chunks)."""
        for mesh, microbatch in self.space.microbatches:
            bounds = Bounds(self.space, self.work, self.params, self.machine, mesh, microbatch)
            yield from ((bounds, *kind) for kind in self.space.kinds(mesh[1]))

    def _smallest(self) -> int | None:
        """The bytes of the layout that needs the fewest, None where no layout is one."""
        layouts = [(sum(each[0].memory.values()), number, each) for number, each in enumerate(self._layouts())]
        smallest = inf
        for least, _, (bounds, family, chunks) in sorted(layouts, key=lambda each: each[:2]):
            if least >= smallest:
                break
            candidate = self._candidate(bounds, family, chunks, inf)
            smallest = min(smallest, inf if candidate is None else candidate.total_bytes)
        return None if smallest == inf else int(smallest)

    def _has_room(self, memory: Mapping[str, int]) -> bool:
        return sum(memory.values()) <= self.limit_bytes

    def _candidate(self, bounds: Bounds, family: str, chunks: int, last_s: float) -> Candidate | None:
        """A schedule with the partition that balances it, priced; None where it is none, or none of the best.

        Cheapest question first: what its order holds, how long it takes, and what its slots hold.
        """
        (dp, pp, fsdp), microbatch, is_spmd = bounds.mesh, bounds.microbatch, self.space.executor == "spmd"
        peak = peak_formula(family, pp, microbatch.number, **_knobs(family, chunks))
        share = self._least_share(family, microbatch.remat)
        if peak is not None and not self._has_room(bounds.with_stashes(peak * share)):
            return None
        keys = [(family, pp, number, chunks) for number in shorter(pp, microbatch.number, chunks)]
        numbers = [number for _, _, number, _ in keys]
        try:
            schedules = [_built(*key) for key in keys]
            sizes = self._balanced(bounds, schedules[0].rank_of)
        except (ScheduleError, ConfigError):
            return None
        largest = max(sizes)
        most = largest * chunks if is_spmd else max(_sums(sizes, schedules[0].rank_of))
        layout = Layout(dp, pp, fsdp, most, largest)

        def memory(slots: Sequence[Mapping[str, float]]) -> dict[str, int]:
            found = held_bytes(self.work, self.params, layout, microbatch, along(numbers, slots, microbatch.number))
            return found | {"temporaries": workspace_bytes(self.work, self.params, layout, microbatch)}

        stashes = [_stashes(*key) for key in keys]
        if not self._has_room(memory([{"stash": share * number} for number in stashes])):
            return None
        prices = bounds.priced(layout)
        costs = stage_costs(prices, sizes, keeps_input=microbatch.remat == "full", split=family not in WHOLE)
        least = along(numbers, [{"s": makespan_bound_s(each, costs)} for each in schedules], microbatch.number)["s"]
        if least + prices.once_s > last_s:
            return None  # whatever the order of its tasks
        self.num_priced += 1
        times = []
        for key, schedule in zip(keys, schedules, strict=True):
            rows = rows_s(_packed(*key, _priced_as(microbatch.remat))[2], costs, chunks) if is_spmd else None
            times.append(vars(ticking_s(prices, schedule, rows, costs, layout.rows)))
        time = StepTime(**along(numbers, times, microbatch.number))
        again = {"none": 0, "layer": sum(sizes), "full": sum(sizes[:-1])}[microbatch.remat]  # layers
        redone = again * prices.layer.forward_s * microbatch.number * layout.rows / time.tasks_s
        if time.total_s > last_s:
            return None
        if is_spmd:
            held = memory([_slots(*key, microbatch.remat) for key in keys])
        else:
            held = memory([{"stash": number, "value": 2} for number in stashes])
        if not self._has_room(held):
            return None
        return Candidate(bounds.mesh, family, chunks, microbatch.number, microbatch.remat, sizes, time, redone, held)

    def _least_share(self, family: str, remat: str) -> float:
        """Of a stash, what stays until W at least: with executor=spmd only what I hands on."""
        stash = self.work.stash_bytes[remat]
        if self.space.executor != "spmd" or family in WHOLE or not stash:
            return 1.0
        return min(1.0, self.work.pending_bytes[remat] / stash)

    def _balanced(self, bounds: Bounds, rank_of: Sequence[int]) -> tuple[int, ...]:
        """The layers of each stage, with embedding and head counted in layers."""
        embed, head = (piece.all_s / bounds.prices.layer.all_s for piece in (bounds.prices.embed, bounds.prices.head))
        return _partition(self.space.num_layers, tuple(rank_of), round(embed, 3), round(head, 3))


# what is the same for many layouts is made once


def _knobs(family: str, chunks: int) -> dict[str, int]:
    return {"num_chunks": chunks} if family in CHUNKED else {}


@cache
def _built(family: str, num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    return build(family, num_ranks, num_microbatches, **_knobs(family, chunks))


@cache
def _packed(family: str, pp: int, number: int, chunks: int, remat: str) -> tuple[Shape, Any, Counted]:
    """The ticks that the executor lowers to: their shape, their cells, and the rows of these that differ."""
    shape, cells = packed(_built(family, pp, number, chunks), task_costs(remat))
    return shape, cells, counted(cells)


@cache
def _slots(family: str, pp: int, number: int, chunks: int, remat: str) -> Mapping[str, int]:
    """Slots of the rank with most."""
    shape, cells, _ = _packed(family, pp, number, chunks, _priced_as(remat))
    return in_shape(_built(family, pp, number, chunks), shape, cells, **keeping(remat)).num_slots


def _priced_as(remat: str) -> str:
    """The one of the settings with the same `task_costs` that stands for them."""
    return "none" if remat == "none" else "full"


@cache
def _stashes(family: str, pp: int, number: int, chunks: int) -> float:
    """How many the rank with most holds at once by the order of its tasks."""
    return max(peak_activations(_built(family, pp, number, chunks))) * chunks


@cache
def _partition(num_layers: int, rank_of: tuple[int, ...], embed: float, head: float) -> tuple[int, ...]:
    return tuple(map(len, balanced(num_layers, rank_of, embed=embed, head=head)))


def _sums(sizes: Sequence[int], rank_of: Sequence[int]) -> list[int]:
    """The layers of each rank."""
    return [sum(n for n, r in zip(sizes, rank_of, strict=True) if r == rank) for rank in range(max(rank_of) + 1)]


def shorter(num_ranks: int, wanted: int, num_chunks: int) -> list[int]:
    """Numbers of microbatches to simulate: the one wanted, or two smaller ones past the warm-up of every family.

    That is after 3p of them. By 1% and less what follows grows by equal steps; after 2p, by up to 14%.

    >>> shorter(8, 64, 1), shorter(8, 4096, 1)
    ([64], [24, 40])
    """
    few = 3 * num_ranks + wanted % num_ranks
    many = few + (2 if num_ranks <= FEW_RANKS else 1) * num_ranks
    is_short = 3 * num_ranks * num_chunks * wanted <= MOST_TASKS or wanted <= many
    return [wanted] if is_short else [few, many]


def along(numbers: Sequence[int], values: Sequence[Mapping[str, float]], wanted: int) -> dict[str, Any]:
    """What the values would be with `wanted` microbatches, if they grow by equal steps.

    >>> along([2, 4], [{"a": 1.0}, {"a": 2.0}], 8)
    {'a': 4.0}
    """
    if len(numbers) == 1:
        return dict(values[0])
    share, (first, last) = (wanted - numbers[0]) / (numbers[1] - numbers[0]), values
    return {name: first[name] + share * (last[name] - first[name]) for name in first}
