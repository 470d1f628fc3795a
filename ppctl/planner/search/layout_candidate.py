"""The forms of a layout in the search: `Layout` (bounded), `Placed`, `Candidate` (simulated).

`seconds` and `least_bytes` of a form are lower bounds of the numbers of `ppctl plan`; each next
form has closer ones. Long schedules are extrapolated. Standard library only, as the search makes
thousands of layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from ppctl.errors import ConfigError, ScheduleError
from ppctl.executors.work import rank_bytes as memory
from ppctl.executors.work.planned_step import Step
from ppctl.planner.cost.step_time import StepTime, op_times, step_time
from ppctl.planner.search.layout_space import Bounds
from ppctl.schedule import placement_costs
from ppctl.schedule.costs import OF_STAGES, OpTimes, task_costs
from ppctl.schedule.families.registry import FAMILIES
from ppctl.schedule.ir import Schedule
from ppctl.schedule.lockstep_ticks import Counted
from ppctl.schedule.lower_bounds import makespan_bound_s
from ppctl.schedule.mesh_axes import MeshSizes
from ppctl.schedule.partition.cut_layers import divided_evenly as divided
from ppctl.schedule.partition.partition import explicit
from ppctl.schedule.placement_costs import LayerCosts
from ppctl.schedule.remat import Remat
from ppctl.schedule.tick_lowering import fastest, in_shape, packings
from ppctl.schedule.vocabulary_parallel import with_parts, with_vocabulary

# key of a schedule: (family, ranks, microbatches, chunks, vocabulary parts, whether in ticks)
Key = tuple[str, int, int, int, int, bool]
MOST_TASKS = 8_000  # tasks of a simulation; longer schedules are extrapolated from two shorter ones
# maximum number of ranks p whose two shorter schedules differ by 2p microbatches; with more
# ranks they differ by p
FEW_RANKS = 16


@dataclass(frozen=True)
class Candidate:
    """A layout with its simulated step time and memory."""

    mesh: MeshSizes
    family: str
    num_chunks: int
    num_microbatches: int
    remat: Remat
    partition: tuple[int, ...]  # layers of each stage
    time: StepTime
    least_bytes: int = field(compare=False)  # lower bound of the fullest device's bytes
    layout: Layout = field(compare=False, repr=False)
    vocab: str = "whole"  # whole | parallel: schedule.vocab

    @property
    def seconds(self) -> float:
        return self.time.total_s

    @property
    def knobs(self) -> dict[str, int]:
        return FAMILIES[self.family].knobs_for(self.num_chunks)

    @property
    def is_even(self) -> bool:
        """Return whether the partition equals that of partition=uniform."""
        sizes = self.partition
        return sizes == tuple(sorted(sizes, reverse=True)) and sizes[0] - sizes[-1] <= 1

    def is_like(self, other: Candidate) -> bool:
        """Return whether `other` has the same mesh, microbatches and remat, and no more bytes."""
        mine, others = ((c.mesh, c.num_microbatches, c.remat) for c in (self, other))
        return mine == others and self.least_bytes >= other.least_bytes


@dataclass(frozen=True)
class Layout:
    """A layout before its layers are divided into stages."""

    bounds: Bounds
    family: str
    num_chunks: int

    @property
    def seconds(self) -> float:
        return self.bounds.step_s(is_whole=not FAMILIES[self.family].is_split)

    @property
    def least_bytes(self) -> int:
        """Return a lower bound of the fullest device's bytes, with its peak of stashes.

        The peak is the family's closed form; without ticks or a closed form, one stash.
        """
        pp, number = self.bounds.mesh.pp, self.bounds.step.microbatch.number
        peak, family = None, FAMILIES[self.family]
        if self.bounds.space.engine.in_ticks:
            peak = family.peak_activations(pp, number, **family.knobs_for(self.num_chunks))
        share = 1.0 if peak is None else peak * self._least_share
        return self.bounds.with_stashes(share)

    @property
    def _least_share(self) -> float:
        """Return the share, 0..1, of a stash's bytes held until W; 1 if backwards are not split."""
        remat, work = self.bounds.step.microbatch.remat, self.bounds.step.work
        if not FAMILIES[self.family].is_split or not work.stash_bytes[remat]:
            return 1.0
        return min(1.0, work.pending_bytes[remat] / work.stash_bytes[remat])

    def placed(self, sizes: tuple[int, ...] | None = None) -> Placed | None:
        """Return the layout with its stages on ranks; None if it is impossible.

        sizes: the layers of each stage; None: a balanced partition.
        """
        bounds, step = self.bounds, self.bounds.step
        pp, number, in_ticks = bounds.mesh.pp, step.microbatch.number, bounds.space.engine.in_ticks
        vocab = bounds.vocab_parts, in_ticks
        few = min(number, 2 * pp + number % pp)
        try:
            schedule = _built((self.family, pp, few, self.num_chunks, *vocab))
            sizes = sizes or self._balanced(schedule.rank_of)
            lengths = shorter(pp, number, self.num_chunks)
            keys = [(self.family, pp, each, self.num_chunks, *vocab) for each in lengths]
            return Placed(self, sizes, schedule, tuple((key, _built(key)) for key in keys))
        except (ScheduleError, ConfigError):
            return None

    def _balanced(self, rank_of: Sequence[int]) -> tuple[int, ...]:
        """Return the layers of each stage; embedding and head count as layers of equal time."""
        times, space = self.bounds.op_times, self.bounds.space
        embed, head = (each.all_s / times.layer.all_s for each in (times.embed, times.head))
        layers = space.layer_costs or (1.0,) * space.num_layers
        return _partition(layers, tuple(rank_of), round(embed, 3), round(head, 3))


@dataclass(frozen=True)
class Placed:
    """A layout with its partition, and the schedules to simulate for its step time."""

    layout: Layout
    sizes: tuple[int, ...]  # layers of each stage
    placed: Schedule  # the layout's schedule with few microbatches, for bounds
    schedules: tuple[tuple[Key, Schedule], ...]  # its schedule, or two shorter ones to extrapolate

    @cached_property
    def step(self) -> Step:
        """Return the step with the layers of the largest rank."""
        step, sizes = self.layout.bounds.step, self.sizes
        most = self.layout.bounds.space.engine.rank_layers(sizes, self.placed.rank_of)
        return step.with_layers(most, max(sizes))

    @cached_property
    def _op_times(self) -> OpTimes:
        return op_times(self.step)

    @cached_property
    def placed_costs(self) -> placement_costs.Placed:
        """Return the costs of the stages, and the bytes of the ranks with executor=mpmd.

        The bytes of embedding, head and examples are left out.
        """
        step, space = self.step, self.layout.bounds.space
        partition = explicit(space.num_layers, len(self.sizes), self.sizes)
        costs = LayerCosts(
            space.layer_costs,
            self._op_times,
            lambda _: partition,
            memory.layer_bytes(step),
            keeps_input=step.microbatch.remat.keeps_input_only,
            split=self.placed.is_split,
        )
        return costs.on(self.placed.rank_of)

    @cached_property
    def seconds(self) -> float:
        """Return a lower bound of the step time, in seconds, for any order of the tasks."""
        number = self.step.microbatch.number
        bound_s = makespan_bound_s(self.placed, self.placed_costs.costs, number)
        return bound_s + self._op_times.overhead_s

    @property
    def least_bytes(self) -> int:
        return self.layout.least_bytes

    def simulated(self) -> Candidate:
        """Return the layout with its simulated step time, and the bytes that its tasks need."""
        # 1. seconds
        step, space, copies = self.step, self.layout.bounds.space, self.step.layout.rank_devices
        costs = self.placed_costs.costs
        times, slots = list[Mapping[str, float]](), list[Mapping[str, float]]()
        for key, schedule in self.schedules:
            counted = None
            if space.engine.in_ticks:
                counted, num_slots = _in_ticks(key, step.microbatch.remat, space.trained)
                slots.append(num_slots)
            times.append(vars(step_time(self._op_times, schedule, counted, costs, copies)))
        time = StepTime(**self._along(times))

        # 2. bytes
        if space.engine.in_ticks:
            held = memory.rank_bytes(
                memory.sizes_of(step), self._along(slots), memory.workspace_bytes(step)
            )
            least_bytes = sum(held.values())
        else:
            least_bytes = max(self.least_bytes, self._fullest_bytes)

        # 3. the layout
        layout, microbatch = self.layout, step.microbatch
        return Candidate(
            layout.bounds.mesh,
            layout.family,
            layout.num_chunks,
            microbatch.number,
            microbatch.remat,
            self.sizes,
            time,
            least_bytes,
            layout,
            vocab="parallel" if layout.bounds.vocab_parts else "whole",
        )

    def _along(self, values: Sequence[Mapping[Any, float]]) -> Mapping[Any, float]:
        """Return the schedules' values, extrapolated to the layout's number of microbatches."""
        return along([key[2] for key, _ in self.schedules], values, self.step.microbatch.number)

    @property
    def _fullest_bytes(self) -> int:
        """Return a lower bound of the fullest rank's bytes (executor=mpmd).

        The larger of the peak of live values and the bytes of one task (stash and temporaries).
        """
        ledger, last = self.placed_costs.ledger(self.placed), len(self.sizes) - 1
        rank_of, vocab_parts = self.placed.rank_of, self.layout.bounds.vocab_parts

        def running(stage: int, kind: str) -> float:
            has_head, layers = stage == last and not vocab_parts, self.sizes[stage]
            reads = ledger.stash[stage] if kind in "BI" else 0
            temporaries = memory.task_bytes(self.step, kind, layers, has_head=has_head)
            return ledger.held[rank_of[stage]] + reads + temporaries

        kinds = self.placed.kinds & {*OF_STAGES, "B"}
        tasks = [running(stage, kind) for stage in range(last + 1) for kind in kinds]
        peaks = [dict(enumerate(ledger.peaks(schedule))) for _, schedule in self.schedules]
        return round(max(*self._along(peaks).values(), *tasks))


# memoized: many layouts share these


@cache
def _built(key: Key) -> Schedule:
    """Return an unvalidated schedule; tests validate the families, and a run its schedule.

    In ticks, ranks run in lockstep and ignore the order of the vocabulary parts' tasks.
    """
    name, *sizes, chunks, vocab_parts, in_ticks = key
    schedule = FAMILIES[name].generate(*sizes, **FAMILIES[name].knobs_for(chunks))
    if not vocab_parts:
        return schedule
    return with_parts(schedule) if in_ticks else with_vocabulary(schedule)


@cache
def _in_ticks(key: Key, remat: Remat, trained: float) -> tuple[Counted, Mapping[str, int]]:
    """Return the phases of a schedule's ticks, and the number of slots on a rank, by name."""
    schedule = _built(key)
    packing = fastest(packings(schedule), task_costs(remat, trained), key[3])
    return packing.counted, in_shape(schedule, packing, remat).num_slots


@cache
def _partition(
    layers: tuple[float, ...], rank_of: tuple[int, ...], embed: float, head: float
) -> tuple[int, ...]:
    return tuple(map(len, divided(layers, rank_of, embed=embed, head=head)))


def along(
    numbers: Sequence[int], values: Sequence[Mapping[Any, float]], wanted: float
) -> Mapping[Any, float]:
    """Return `values`, known at one or two `numbers` of microbatches, extrapolated to `wanted`.

    >>> along([2, 4], [{"a": 1.0}, {"a": 2.0}], 8)
    {'a': 4.0}
    """
    if len(numbers) == 1:
        return values[0]
    share, (first, last) = (wanted - numbers[0]) / (numbers[1] - numbers[0]), values
    return {name: first[name] + share * (last[name] - first[name]) for name in first}


def shorter(num_ranks: int, wanted: int, num_chunks: int) -> list[int]:
    """Return the numbers of microbatches to simulate: the wanted one, or two smaller ones.

    Beyond 3p microbatches, the longest warm-up of any family, time is linear within 1%; beyond 2p
    within 14%.

    >>> shorter(8, 64, 1), shorter(8, 4096, 1)
    ([64], [24, 40])
    """
    few = 3 * num_ranks + wanted % num_ranks
    many = few + (2 if num_ranks <= FEW_RANKS else 1) * num_ranks
    is_short = 3 * num_ranks * num_chunks * wanted <= MOST_TASKS or wanted <= many
    return [wanted] if is_short else [few, many]
