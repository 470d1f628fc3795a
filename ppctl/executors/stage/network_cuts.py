"""The places at which a network's operations are cut into embedding, layers and head."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp

from ppctl.errors import ConfigError, setting
from ppctl.executors.stage.traced_operations import Trace
from ppctl.schedule.partition.operation_clusters import clusters

Shape = jax.ShapeDtypeStruct
WIDE = 2  # widest boundaries; wider outputs belong to the head


@dataclass(frozen=True)
class Contents:
    """The contents of a layer of a network, or of its embedding or head."""

    name: str  # "embedding", "0", "1", ..., "head"
    params: Mapping[str, tuple[int, ...]]  # shapes by the author's names; shared ones repeat
    operations: Mapping[str, int]  # number of each operation by JAX's names, without reshapes


@dataclass(frozen=True)
class NetworkCuts:
    """A traced network to be cut into layers: at its marks, or with `auto` by work.

    num_parameters: the first leaves of the trace.
    """

    trace: Trace
    num_layers: int
    num_parameters: int
    auto: bool

    def bounds(self) -> tuple[int, ...]:
        """Return the first operation of each layer and of the head."""
        last = self.trace.num_ops
        first = next(
            (place for place in range(last + 1) if not integers_crossing(self.trace, place)),
            last + 1,
        )
        if self.auto:
            last = self._tied(first)
            bounds = self._clustered(first, last)
            head = self._head(bounds)
            return bounds if head == last else self._clustered(first, head)
        marks = len(self.trace.marks)
        if marks + 1 != self.num_layers:
            raise ConfigError(
                f"apply has {marks} stage_boundary marks, which make {marks + 1} layers, but "
                f"{setting('model.num_layers', self.num_layers)}. Leave it out, or use "
                f"{setting('model.layers', 'auto', 'layers=NUMBER')}."
            )
        bounds = (first, *self.trace.marks, max(first, self._tied(first)))
        for l, (start, stop) in enumerate(pairwise(bounds)):
            if start > stop and l == 0:
                raise no_floats(integers_crossing(self.trace, stop), l + 1)
            if start >= stop and (l or not first):  # layer 0 may leave its work to the embedding
                raise ConfigError(
                    f"layer {l} of {self.num_layers} computes nothing of its own. Move a "
                    "stage_boundary."
                )
        return (*bounds[:-1], self._head(bounds))

    def _clustered(self, first: int, last: int) -> tuple[int, ...]:
        if first >= last:
            raise no_floats(integers_crossing(self.trace, first - 1), 1)
        torn = self._torn(first)
        is_possible = lambda place: place not in torn and not integers_crossing(self.trace, place)  # noqa: E731
        size = lambda place: _size(self.trace.crossing(place)) if is_possible(place) else math.inf  # noqa: E731
        costs, passing = self.trace.costs[first:last], [*map(size, range(first, last))]
        return tuple(first + place for place in clusters(costs, passing, self.num_layers))

    def _tied(self, first: int) -> int:
        """Return the first operation after the embedding that shares its parameters, or the end."""
        users = map(self.trace.users, range(self.num_parameters))
        tied = [u for found in users if found and found[0] < first for u in found if u >= first]
        return min([self.trace.num_ops, *tied])

    def _torn(self, first: int) -> set[int]:
        """Return the places between users of a parameter that the embedding does not use."""
        users = map(self.trace.users, range(self.num_parameters))
        ranges = (range(u[0] + 1, u[-1] + 1) for u in users if u and u[0] >= first)
        return {place for places in ranges for place in places}

    def _head(self, bounds: Sequence[int]) -> int:
        """Return the operation at which the head starts, in the last layer."""
        widest = max(_size(self.trace.crossing(place)) for place in bounds[:-1])
        if _size(self.trace.crossing(bounds[-1])) <= WIDE * widest:
            return bounds[-1]
        torn = self._torn(bounds[0])
        places = (p for p in range(bounds[-1] - 1, bounds[-2], -1) if p not in torn)
        return next((p for p in places if _size(self.trace.crossing(p)) <= widest), bounds[-1])


def is_floating(a: Shape) -> bool:
    return jnp.issubdtype(a.dtype, jnp.floating)


def integers_crossing(trace: Trace, place: int) -> list[Shape]:
    """Return the crossing values that are neither floating nor boolean."""
    return [a for a in trace.crossing(place) if not is_floating(a) and a.dtype != jnp.bool_]


def _size(shapes: Sequence[Shape]) -> int:
    return sum(a.size for a in shapes)


def no_floats(shapes: Sequence[Shape], l: int) -> ConfigError:
    found = " and ".join(f"{a.dtype}{list(a.shape)}" for a in shapes)
    return ConfigError(
        f"{found} crosses the boundary before layer {l}, and what passes between layers is "
        "floating. Make floats of it in the first layer, or move the boundary."
    )
