"""The fastest layouts of a model: mesh, schedule, partition, microbatches and remat together.

Every combination is bounded from below by its work and its memory. Layouts are simulated by these
bounds, until no bound is below the last of the best. Standard library only.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from itertools import product
from math import inf
from typing import NamedTuple

from ppctl.planner.cost.array_sizes import Microbatch
from ppctl.planner.cost.counted_costs import Machine
from ppctl.planner.search.layout_candidate import Candidate, LayoutPredictor, knobs_of
from ppctl.planner.search.layout_space import Bounds, DeviceModels, Space
from ppctl.schedule.axis_table import MESH_AXES
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.registry import BASELINE, FAMILIES
from ppctl.schedule.mesh_axes import DATA_AXES, STAGE_AXES, MeshSizes
from ppctl.schedule.partition.cut_layers import improved
from ppctl.schedule.partition.partition import Partition, explicit

MOST_SIMULATIONS = 100  # of one layout's partitions


class Layout(NamedTuple):
    """A layout before it is simulated."""

    bounds: Bounds
    family: str
    num_chunks: int

    @property
    def bound_s(self) -> float:
        return self.bounds.step_s(is_whole=not FAMILIES[self.family].is_split)

    @property
    def least_bytes(self) -> int:
        return sum(self.bounds.memory.values())


@dataclass(frozen=True)
class Found:
    """The best layouts, fastest first, and what was looked at."""

    best: tuple[Candidate, ...]
    without_pipeline: Candidate | None  # the best one with pp=1
    num_layouts: int  # mesh x microbatches x remat x schedule
    num_too_large: int  # of these: no room for state and one microbatch
    num_simulated: int
    smallest: Candidate | None  # the one that needs least, where none fits


class LayoutSearch:
    """A search of a space, with the models of its divisions."""

    def __init__(self, space: Space, models: DeviceModels, machine: Machine):
        self.space, self.models, self.machine = space, models, machine
        self.predictor = LayoutPredictor()

    def bounds(self, mesh: MeshSizes, microbatch: Microbatch, vocab: str = "whole") -> Bounds:
        """Return the lower bounds of a mesh with microbatches."""
        has_parts = vocab == "parallel"
        model = self.models(mesh.only(STAGE_AXES), *[mesh.pp] * has_parts)
        return Bounds(self.space, *model, self.machine, mesh, microbatch, has_parts)

    def layouts(self) -> Iterator[Layout]:
        """Yield all with tp in one host; vocabulary parts only where they may gain."""
        for mesh, microbatch in self.space.microbatches:
            over = self.machine.over(mesh.by_axis)
            if any(over[axis.name] > 1 for axis in MESH_AXES if axis.in_one_host):
                continue
            whole, has_pipeline = self.bounds(mesh, microbatch), mesh.pp > 1
            each = [whole] if "whole" in self.space.vocab or not has_pipeline else []
            with_parts = "parallel" in self.space.vocab and has_pipeline
            if with_parts and (not each or whole.may_gain_by_parts):
                each.append(self.bounds(mesh, microbatch, "parallel"))
            for bounds, kind in product(each, self.space.kinds(mesh.pp)):
                yield Layout(bounds, *kind)

    def run(self, keep: int = 10, *, room_bytes: float | None = None) -> Found:
        """Return the best `keep` layouts within room_bytes a device (None: no limit)."""
        self.predictor = LayoutPredictor(inf if room_bytes is None else room_bytes)
        with uncollected():
            return self._run(keep)

    def _run(self, keep: int) -> Found:
        # 1. leave out layouts whose state and one microbatch have no room
        layouts = list(self.layouts())
        opened = [layout for layout in layouts if self.predictor.has_room(layout.bounds.memory)]

        # 2. simulate, by estimates, all that may be among the best, or the best without a pipeline
        best, alone = list[Candidate](), None
        for layout in sorted(opened, key=self._expected_s):
            last_s = best[-1].time.total_s if len(best) == keep else inf
            alone_s = inf if alone is None else alone.time.total_s
            alone_s = 0.0 if layout.bounds.mesh.pp > 1 else alone_s
            if layout.bound_s > last_s and layout.bound_s >= alone_s:
                continue
            candidate = self.predictor.candidate(*layout, max(last_s, alone_s))
            if candidate is None:
                continue
            if candidate.time.total_s < alone_s:
                alone = candidate
            if not any(candidate.is_like(other) for other in best):
                best = sorted([*best, candidate], key=rank)[:keep]

        # 3. where none fits, name the smallest
        num_too_large, num_simulated = len(layouts) - len(opened), self.predictor.num_simulated
        smallest = None if best else LayoutSearch(self.space, self.models, self.machine)._smallest()
        return Found(tuple(best), alone, len(layouts), num_too_large, num_simulated, smallest)

    def improved(self, found: Found) -> Found:
        """Return the layouts with faster partitions, by simulation (`cut_layers`), in order."""
        with uncollected():
            best = sorted(map(self._improved, found.best), key=rank)
        return replace(found, best=tuple(best))  # one stage has one partition

    def _improved(self, candidate: Candidate) -> Candidate:
        mesh, number, space = candidate.mesh, candidate.num_microbatches, self.space
        examples = space.batch_size // (mesh.along(DATA_AXES) * number)
        microbatch = Microbatch(examples, number, space.example_bytes, candidate.remat)
        bounds = self.bounds(mesh, microbatch, candidate.vocab)
        found = {candidate.partition: candidate}

        def simulated_s(partition: Partition) -> float:
            sizes, kind = tuple(map(len, partition)), (candidate.family, candidate.num_chunks)
            if sizes not in found:
                simulated = self.predictor.candidate(bounds, *kind, sizes=sizes)
                if simulated is None:
                    return inf
                found[sizes] = simulated
            return found[sizes].time.total_s

        start = explicit(space.num_layers, len(candidate.partition), candidate.partition)
        return found[tuple(map(len, improved(start, simulated_s, max_tried=MOST_SIMULATIONS)))]

    def _expected_s(self, layout: Layout) -> float:
        """Return a closed-form estimate: simulating good layouts first rules out most."""
        bounds, family, chunks = layout
        op_times, pp, number = bounds.op_times, bounds.mesh.pp, bounds.microbatch.number
        layers, embed_head_s = self.space.num_layers / pp, bounds.embed_head_s / pp
        kinds_s = (layers * each_s + embed_head_s / 3 for each_s in astuple(op_times.layer))
        costs = Costs(*kinds_s, transfer_s=op_times.hop_s)
        knobs, free = knobs_of(family, chunks), replace(costs, transfer_s=0.0)
        makespan_s = FAMILIES[family].makespan_s
        formulas_s = (
            makespan_s(pp, number, costs, **knobs)
            or makespan_s(pp, number, free, **knobs)
            or FAMILIES[BASELINE].makespan_s(pp, number, free)
        )
        return op_times.overhead_s + (formulas_s or number * costs.seconds("F", 0, 1) * 3)

    def _smallest(self) -> Candidate | None:
        """Return the layout that needs the fewest bytes, None where none is possible."""
        smallest, size = None, inf
        for layout in sorted(self.layouts(), key=lambda layout: layout.least_bytes):
            if layout.least_bytes >= size:
                break
            candidate = self.predictor.candidate(*layout)
            if candidate is not None and candidate.total_bytes < size:
                smallest, size = candidate, candidate.total_bytes
        return smallest


def rank(candidate: Candidate) -> tuple[float, int]:
    """Return the key of the order: fastest first, of equals the smallest."""
    return candidate.time.total_s, candidate.total_bytes


@contextmanager
def uncollected() -> Generator[None]:
    """Switch off garbage collection: it walks thousands of live schedules, a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
