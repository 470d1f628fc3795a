"""A layout as the search predicts it: a schedule on a mesh, its partition, microbatches and remat.

Standard library only, for thousands of them; those shown are predicted as `ppctl plan` does (`planner.predict`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from math import inf, prod
from typing import Any

from ppctl.errors import ConfigError, ScheduleError
from ppctl.planner.analytic import PlannedLayout, adds_in_place
from ppctl.planner.op_times import StepTime, costs_of_stages, ticking_s
from ppctl.planner.sizes import task_bytes, workspace_bytes
from ppctl.planner.space import Bounds, MeshSizes
from ppctl.schedule.activations import peak_activations
from ppctl.schedule.bounds import makespan_bound_s
from ppctl.schedule.costs import task_costs
from ppctl.schedule.families.registry import FAMILIES, peak_formula
from ppctl.schedule.ir import PART_KINDS, Schedule
from ppctl.schedule.lockstep import Counted, TickShape, rows_s
from ppctl.schedule.partition.cut import divided_evenly as divided
from ppctl.schedule.partition.partition import explicit, stage_costs
from ppctl.schedule.remat import Remat
from ppctl.schedule.ticks import TickPacking, fastest, in_shape, packings
from ppctl.schedule.vocabulary import with_parts, with_vocabulary

Key = tuple[str, int, int, int, str]  # of a schedule: family, ranks, microbatches, chunks; vocab: whole, ticks or free
MOST_TASKS = 8_000  # of one simulation; longer schedules are extrapolated from two shorter ones
FEW_RANKS = 16  # up to here two rounds of microbatches tell what one more takes, above one
SAME = 1e-9  # relative


@dataclass(frozen=True)
class Candidate:
    """A layout with its predicted step time and memory."""

    mesh: MeshSizes
    family: str
    num_chunks: int
    num_microbatches: int
    remat: str
    partition: tuple[int, ...]  # layers of each stage
    time: StepTime
    recomputed_fraction: float  # of the tasks' work: forwards that backwards recompute
    memory: Mapping[str, int] = field(compare=False)  # bytes by part, of the device that holds most
    rank_of: tuple[int, ...] = field(default=(), compare=False)  # the rank of each stage
    stage_s: tuple[tuple[float, ...], ...] = field(default=(), compare=False)  # of a microbatch: F, B, I, W
    ideal_bubble: float | None = field(default=None, compare=False)  # 0..1: of the schedule alone, equal stages
    sent_fraction: float = field(default=0.0, compare=False)  # of the tasks' work: what devices along tp and cp send
    bubble: float | None = field(default=None, compare=False)  # once it is predicted as `ppctl plan` does
    vocab: str = "whole"  # embedding and head, as schedule.vocab

    @property
    def total_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def sent_share(self) -> float:
        """The share of the step, 0..1, in which a device sends to others of its stage, the mean of all devices."""
        return self.sent_fraction * self.time.tasks_s / (prod(self.mesh) * self.time.total_s)

    def is_like(self, other: Candidate) -> bool:
        """Return whether `other`, found before, is as good on the same mesh with the same microbatches and remat."""
        are_equal = (self.mesh, self.num_microbatches, self.remat) == (other.mesh, other.num_microbatches, other.remat)
        is_no_faster = self.time.total_s >= other.time.total_s * (1 - SAME)
        return are_equal and is_no_faster and self.total_bytes >= other.total_bytes


class LayoutPredictor:
    """Predicts layouts that fit in `limit_bytes` a device, by simulation."""

    def __init__(self, limit_bytes: float = inf):
        self.limit_bytes = limit_bytes
        self.num_simulated = 0  # layouts so far
        self.num_refused = 0  # likewise, for their memory

    def has_room(self, memory: Mapping[str, int]) -> bool:
        has_room = sum(memory.values()) <= self.limit_bytes
        self.num_refused += not has_room
        return has_room

    def candidate(
        self, bounds: Bounds, family: str, chunks: int, last_s: float = inf, sizes: tuple[int, ...] | None = None
    ) -> Candidate | None:
        """Return a layout with its prediction; None where it is impossible, does not fit, or takes longer than last_s.

        sizes: the layers of each stage; None: those that balance it.

        Cheapest check first: time of its work, memory by its order, time by simulation, memory of its slots.
        """
        pp, microbatch, is_spmd = bounds.mesh.pp, bounds.microbatch, bounds.space.in_ticks
        peak = peak_formula(family, pp, microbatch.number, **knobs_of(family, chunks))
        share = least_share(bounds, family)
        if peak is not None and not self.has_room(bounds.with_stashes(peak * share)):
            return None
        try:
            parts = "whole" if not bounds.has_parts else "ticks" if is_spmd else "free"
            placed = _built(family, pp, min(microbatch.number, 2 * pp + microbatch.number % pp), chunks, parts)
            sizes = sizes or _balanced(bounds, placed.rank_of)
        except (ScheduleError, ConfigError):
            return None
        largest = max(sizes)
        most = largest * chunks if is_spmd else max(_sums(sizes, placed.rank_of))
        layout = bounds.layout(most, largest)
        op_times = bounds.op_times_at(layout)
        relative = _relative_costs(sizes, bounds.space.layer_costs)
        keeps_input = Remat.of(microbatch.remat).keeps_input_only
        num_parts, split = bounds.num_parts, placed.is_split
        in_seconds = partial(costs_of_stages, sizes=relative, keeps_input=keeps_input, split=split, num_parts=num_parts)
        costs = in_seconds(op_times)
        if makespan_bound_s(placed, costs, microbatch.number) + op_times.overhead_s > last_s:
            return None  # whatever the order of its tasks
        numbers = shorter(pp, microbatch.number, chunks)
        keys = [(family, pp, number, chunks, parts) for number in numbers]
        try:
            schedules = [_built(*key) for key in keys]
        except ScheduleError:
            return None

        if is_spmd:
            slots = along(numbers, [{"stash": share * _stashes(key)} for key in keys], microbatch.number)
            temporaries = _workspace(bounds, layout)
        else:
            slots, temporaries = _fullest(keys, sizes, bounds, layout)
        held = bounds.held_bytes(layout, slots) | {"temporaries": temporaries}
        if not self.has_room(held):
            return None
        self.num_simulated += 1
        times, lowered_for = list[dict[str, float]](), (microbatch.remat, bounds.space.trained)
        for key, schedule in zip(keys, schedules, strict=True):
            rows = rows_s(_rows(*key)[_shape(key, *lowered_for)], costs, chunks) if is_spmd else None
            times.append(vars(ticking_s(op_times, schedule, rows, costs, layout.rank_devices)))
        time = StepTime(**along(numbers, times, microbatch.number))
        again = Remat.of(microbatch.remat).recomputed_layers(sizes)
        recomputed = again * op_times.layer.forward_s * microbatch.number * layout.rank_devices / time.tasks_s
        if time.total_s > last_s:
            return None
        sent = 0.0
        if bounds.mesh.divides_stages:
            sends = in_seconds(bounds.sent_at(layout))
            each_s = sum(sends.seconds(kind, s, 1) for kind in "FIW" for s in range(len(sizes)))
            each_s += sum(sends.seconds(kind, r, 1) for kind in PART_KINDS for r in range(num_parts))
            sent = each_s * microbatch.number * layout.rank_devices / time.tasks_s
        if is_spmd:
            slots = along(numbers, [_slots(key, *lowered_for) for key in keys], microbatch.number)
            held |= bounds.held_bytes(layout, slots)
            if not self.has_room(held):
                return None
        of_stages = tuple(tuple(costs.seconds(kind, s, 1) for kind in "FBIW") for s in range(len(sizes)))
        layout_of = bounds.mesh, family, chunks, microbatch.number, microbatch.remat, sizes
        vocab = "parallel" if bounds.has_parts else "whole"
        return Candidate(
            *layout_of, time, recomputed, held, tuple(placed.rank_of), of_stages, sent_fraction=sent, vocab=vocab
        )


def least_share(bounds: Bounds, family: str) -> float:
    """Return the share of a stash that stays until W at least: of a split backward only what I hands on."""
    stash, remat = bounds.work.stash_bytes[bounds.microbatch.remat], bounds.microbatch.remat
    if not FAMILIES[family].is_split or not stash:
        return 1.0
    return min(1.0, bounds.work.pending_bytes[remat] / stash)


def _balanced(bounds: Bounds, rank_of: Sequence[int]) -> tuple[int, ...]:
    """Return the layers of each stage, with embedding and head counted in layers."""
    embed, head = (piece.all_s / bounds.op_times.layer.all_s for piece in (bounds.op_times.embed, bounds.op_times.head))
    if bounds.has_parts:  # they are the same on every rank
        embed = head = 0.0
    layers = bounds.space.layer_costs or (1.0,) * bounds.space.num_layers
    return _partition(layers, tuple(rank_of), round(embed, 3), round(head, 3))


def _relative_costs(sizes: Sequence[int], layers: tuple[float, ...] | None) -> Sequence[float]:
    """Return the relative costs of stages of these sizes, in layers."""
    if layers is None:
        return sizes
    return stage_costs(explicit(len(layers), len(sizes), sizes), embed=0.0, head=0.0, layers=layers)


# what is the same for many layouts is made once


def knobs_of(family: str, chunks: int) -> dict[str, int]:
    return FAMILIES[family].knobs_for(chunks)


@cache
def _built(family: str, num_ranks: int, num_microbatches: int, chunks: int, vocab: str) -> Schedule:
    """Return a schedule, not validated: the families are proved elsewhere, and a run validates its own.

    vocab: whole; or divided over the ranks, which run in ticks or free.
    """
    schedule = FAMILIES[family].generate(num_ranks, num_microbatches, **knobs_of(family, chunks))
    if vocab == "whole":
        return schedule
    return with_parts(schedule) if vocab == "ticks" else with_vocabulary(schedule)


@lru_cache(maxsize=8)  # the cells are many
def _packings(family: str, pp: int, number: int, chunks: int, vocab: str) -> dict[TickShape, TickPacking]:
    return packings(_built(family, pp, number, chunks, vocab))


@cache
def _rows(*key: *Key) -> dict[TickShape, Counted]:
    return {shape: packing.counted for shape, packing in _packings(*key).items()}


@cache
def _shape(key: Key, remat: str, trained: float) -> TickShape:
    """Return the shape of the ticks that the executor lowers to."""
    return fastest(_rows(*key), task_costs(remat, trained), key[3])


@cache
def _slots(key: Key, remat: str, trained: float) -> Mapping[str, int]:
    """Return the slots of the rank with most."""
    return in_shape(_built(*key), _packings(*key)[_shape(key, remat, trained)], Remat.of(remat)).num_slots


@cache
def _stashes(key: Key) -> float:
    """Return how many stashes the rank with most holds at the same time, by the order of its tasks."""
    return max(peak_activations(_built(*key))) * key[3]


def _workspace(bounds: Bounds, layout: PlannedLayout) -> int:
    """Return the temporaries of executor=spmd, as `planner.memory` counts them."""
    in_place = adds_in_place(layout, adds=bounds.machine.speed.adds, unroll=bounds.machine.unroll)
    return workspace_bytes(bounds.work, bounds.params, layout, bounds.microbatch, adds=in_place)


def _fullest(
    keys: Sequence[Key], sizes: Sequence[int], bounds: Bounds, layout: PlannedLayout
) -> tuple[Mapping[str, float], int]:
    """Return the slots and the temporaries of the fullest rank of executor=mpmd, where they are most.

    That is in one of its tasks, or where gradients of a stage are stacked. Stashes and pendings are counted in those of
    the largest stage, temporaries as `planner.memory` does. keys: of the schedules that are extrapolated.
    """
    work, microbatch = bounds.work, bounds.microbatch
    remat, examples = Remat.of(microbatch.remat), microbatch.examples
    stash_bytes, pending_bytes = work.stash_bytes[remat] * examples, work.pending_bytes[remat] * examples
    stacked = layout.chunk_layers * bounds.params.trained_layer
    most, fullest = float(stacked), (dict.fromkeys(("stash", "pending"), 0.0), stacked)
    moments = [_moments(key, tuple(sizes), stash_bytes, pending_bytes) for key in keys]
    numbers = [key[2] for key in keys]
    for kind, stage in moments[0]:
        if kind in PART_KINDS:
            temporaries = round(max(0.0, work.head_bytes.of(examples))) if kind in "ST" else 0
        else:
            layers = sizes[stage]
            of_stage = replace(layout, rank_layers=layers)
            in_place = adds_in_place(of_stage, adds=bounds.machine.speed.adds, unroll=bounds.machine.unroll)
            head = stage == len(sizes) - 1 and kind in ("BI" if remat.keeps_input_only else "F")
            head = head and not bounds.has_parts
            temporaries = task_bytes(work, bounds.params, kind, layers, examples, remat, head=head, adds=in_place)
        live = along(numbers, [each[kind, stage] for each in moments], microbatch.number)
        size = live["stash"] * stash_bytes + live["pending"] * pending_bytes + temporaries
        if size > most:
            most, fullest = size, ({name: layers / max(sizes) for name, layers in live.items()}, temporaries)
    slots, temporaries = fullest
    return slots | {"value": 2}, temporaries


@lru_cache(maxsize=1024)
def _moments(
    key: Key, sizes: tuple[int, ...], stash_bytes: int, pending_bytes: int
) -> dict[tuple[str, int], dict[str, int]]:
    """Return by (kind, stage) what the stage's rank has in the task in which that is most, in layers of a microbatch.

    A task has what it reads, and what it writes; those of a part of the vocabulary nothing more than is there.
    """
    most = dict[tuple[str, int], dict[str, int]]()
    largest: dict[tuple[str, int], int] = {}
    for tasks in _built(*key).ranks:
        stash = pending = 0
        for stage, kind, _ in tasks:
            layers = 0 if kind in PART_KINDS else sizes[stage]
            stash += layers if kind == "F" else 0
            pending += layers if kind == "I" else 0
            size = stash * stash_bytes + pending * pending_bytes
            if size > largest.get((kind, stage), -1):
                largest[kind, stage], most[kind, stage] = size, {"stash": stash, "pending": pending}
            stash -= layers if kind in "BI" else 0
            pending -= layers if kind == "W" else 0
    return most


@cache
def _partition(layers: tuple[float, ...], rank_of: tuple[int, ...], embed: float, head: float) -> tuple[int, ...]:
    return tuple(map(len, divided(layers, rank_of, embed=embed, head=head)))


def _sums(sizes: Sequence[int], rank_of: Sequence[int]) -> list[int]:
    """Return the layers of each rank."""
    return [sum(n for n, r in zip(sizes, rank_of, strict=True) if r == rank) for rank in range(max(rank_of) + 1)]


def shorter(num_ranks: int, wanted: int, num_chunks: int) -> list[int]:
    """Return the numbers of microbatches to simulate: the one wanted, or two smaller ones past any family's warm-up.

    That is after 3p of them. By 1% and less what follows grows by equal steps; after 2p, by up to 14%.

    >>> shorter(8, 64, 1), shorter(8, 4096, 1)
    ([64], [24, 40])
    """
    few = 3 * num_ranks + wanted % num_ranks
    many = few + (2 if num_ranks <= FEW_RANKS else 1) * num_ranks
    is_short = 3 * num_ranks * num_chunks * wanted <= MOST_TASKS or wanted <= many
    return [wanted] if is_short else [few, many]


def along(numbers: Sequence[int], values: Sequence[Mapping[str, float]], wanted: int) -> dict[str, Any]:
    """Return the values extrapolated to `wanted` microbatches: they grow by equal steps.

    >>> along([2, 4], [{"a": 1.0}, {"a": 2.0}], 8)
    {'a': 4.0}
    """
    if len(numbers) == 1:
        return dict(values[0])
    share, (first, last) = (wanted - numbers[0]) / (numbers[1] - numbers[0]), values
    return {name: first[name] + share * (last[name] - first[name]) for name in first}
