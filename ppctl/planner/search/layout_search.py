"""The fastest layouts of a model: mesh, schedule, partition, microbatches and remat together.

The search is best-first. Each combination has a lower bound of its step time and one of its memory.
The layout with the lowest bound is placed, then simulated. It is the next result once its simulated
time is below all remaining bounds. Standard library only.
"""

import gc
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import product
from math import inf
from typing import Any

from ppctl.executors.work.planned_step import Microbatch
from ppctl.planner.search.layout_candidate import Candidate, Layout, Placed
from ppctl.planner.search.layout_space import Bounds, Space, StepOf
from ppctl.schedule.axis_table import MESH_AXES
from ppctl.schedule.mesh_axes import MeshSizes
from ppctl.schedule.partition.cut_layers import improved
from ppctl.schedule.partition.partition import Partition, explicit

SAY_EVERY_S = 10.0  # seconds between lines
MOST_SIMULATIONS = 100  # maximum number of simulated partitions of a layout


def ascending(
    items: Iterable[Any], key: Callable[[Any], float], refined: Callable[[Any], Any]
) -> Iterator[Any]:
    """Yield items in ascending order of key; the key of an unrefined item is a lower bound.

    refined: function from an item to its next form; to the item itself if it is final, to None to
    drop it. Only the item with the lowest bound is refined.

    >>> list(ascending([5, 3, 4], key=abs, refined=lambda n: -2 * n if n > 0 else n))
    [-6, -8, -10]
    """
    heap = [(key(item), i, item) for i, item in enumerate(items)]
    heapify(heap)
    while heap:
        bound, i, item = heappop(heap)
        better = refined(item)
        if better is item:
            yield item
        elif better is not None:
            heappush(heap, (max(bound, key(better)), i, better))


class LayoutSearch:
    """A search of a space for layouts that fit into room_bytes. step_of: see `StepOf`."""

    def __init__(self, space: Space, step_of: StepOf, room_bytes: float = inf):
        self.space, self.step_of = space, step_of
        self.room_bytes, self.num_simulated = room_bytes, 0
        self.watch: Callable[[], None] = lambda: None  # called often during a search
        self.fastest_simulated: Candidate | None = None  # candidates that fit
        self.layouts = list(self._layouts())

    def bounds(self, mesh: MeshSizes, microbatch: Microbatch, vocab: str = "whole") -> Bounds:
        """Return the lower bounds of time and memory of a mesh with these microbatches."""
        vocab_parts = mesh.pp if vocab == "parallel" else 0
        return Bounds(self.space, self.step_of(mesh, microbatch, vocab_parts))

    def _layouts(self) -> Iterator[Layout]:
        """Yield all layouts with tp inside a host.

        With a choice, vocabulary parts are included only if they may save time or memory.
        """
        for mesh, microbatch in self.space.microbatches:
            whole, has_pipeline = self.bounds(mesh, microbatch), mesh.pp > 1
            over = whole.step.known_machine.over(mesh.by_axis)
            if any(over[axis.name] > 1 for axis in MESH_AXES if axis.in_one_host):
                continue
            each = [whole] if "whole" in self.space.vocab or not has_pipeline else []
            with_parts = "parallel" in self.space.vocab and has_pipeline
            if with_parts and (not each or whole.may_gain_by_parts):
                each.append(self.bounds(mesh, microbatch, "parallel"))
            for bounds, kind in product(each, self.space.kinds(mesh.pp)):
                yield Layout(bounds, *kind)

    @property
    def num_too_large(self) -> int:
        """Return the number of layouts without room for state and one microbatch."""
        return sum(layout.bounds.least_bytes > self.room_bytes for layout in self.layouts)

    def fastest(self, *, with_pipeline: bool = True) -> Iterator[Candidate]:
        """Yield the layouts that may fit, fastest first; with_pipeline=False: only pp=1."""
        layouts = [
            layout
            for layout in self.layouts
            if layout.bounds.least_bytes <= self.room_bytes
            and (with_pipeline or layout.bounds.mesh.pp == 1)
        ]
        best = list[Candidate]()

        def seconds(item: Layout | Placed | Candidate) -> float:
            self.watch()
            return item.seconds

        for candidate in ascending(layouts, seconds, self._refined):
            if not any(map(candidate.is_like, best)):
                best.append(candidate)
                yield candidate

    @property
    def smallest_bytes(self) -> int | None:
        """Return a lower bound of the bytes of every layout; None without layouts."""
        return min((layout.least_bytes for layout in self.layouts), default=None)

    def _refined(self, item: Layout | Placed | Candidate) -> Placed | Candidate | None:
        """Return the next form of a layout; None if it is impossible or does not fit."""
        if isinstance(item, Candidate):
            return item
        if item.least_bytes > self.room_bytes:
            return None
        if isinstance(item, Layout):
            return item.placed()
        self.watch()
        self.num_simulated += 1
        candidate, fastest = item.simulated(), self.fastest_simulated
        if candidate.least_bytes > self.room_bytes:
            return None
        if fastest is None or candidate.seconds < fastest.seconds:
            self.fastest_simulated = candidate
        return candidate

    def improved(self, candidate: Candidate) -> Candidate:
        """Return the layout with the fastest partition that simulations find (`cut_layers`)."""
        found = {candidate.partition: candidate}

        def simulated_s(partition: Partition) -> float:
            sizes = tuple(map(len, partition))
            if sizes not in found:
                placed = candidate.layout.placed(sizes)
                simulated = None if placed is None else self._refined(placed)
                if not isinstance(simulated, Candidate):
                    return inf
                found[sizes] = simulated
            return found[sizes].seconds

        start = explicit(self.space.num_layers, len(candidate.partition), candidate.partition)
        return found[tuple(map(len, improved(start, simulated_s, max_tried=MOST_SIMULATIONS)))]


@contextmanager
def uncollected() -> Generator[None]:
    """Disable garbage collection: scanning the many live schedules took a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class SearchEnded(Exception):
    """Raised in a search that ends before it is complete."""


@dataclass
class SearchProgress:
    """Prints lines during a search, and ends it after max_s seconds or when `stopped_by` is set."""

    say: Callable[[str], None]
    max_s: float | None = None  # None: no limit
    stopped_by: str | None = None  # name of the signal that ends the search
    began_s: float = field(default_factory=time.monotonic)
    said_s: float = field(default_factory=time.monotonic)

    def begin(self, search: LayoutSearch, rows: Sequence[Any], best: int) -> None:
        """Watch a search. rows: its results, which grow until there are `best`."""
        self.began_s = self.said_s = time.monotonic()
        search.watch = lambda: self._watch(search, rows, best)

    @property
    def early_end(self) -> str | None:
        """Return the reason why the search ends early; None while it runs on."""
        if self.stopped_by is not None:
            return self.stopped_by
        is_over = self.max_s is not None and time.monotonic() - self.began_s >= self.max_s
        return f"tune.max_s={self.max_s:g}" if is_over else None

    def _watch(self, search: LayoutSearch, rows: Sequence[Any], best: int) -> None:
        if self.early_end is not None:
            raise SearchEnded
        now_s = time.monotonic()
        if now_s - self.said_s >= SAY_EVERY_S:
            self.said_s = now_s
            self.say(
                f"search    {now_s - self.began_s:.0f} s: {search.num_simulated:,} of at most "
                f"{len(search.layouts):,} layouts simulated, {len(rows)} of the best {best} found"
            )
