"""The fastest cut of layers and devices into stages: the dynamic program of Alpa.

Zheng et al. 2022, arXiv 2201.12023, section 5.2: stages are contiguous layers on contiguous
devices, and a step of 1F1B takes sum(t) + (M - 1) max(t) for stage times t and M microbatches. Here
the slowest stage also counts its per-step overhead. Costs are plain arrays. numpy only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from math import ceil, floor, inf
from typing import Any, NamedTuple

import numpy as np

EPSILON = 1e-9  # relative tolerance of bounds


@dataclass(frozen=True, eq=False)
class Submesh:
    """A number of devices for a stage, divided in one way, and its costs for any layers.

    The arrays have an entry for [first layer, end of the layers].
    """

    label: Any  # chip and axes, for the caller
    devices: int
    starts: tuple[int, ...]  # numbers of the first device where it may lie, ascending
    way_s: np.ndarray  # seconds of one microbatch, forward and backward, with its sends
    rest_s: np.ndarray  # seconds of the other M - 1 microbatches and of the per-step overhead
    most_stages: np.ndarray  # maximum number of stages from this one to the last, for its memory


class Stage(NamedTuple):
    """Layers on a submesh."""

    submesh: Submesh
    first_layer: int
    end_layer: int
    first_device: int


@dataclass(frozen=True)
class Stages:
    """The stages of all layers, on contiguous devices from the first one."""

    stages: tuple[Stage, ...]

    @property
    def way_s(self) -> float:
        return float(sum(s.submesh.way_s[s.first_layer, s.end_layer] for s in self.stages))

    @property
    def rest_s(self) -> float:
        return float(max(s.submesh.rest_s[s.first_layer, s.end_layer] for s in self.stages))

    @property
    def seconds(self) -> float:
        """Return the seconds of a step: sum of way_s + max of rest_s."""
        return self.way_s + self.rest_s

    @property
    def num_devices(self) -> int:
        return sum(s.submesh.devices for s in self.stages)

    @property
    def fit(self) -> bool:
        """Return whether each stage has memory for the microbatches in flight."""
        backwards = enumerate(reversed(self.stages), start=1)
        return all(
            s.submesh.most_stages[s.first_layer, s.end_layer] >= number for number, s in backwards
        )


def fastest_stages(
    num_layers: int,
    num_devices: int,
    submeshes: Sequence[Submesh],
    below: float = inf,
    *,
    idle: bool = False,
) -> Stages | None:
    """Return the fastest stages of all layers; None if none fit, or none take less than `below`.

    idle: whether the last devices may be idle; otherwise all have a stage.

    For a limit of the slowest stage's rest_s, a dynamic program finds the least sum of way_s. This
    sum falls with the limit, so between two limits the step takes at least the sum at the upper
    one plus the lower limit. Intervals of limits are split, most promising first, until no bound is
    below the best step: the result is exact, with fewer programs than one for each limit.
    """
    if not submeshes:
        return None
    program = _Program(num_layers, num_devices, tuple(submeshes), idle)
    limits, best, found = program.limits, below, None
    intervals = [(limits[0] if len(limits) else inf, 0, len(limits) - 1, 0.0)]
    while intervals:
        bound, low, high, way_s = heappop(intervals)
        if bound >= best or low > high:
            break
        # limits at or above best - way_s cannot improve
        high = min(high, int(np.searchsorted(limits, best - way_s)) - 1)
        if low > high:
            continue
        middle = (low + high) // 2
        stages = program.least_way(limits[middle], best)
        if middle < high:
            upper = max(way_s + limits[middle + 1], bound)
            heappush(intervals, (upper, middle + 1, high, way_s))
        if stages is None:
            continue
        if stages.seconds < best:
            best, found = stages.seconds, stages
        last = int(np.searchsorted(limits, stages.rest_s)) - 1
        heappush(intervals, (max(bound, stages.way_s + limits[low]), low, last, stages.way_s))
    return found


class _Group(NamedTuple):
    """Submeshes of equally many devices and equal starts, their costs stacked."""

    submeshes: tuple[Submesh, ...]
    starts: np.ndarray
    way_s: np.ndarray
    rest_s: np.ndarray
    most_stages: np.ndarray

    @property
    def devices(self) -> int:
        return self.submeshes[0].devices


class _Row(NamedTuple):
    """The best submesh of a group within limits, for [first layer, end of the layers]."""

    group: _Group
    way_s: np.ndarray
    number: np.ndarray  # number of the submesh in the group


_Table = list[_Row]


@dataclass(frozen=True)
class _Program:
    """The dynamic program. Its states are (first layer, first device) of the remaining stages."""

    num_layers: int
    num_devices: int
    submeshes: tuple[Submesh, ...]
    idle: bool

    @cached_property
    def groups(self) -> list[_Group]:
        by_place: dict[tuple[int, tuple[int, ...]], list[Submesh]] = {}
        for each in self.submeshes:
            by_place.setdefault((each.devices, each.starts), []).append(each)
        return [
            _Group(
                tuple(alike),
                np.array(starts),
                np.stack([each.way_s for each in alike]),
                np.stack([each.rest_s for each in alike]),
                np.stack([each.most_stages for each in alike]),
            )
            for (_, starts), alike in by_place.items()
        ]

    @cached_property
    def limits(self) -> np.ndarray:
        """Return all possible values of the largest rest_s, ascending."""
        each = np.unique(np.concatenate([group.rest_s.ravel() for group in self.groups]))
        return each[np.isfinite(each) & (each >= self._least_rest_s * (1 - EPSILON))]

    @cached_property
    def _device_s(self) -> float:
        """Return a lower bound of the device-seconds of rest_s for each layer."""
        first, end = np.ogrid[: self.num_layers + 1, : self.num_layers + 1]
        number = np.maximum(end - first, 1)
        return min(float((g.rest_s / number).min()) * g.devices for g in self.groups)

    @property
    def _least_rest_s(self) -> float:
        return self._device_s * self.num_layers / self.num_devices

    def least_way(self, limit: float, best: float) -> Stages | None:
        """Return the stages with the least sum of way_s whose rest_s are at most `limit`.

        None if the step takes at least `best`.
        """
        table = self._table(limit, 1)
        after = self._after(table, limit)
        if not after[0, 0] + self._least_rest_s < best:
            return None
        # without the limit of memory in flight; if the result keeps it, no other is better
        stages = self._walk((after, table) for _ in range(self.num_layers))
        return stages if stages.fit else self._by_stage(table, after, limit, best)

    def _table(self, limit: float, num_stages: int) -> _Table:
        """Return the least way_s of a stage, by group. num_stages: from this stage to the last."""
        first, end = np.ogrid[: self.num_layers + 1, : self.num_layers + 1]
        left_s = (self.num_layers - (end - first)) * self._device_s * (1 - EPSILON)
        table = []
        for group in self.groups:
            allowed = (group.rest_s <= limit) & (group.most_stages >= num_stages)
            # the other devices must be able to run the other layers
            allowed &= left_s <= (self.num_devices - group.devices) * limit
            each = np.where(allowed, group.way_s, inf)
            row = _Row(group, each.min(0), each.argmin(0))
            if np.isfinite(row.way_s).any():
                table.append(row)
        return table

    def _places(self, table: _Table, limit: float) -> Iterator[tuple[int, _Group, Any, Any, Any]]:
        """Yield (first layer, group, ends of layers, their way_s, first devices), last first."""
        share = self._device_s * (1 - EPSILON) / limit if limit else 0.0  # least devices a layer
        for first in reversed(range(self.num_layers)):
            low = ceil(first * share - EPSILON)
            high = floor(self.num_devices - (self.num_layers - first) * share + EPSILON)
            for group, way_s, _ in table:
                ends = np.flatnonzero(np.isfinite(way_s[first]))
                places = slice(*np.searchsorted(group.starts, (low, high + 1)))
                starts = group.starts[places]
                if len(ends) and len(starts):
                    yield first, group, ends, way_s[first, ends], starts

    def _ends(self) -> np.ndarray:
        """Return 0 for [first layer, first device] after the last stage, inf elsewhere."""
        ends = np.full((self.num_layers + 1, self.num_devices + 1), inf)
        ends[self.num_layers, slice(None) if self.idle else -1] = 0.0
        return ends

    def _after(self, table: _Table, limit: float) -> np.ndarray:
        """Return the least way_s of the stages from [first layer, first device] on."""
        after = self._ends()
        for first, group, ends, way_s, starts in self._places(table, limit):
            next_s = after[ends[:, None], starts + group.devices]
            least = (way_s[:, None] + next_s).min(0)
            after[first, starts] = np.minimum(after[first, starts], least)
        return after

    def _before(self, table: _Table, limit: float) -> np.ndarray:
        """Return the least way_s of the stages before [first layer, first device]."""
        before = np.full((self.num_layers + 1, self.num_devices + 1), inf)
        before[0, 0] = 0.0
        places = [*self._places(table, limit)]
        places.sort(key=lambda place: place[0])
        for first, group, ends, way_s, starts in places:
            index = ends[:, None], starts + group.devices
            before[index] = np.minimum(before[index], before[first, starts] + way_s[:, None])
        return before

    def _by_stage(
        self, table: _Table, after: np.ndarray, limit: float, best: float
    ) -> Stages | None:
        """Return the same as `least_way`, with the memory of microbatches in flight.

        A state also has its number of stages. States that cannot be on a step faster than `best`
        are left out.
        """
        before = self._before(table, limit)
        alive = before + after + self._least_rest_s < best
        each, tables, least, number = [self._ends()], list[_Table](), inf, 0
        while len(each) <= self.num_layers and np.isfinite(each[-1]).any():
            tables.append(self._table(limit, len(each)))
            last, now = each[-1], np.full_like(after, inf)
            for first, group, ends, way_s, starts in self._places(tables[-1], limit):
                kept = starts[alive[first, starts]]
                if len(kept):
                    sums = way_s[:, None] + last[ends[:, None], kept + group.devices]
                    now[first, kept] = np.minimum(now[first, kept], sums.min(0))
            now[before + now + self._least_rest_s >= best] = inf
            each.append(now)
            if now[0, 0] < least:
                least, number = now[0, 0], len(each) - 1
        if not number:
            return None
        steps = zip(reversed(each[:number]), reversed(tables[:number]), strict=True)
        return self._walk(steps)

    def _walk(self, steps: Iterator[tuple[np.ndarray, _Table]] | Any) -> Stages:
        """Return the stages of the least way_s. steps: (way_s after a stage, its table)."""
        first, device, stages = 0, 0, []
        for after, table in steps:
            options = []
            for number, (group, way_s, _) in enumerate(table):
                if device in group.submeshes[0].starts:
                    sums = way_s[first] + after[:, device + group.devices]
                    options.append((sums.min(), number, int(sums.argmin())))
            _, number, end = min(options)
            group, _, chosen = table[number]
            stages.append(Stage(group.submeshes[chosen[first, end]], first, end, device))
            first, device = end, device + group.devices
            if first == self.num_layers:
                break
        return Stages(tuple(stages))
