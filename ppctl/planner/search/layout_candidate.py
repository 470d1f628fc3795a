"""A layout as the search predicts it: a schedule on a mesh, its partition, microbatches and remat.

Standard library only, for thousands of them; `predict_step` predicts those shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from math import inf
from typing import Any

from ppctl.errors import ConfigError, ScheduleError
from ppctl.planner.cost.array_sizes import task_bytes, workspace_bytes
from ppctl.planner.cost.counted_costs import PlannedLayout, layers_of_ranks
from ppctl.planner.cost.op_times import OpTimes, StepTime, costs_of_stages, ticking_s
from ppctl.planner.search.layout_space import Bounds
from ppctl.schedule.costs import Costs, task_costs
from ppctl.schedule.families.registry import FAMILIES
from ppctl.schedule.ir import PART_KINDS, Schedule
from ppctl.schedule.lockstep_ticks import Counted, TickShape, rows_s
from ppctl.schedule.lower_bounds import makespan_bound_s
from ppctl.schedule.mesh_axes import MeshSizes
from ppctl.schedule.partition.cut_layers import divided_evenly as divided
from ppctl.schedule.partition.partition import explicit, stage_costs
from ppctl.schedule.remat import Remat
from ppctl.schedule.search.extrapolated_cost import along
from ppctl.schedule.search.placement_costs import peak_activations
from ppctl.schedule.tick_lowering import TickPacking, fastest, in_shape, packings
from ppctl.schedule.vocabulary_parallel import with_parts, with_vocabulary

# of a schedule: family, ranks, microbatches, chunks; vocab: whole, ticks or free
Key = tuple[str, int, int, int, str]
MOST_TASKS = 8_000  # of one simulation; longer schedules are extrapolated from two shorter ones
FEW_RANKS = 16  # at most, to extrapolate by two rounds of microbatches; above by one
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
    ideal_bubble: float | None = field(default=None, compare=False)  # 0..1: equal stages
    bubble: float | None = field(default=None, compare=False)  # predicted as by `ppctl plan`
    vocab: str = "whole"  # embedding and head, as schedule.vocab

    @property
    def total_bytes(self) -> int:
        return sum(self.memory.values())

    def is_like(self, other: Candidate) -> bool:
        """Return whether the earlier `other`, alike in mesh, microbatches, remat, is as good."""
        mine, others = ((c.mesh, c.num_microbatches, c.remat) for c in (self, other))
        is_no_faster = self.time.total_s >= other.time.total_s * (1 - SAME)
        return mine == others and is_no_faster and self.total_bytes >= other.total_bytes


class LayoutPredictor:
    """Predicts layouts that fit in `limit_bytes` a device, by simulation."""

    def __init__(self, limit_bytes: float = inf):
        self.limit_bytes = limit_bytes
        self.num_simulated = 0  # layouts so far

    def has_room(self, memory: Mapping[str, int]) -> bool:
        return sum(memory.values()) <= self.limit_bytes

    def candidate(
        self,
        bounds: Bounds,
        family: str,
        chunks: int,
        last_s: float = inf,
        sizes: tuple[int, ...] | None = None,
    ) -> Candidate | None:
        """Return a layout's prediction; None if impossible, too large, or slower than last_s.

        sizes: the layers of each stage; None: those that balance it. Cheapest check first.
        """
        # 1. memory by the closed form of the family
        pp, number, knobs = bounds.mesh.pp, bounds.microbatch.number, knobs_of(family, chunks)
        peak, share = (
            FAMILIES[family].peak_activations(pp, number, **knobs),
            least_share(bounds, family),
        )
        if peak is not None and not self.has_room(bounds.with_stashes(peak * share)):
            return None

        # 2. time of its work, whatever the order of its tasks
        try:
            staged = _staged(bounds, family, chunks, sizes)
            if staged.bound_s > last_s:
                return None
            schedules = [_built(*key) for key in staged.keys]
        except (ScheduleError, ConfigError):
            return None

        # 3. memory by the order of its tasks
        memory = staged.memory()
        if not self.has_room(memory):
            return None

        # 4. time by simulation
        self.num_simulated += 1
        time = staged.step_time(schedules)
        if time.total_s > last_s:
            return None

        # 5. memory of the slots that ticks need
        if bounds.space.in_ticks:
            memory |= staged.held_bytes([_slots(key, *staged.lowered_for) for key in staged.keys])
            if not self.has_room(memory):
                return None
        return staged.candidate(time, memory)


@dataclass(frozen=True)
class _Staged:
    """A layout with its partition and task costs. keys: of the schedules that stand for it."""

    bounds: Bounds
    family: str
    chunks: int
    sizes: tuple[int, ...]
    placed: Schedule  # of a few microbatches
    layout: PlannedLayout
    keys: tuple[Key, ...]

    @cached_property
    def op_times(self) -> OpTimes:
        return self.bounds.op_times_at(self.layout)

    @cached_property
    def costs(self) -> Costs:
        return costs_of_stages(
            self.op_times,
            _relative_costs(self.sizes, self.bounds.space.layer_costs),
            keeps_input=Remat.of(self.bounds.microbatch.remat).keeps_input_only,
            split=self.placed.is_split,
            num_parts=self.bounds.num_parts,
        )

    @property
    def bound_s(self) -> float:
        bound_s = makespan_bound_s(self.placed, self.costs, self.bounds.microbatch.number)
        return bound_s + self.op_times.overhead_s

    @property
    def lowered_for(self) -> tuple[str, float]:
        return self.bounds.microbatch.remat, self.bounds.space.trained

    def along(self, values: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """Return the values of the schedules, extrapolated to the microbatches of the layout."""
        return along([key[2] for key in self.keys], values, self.bounds.microbatch.number)

    def held_bytes(self, slots: Sequence[Mapping[str, float]]) -> dict[str, int]:
        return self.bounds.held_bytes(self.layout, self.along(slots))

    def memory(self) -> dict[str, int]:
        """Return the bytes by part; with executor=spmd only stashes, no other slots."""
        if not self.bounds.space.in_ticks:
            slots, temporaries = _fullest(self)
            return self.bounds.held_bytes(self.layout, slots) | {"temporaries": temporaries}
        share, bounds = least_share(self.bounds, self.family), self.bounds
        held = self.held_bytes([{"stash": share * _stashes(key)} for key in self.keys])
        sizes = bounds.work, bounds.params, self.layout, bounds.microbatch
        adds = bounds.adds_in_place(self.layout.rank_layers)
        return held | {"temporaries": workspace_bytes(*sizes, adds=adds)}

    def step_time(self, schedules: Sequence[Schedule]) -> StepTime:
        """Return the time of a step by simulation."""
        times, copies = list[dict[str, float]](), self.layout.rank_devices
        for key, schedule in zip(self.keys, schedules, strict=True):
            rows = None
            if self.bounds.space.in_ticks:
                rows = rows_s(_rows(*key)[_shape(key, *self.lowered_for)], self.costs, self.chunks)
            times.append(vars(ticking_s(self.op_times, schedule, rows, self.costs, copies)))
        return StepTime(**self.along(times))

    def candidate(self, time: StepTime, memory: Mapping[str, int]) -> Candidate:
        bounds, microbatch = self.bounds, self.bounds.microbatch
        again = Remat.of(microbatch.remat).recomputed_layers(self.sizes)
        again_s = again * self.op_times.layer.forward_s
        all_s = again_s * microbatch.number * self.layout.rank_devices
        return Candidate(
            bounds.mesh,
            self.family,
            self.chunks,
            microbatch.number,
            microbatch.remat,
            self.sizes,
            time,
            all_s / time.tasks_s,
            memory,
            vocab="parallel" if bounds.has_parts else "whole",
        )


def _staged(bounds: Bounds, family: str, chunks: int, sizes: tuple[int, ...] | None) -> _Staged:
    """Return a layout with its partition. ScheduleError or ConfigError where it is impossible."""
    pp, number, is_spmd = bounds.mesh.pp, bounds.microbatch.number, bounds.space.in_ticks
    parts = "whole" if not bounds.has_parts else "ticks" if is_spmd else "free"
    placed = _built(family, pp, min(number, 2 * pp + number % pp), chunks, parts)
    sizes = sizes or _balanced(bounds, placed.rank_of)
    most = max(sizes) * chunks if is_spmd else max(layers_of_ranks(sizes, placed.rank_of))
    keys = tuple((family, pp, each, chunks, parts) for each in shorter(pp, number, chunks))
    return _Staged(bounds, family, chunks, sizes, placed, bounds.layout(most, max(sizes)), keys)


def least_share(bounds: Bounds, family: str) -> float:
    """Return the share of a stash held until W at least: of a split backward what I hands on."""
    stash, remat = bounds.work.stash_bytes[bounds.microbatch.remat], bounds.microbatch.remat
    if not FAMILIES[family].is_split or not stash:
        return 1.0
    return min(1.0, bounds.work.pending_bytes[remat] / stash)


def _balanced(bounds: Bounds, rank_of: Sequence[int]) -> tuple[int, ...]:
    """Return the layers of each stage, with embedding and head counted in layers."""
    times, embed, head = bounds.op_times, 0.0, 0.0
    if not bounds.has_parts:  # parts are the same on every rank
        embed, head = times.embed.all_s / times.layer.all_s, times.head.all_s / times.layer.all_s
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
    """Return a schedule, not validated: families are proved by tests, and a run validates its own.

    vocab: whole; or divided over the ranks, which run in ticks or free.
    """
    schedule = FAMILIES[family].generate(num_ranks, num_microbatches, **knobs_of(family, chunks))
    if vocab == "whole":
        return schedule
    return with_parts(schedule) if vocab == "ticks" else with_vocabulary(schedule)


@lru_cache(maxsize=8)  # the cells are many
def _packings(
    family: str, pp: int, number: int, chunks: int, vocab: str
) -> dict[TickShape, TickPacking]:
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
    packing = _packings(*key)[_shape(key, remat, trained)]
    return in_shape(_built(*key), packing, Remat.of(remat)).num_slots


@cache
def _stashes(key: Key) -> float:
    """Return the most stashes that a rank holds at once, by the order of its tasks."""
    return max(peak_activations(_built(*key))) * key[3]


def _fullest(staged: _Staged) -> tuple[Mapping[str, float], int]:
    """Return the slots and the temporaries of executor=mpmd's fullest rank at its peak.

    That is in one of its tasks, or where gradients of a stage are stacked. Stashes and pendings are
    counted in those of the largest stage, temporaries as in `rank_memory`.
    """
    # 1. sizes, and stacked gradients
    bounds, sizes, work = staged.bounds, staged.sizes, staged.bounds.work
    remat, examples = Remat.of(bounds.microbatch.remat), bounds.microbatch.examples
    stash_bytes, pending_bytes = (
        work.stash_bytes[remat] * examples,
        work.pending_bytes[remat] * examples,
    )
    stacked = staged.layout.chunk_layers * bounds.params.trained_layer

    def temporaries(kind: str, stage: int) -> int:
        if kind in PART_KINDS:
            return round(max(0.0, work.head_bytes.of(examples))) if kind in "ST" else 0
        layers, is_last = sizes[stage], stage == len(sizes) - 1 and not bounds.has_parts
        head = is_last and kind in ("BI" if remat.keeps_input_only else "F")
        how = {"head": head, "adds": bounds.adds_in_place(layers)}
        return task_bytes(work, bounds.params, kind, layers, examples, remat, **how)

    # 2. the task in which most is live
    most, slots, extra = float(stacked), dict.fromkeys(("stash", "pending"), 0.0), stacked
    moments = [_moments(key, sizes, stash_bytes, pending_bytes) for key in staged.keys]
    for kind, stage in moments[0]:
        live, more = staged.along([each[kind, stage] for each in moments]), temporaries(kind, stage)
        size = live["stash"] * stash_bytes + live["pending"] * pending_bytes + more
        if size > most:
            slots, extra = {name: layers / max(sizes) for name, layers in live.items()}, more
            most = size
    return slots | {"value": 2}, extra


@lru_cache(maxsize=1024)
def _moments(
    key: Key, sizes: tuple[int, ...], stash_bytes: int, pending_bytes: int
) -> dict[tuple[str, int], dict[str, int]]:
    """Return the peak stash and pending during tasks (kind, stage), in layers of a microbatch.

    A task holds all that it reads and writes; a vocabulary part's task adds nothing.
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
def _partition(
    layers: tuple[float, ...], rank_of: tuple[int, ...], embed: float, head: float
) -> tuple[int, ...]:
    return tuple(map(len, divided(layers, rank_of, embed=embed, head=head)))


def shorter(num_ranks: int, wanted: int, num_chunks: int) -> list[int]:
    """Return the numbers of microbatches to simulate: the wanted one, or two smaller ones.

    Past 3p, any family's warm-up, time grows by equal steps within 1%; past 2p within 14%.

    >>> shorter(8, 64, 1), shorter(8, 4096, 1)
    ([64], [24, 40])
    """
    few = 3 * num_ranks + wanted % num_ranks
    many = few + (2 if num_ranks <= FEW_RANKS else 1) * num_ranks
    is_short = 3 * num_ranks * num_chunks * wanted <= MOST_TASKS or wanted <= many
    return [wanted] if is_short else [few, many]
