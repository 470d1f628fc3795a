"""The fastest layouts of a model on so many devices: mesh, schedule, partition, microbatches and remat together.

Every combination is bounded from below by its work and its memory. In the order of these bounds layouts are simulated,
until no bound is below the last of the best. Standard library only.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from ppctl.planner.analytic import Machine
from ppctl.planner.candidate import Candidate, LayoutPredictor, knobs_of
from ppctl.planner.sizes import Microbatch
from ppctl.planner.space import Bounds, DeviceModel, MeshSizes, Space
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.registry import BASELINE, FAMILIES, makespan_formula_s
from ppctl.schedule.partition.cut import improved
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


@dataclass(frozen=True)
class Found:
    """The best layouts, fastest first, and what was looked at."""

    best: tuple[Candidate, ...]
    without_pipeline: Candidate | None  # the best one with pp=1
    num_layouts: int  # mesh x microbatches x remat x schedule
    num_too_large: int  # of these: no room for state and one microbatch
    num_simulated: int
    smallest: Candidate | None  # the one that needs least, where none fits
    # by whether tp and cp divide stages: the best one; of both, or empty where there is no such choice
    by_division: Mapping[bool, Candidate | None] = field(default_factory=dict[bool, Candidate | None])
    with_whole_vocabulary: Candidate | None = None  # the best one, where there is a choice
    refused: tuple[Layout, ...] = field(default=(), repr=False)  # for their memory alone, as far as they were looked at


class LayoutSearch:
    """A search. models: by tp and cp, for those of the space.

    by_parts: from tp, cp and pp to the model whose vocabulary is divided over the ranks too, where the space has that.
    """

    def __init__(
        self,
        space: Space,
        models: Mapping[tuple[int, int], DeviceModel],
        machine: Machine,
        by_parts: Callable[[int, int, int], DeviceModel] | None = None,
    ):
        self.space, self.models, self.machine, self.by_parts = space, models, machine, by_parts
        self.predictor = LayoutPredictor()

    def bounds(self, mesh: MeshSizes, microbatch: Microbatch, vocab: str = "whole") -> Bounds:
        """Return the lower bounds of a mesh with microbatches."""
        model, has_parts = self.models[mesh.tp, mesh.cp], vocab == "parallel"
        if has_parts:
            assert self.by_parts is not None, "the space says that the model can be divided so"
            model = self.by_parts(mesh.tp, mesh.cp, mesh.pp)
        return Bounds(self.space, *model, self.machine, mesh, microbatch, has_parts)

    def layouts(self) -> Iterator[Layout]:
        """Yield all. tp lies inside a host; the vocabulary is divided where that may gain time or room."""
        for mesh, microbatch in self.space.microbatches:
            if self.machine.over(mesh._asdict())["tp"] > 1:
                continue
            whole = self.bounds(mesh, microbatch)
            each = [whole] if "whole" in self.space.vocab or mesh.pp == 1 else []
            if "parallel" in self.space.vocab and mesh.pp > 1 and (not each or whole.may_gain_by_parts):
                each.append(self.bounds(mesh, microbatch, "parallel"))
            yield from (Layout(bounds, *kind) for bounds in each for kind in self.space.kinds(mesh.pp))

    def run(self, keep: int = 10, *, room_bytes: float | None = None) -> Found:
        """Return the best `keep` layouts for devices with so much memory (None: as much as it takes)."""
        self.predictor = LayoutPredictor(inf if room_bytes is None else room_bytes)
        with uncollected():
            return self._run(keep)

    def _run(self, keep: int) -> Found:
        opened, refused = list[tuple[float, int, Layout]](), list[Layout]()  # opened: expected s, number
        for number, layout in enumerate(self.layouts()):
            if self.predictor.has_room(layout.bounds.memory):
                opened.append((self._expected_s(layout), number, layout))
            else:
                refused.append(layout)
        too_large = len(refused)
        best: list[Candidate] = []
        divisions = {tp * cp > 1 for tp, cp in self.space.divisions}
        # of the layouts of each of these kinds: without a pipeline, with embedding and head whole, divided by tp and cp
        first: dict[str | bool, Candidate | None] = {"alone": None, "whole": None}
        first |= dict.fromkeys(divisions if len(divisions) > 1 else ())
        for _, _, layout in sorted(opened, key=lambda each: each[:2]):
            last_s, bound_s, mesh = (
                best[-1].time.total_s if len(best) == keep else inf,
                layout.bound_s,
                layout.bounds.mesh,
            )
            kinds = ["alone"] * (mesh.pp == 1) + [mesh.divides_stages] * (len(divisions) > 1)
            kinds += ["whole"] * (len(self.space.vocab) > 1 and not layout.bounds.has_parts)
            before_s = {kind: inf if (found := first[kind]) is None else found.time.total_s for kind in kinds}
            may_be_first = [kind for kind in kinds if bound_s < before_s[kind]]
            if bound_s > last_s and not may_be_first:
                continue
            before = self.predictor.num_refused
            candidate = self.predictor.candidate(*layout, max([last_s, *(before_s[kind] for kind in may_be_first)]))
            if self.predictor.num_refused > before:
                refused.append(layout)
            if candidate is None:
                continue
            first |= {kind: candidate for kind in may_be_first if candidate.time.total_s < before_s[kind]}
            if not any(candidate.is_like(other) for other in best):
                best = sorted([*best, candidate], key=rank)[:keep]
        alone, whole = first.pop("alone"), first.pop("whole")
        smallest = None if best else LayoutSearch(self.space, self.models, self.machine, self.by_parts)._smallest()
        counts = len(opened) + too_large, too_large, self.predictor.num_simulated
        by_division = {bool(kind): found for kind, found in first.items()}
        return Found(tuple(best), alone, *counts, smallest, by_division, whole, tuple(refused))

    def with_room(self, found: Found, room_bytes: float) -> Candidate | None:
        """Return the fastest of the layouts that were refused for their memory, on devices with so much of it.

        None where none of them is faster than the best that fits.
        """
        self.predictor = LayoutPredictor(room_bytes)
        fastest, last_s = None, found.best[0].time.total_s if found.best else inf
        with uncollected():
            for layout in sorted(found.refused, key=self._expected_s):
                if layout.bound_s >= last_s:
                    continue
                candidate = self.predictor.candidate(*layout, last_s)
                if candidate is not None and candidate.time.total_s < last_s:
                    fastest, last_s = candidate, candidate.time.total_s
            return None if fastest is None else self._improved(fastest)

    def improved(self, found: Found) -> Found:
        """Return the same layouts with the partitions that simulation finds faster (`cut.improved`), fastest first."""
        with uncollected():
            best = sorted(map(self._improved, found.best), key=rank)
        return replace(found, best=tuple(best))  # one stage has one partition

    def with_whole_vocabulary(self, candidate: Candidate) -> Candidate | None:
        """Return the same layout with the vocabulary whole, and the partition that then is the fastest.

        None where that cannot be, as with more stages than layers; whether it fits is not asked.
        """
        self.predictor = LayoutPredictor()
        with uncollected():
            whole = self.predictor.candidate(
                self._bounds_of(candidate, "whole"), candidate.family, candidate.num_chunks
            )
            return None if whole is None else self._improved(whole)

    def _bounds_of(self, candidate: Candidate, vocab: str) -> Bounds:
        mesh, number, space = candidate.mesh, candidate.num_microbatches, self.space
        examples = space.batch_size // (mesh.dp * mesh.fsdp * number)
        return self.bounds(mesh, Microbatch(examples, number, space.example_bytes, candidate.remat), vocab)

    def _improved(self, candidate: Candidate) -> Candidate:
        bounds, space = self._bounds_of(candidate, candidate.vocab), self.space
        found = {candidate.partition: candidate}

        def simulated_s(partition: Partition) -> float:
            sizes = tuple(map(len, partition))
            if sizes not in found:
                simulated = self.predictor.candidate(bounds, candidate.family, candidate.num_chunks, sizes=sizes)
                if simulated is None:
                    return inf
                found[sizes] = simulated
            return found[sizes].time.total_s

        start = explicit(space.num_layers, len(candidate.partition), candidate.partition)
        return found[tuple(map(len, improved(start, simulated_s, max_tried=MOST_SIMULATIONS)))]

    def _expected_s(self, layout: Layout) -> float:
        """Return an estimate by the closed form for equal stages: simulating good layouts first rules out most."""
        bounds, family, chunks = layout
        op_times, pp, number = bounds.op_times, bounds.mesh.pp, bounds.microbatch.number
        layers, embed_head_s = self.space.num_layers / pp, bounds.ends_s / pp
        kinds = (op_times.layer.forward_s, op_times.layer.input_grad_s, op_times.layer.weight_grad_s)
        costs = Costs(*(layers * each_s + embed_head_s / 3 for each_s in kinds), transfer_s=op_times.hop_s)
        formula_s = makespan_formula_s(family, pp, number, costs, **knobs_of(family, chunks))
        if formula_s is None:  # at these costs
            formula_s = makespan_formula_s(
                family, pp, number, replace(costs, transfer_s=0.0), **knobs_of(family, chunks)
            )
        whole_s = makespan_formula_s(BASELINE, pp, number, replace(costs, transfer_s=0.0))
        return op_times.overhead_s + (formula_s or whole_s or number * costs.seconds("F", 0, 1) * 3)

    def _smallest(self) -> Candidate | None:
        """Return the layout that needs the fewest bytes, None where none is possible."""
        layouts = [(sum(each.bounds.memory.values()), number, each) for number, each in enumerate(self.layouts())]
        smallest: Candidate | None = None
        for least, _, layout in sorted(layouts, key=lambda each: each[:2]):
            if smallest is not None and least >= smallest.total_bytes:
                break
            candidate = self.predictor.candidate(*layout)
            if candidate is not None and (smallest is None or candidate.total_bytes < smallest.total_bytes):
                smallest = candidate
        return smallest


def rank(candidate: Candidate) -> tuple[float, int]:
    """Return the key of the order: fastest first, of equals the smallest."""
    return candidate.time.total_s, candidate.total_bytes


@contextmanager
def uncollected() -> Generator[None]:
    """Switch off the garbage collector in the body: it walks thousands of live schedules, a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
