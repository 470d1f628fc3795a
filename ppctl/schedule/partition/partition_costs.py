"""The work that a partition divides: seconds and bytes of layers and ends, limits of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ppctl.schedule.partition.partition import Partition, least_layers


@dataclass(frozen=True)
class Layers:
    """The costs of each layer, in model order, and those of embedding and head.

    Sums of bytes are exact where the bytes are whole numbers.
    """

    layer_s: tuple[float, ...]  # seconds of one microbatch
    layer_bytes: tuple[float, ...] | None = None  # weights, gradients, optimizer state; None: 0
    activation_bytes: tuple[float, ...] | None = None  # bytes a microbatch in flight; None: 0
    embed_s: float = 0.0
    head_s: float = 0.0
    embed_bytes: float = 0.0  # activations included
    head_bytes: float = 0.0

    def __post_init__(self) -> None:
        for numbers in (self.layer_s, self.layer_bytes, self.activation_bytes):
            numbers = (0.0,) * self.num_layers if numbers is None else numbers
            assert len(numbers) == self.num_layers, "one number for each layer"
            assert all(0 <= n < math.inf for n in numbers), "finite numbers of at least 0"

    @property
    def num_layers(self) -> int:
        return len(self.layer_s)


@dataclass(frozen=True)
class Memory:
    """The limit of each rank, and the microbatches held by each stage at its rank's peak."""

    limit_bytes: tuple[float, ...]
    in_flight: tuple[int, ...]


class Work:
    """Layers on stages and ranks as sums, so that a stage's cost is a difference.

    Partitions are `bounds_of` them: stage s holds the layers from bounds[s] to before bounds[s+1].
    """

    def __init__(self, layers: Layers, rank_of: Sequence[int], memory: Memory | None):
        self.rank_of, self.num_layers = tuple(rank_of), layers.num_layers
        self.num_stages, self.num_ranks = len(rank_of), max(rank_of) + 1
        last = self.num_stages - 1
        ranks = range(self.num_ranks)
        self.stages_of = [[s for s, at in enumerate(rank_of) if at == rank] for rank in ranks]
        self.least = least_layers(self.num_stages)
        # 1. seconds, and those of embedding and head
        self.s_sums = _sums(layers.layer_s)
        self.end_s, self.end_bytes = [0.0] * (last + 1), [0.0] * (last + 1)
        self.end_s[0], self.end_bytes[0] = layers.embed_s, layers.embed_bytes
        self.end_s[last] += layers.head_s
        self.end_bytes[last] += layers.head_bytes
        # 2. limits of ranks, bytes of layers with the activations of each stage's microbatches
        self.limits = (math.inf,) * self.num_ranks if memory is None else memory.limit_bytes
        in_flight = (0,) * (last + 1) if memory is None else memory.in_flight
        assert len(self.limits) == self.num_ranks, "a limit each rank"
        assert len(in_flight) == self.num_stages, "a count each stage"
        self.limit = [self.limits[rank] for rank in rank_of]
        fixed = layers.layer_bytes or (0,) * layers.num_layers
        kept = layers.activation_bytes or (0,) * layers.num_layers
        sizes = {n: [f + n * a for f, a in zip(fixed, kept, strict=True)] for n in set(in_flight)}
        sums = {n: _sums(size) for n, size in sizes.items()}
        self.byte_sums = [sums[n] for n in in_flight]
        self.lightest = [min(sizes[n], default=0) for n in in_flight]  # bytes of smallest layers
        # 3. the least bytes of stages and ranks, and the room that they leave for each stage
        smallest = zip(self.least, self.lightest, self.end_bytes, strict=True)
        self.least_stage_bytes = least = [n * size + end for n, size, end in smallest]
        self.least_bytes = [sum(least[s] for s in stages) for stages in self.stages_of]
        others = [self.least_bytes[rank] - least[s] for s, rank in enumerate(rank_of)]
        self.room = [limit - other for limit, other in zip(self.limit, others, strict=True)]

    def stage_s(self, bounds: Sequence[int]) -> list[float]:
        sums, stages = self.s_sums, zip(pairwise(bounds), self.end_s, strict=True)
        return [sums[b] - sums[a] + end for (a, b), end in stages]

    def max_s(self, bounds: Sequence[int]) -> float:
        return max(self.stage_s(bounds))

    def stage_bytes(self, s: int, a: int, b: int) -> float:
        return self.byte_sums[s][b] - self.byte_sums[s][a] + self.end_bytes[s]

    def rank_bytes(self, bounds: Sequence[int]) -> list[float]:
        sizes = [self.stage_bytes(s, a, b) for s, (a, b) in enumerate(pairwise(bounds))]
        return [sum(sizes[s] for s in stages) for stages in self.stages_of]

    def excess(self, bounds: Sequence[int]) -> float:
        """Return the bytes over the limit of the rank that is most over it; negative if all fit."""
        sizes = zip(self.rank_bytes(bounds), self.limits, strict=True)
        return max(size - limit for size, limit in sizes)

    def fits(self, bounds: Sequence[int]) -> bool:
        return self.excess(bounds) <= 0

    def unevenness(self, bounds: Sequence[int]) -> tuple[float, float, float]:
        """Return the numbers to minimize: largest stage, largest sum of a rank, sum of squares."""
        stage_s = self.stage_s(bounds)
        rank_s = max(sum(stage_s[s] for s in stages) for stages in self.stages_of)
        return max(stage_s), rank_s, sum(s * s for s in stage_s)

    def first_start(self, s: int) -> list[int]:
        """Return for each end b the first start a with which stage s fits its room; b + 1: none."""
        sums, room = self.byte_sums[s], self.room[s] - self.end_bytes[s]
        starts, a = list[int](), 0
        for b in range(self.num_layers + 1):
            while a <= b and sums[b] - sums[a] > room:
                a += 1
            starts.append(a)
        return starts

    def last_end(self, s: int, cap: float, room: float) -> list[int]:
        """Return for each start a the last end b with stage s within cap and room; a - 1: none."""
        cap_s, room_bytes, ends, b = cap, room - self.end_bytes[s], list[int](), -1
        seconds, sizes, end_s = self.s_sums, self.byte_sums[s], self.end_s[s]
        for a in range(self.num_layers + 1):
            b = max(b, a - 1)
            while b < self.num_layers and (
                seconds[b + 1] - seconds[a] + end_s <= cap_s
                and sizes[b + 1] - sizes[a] <= room_bytes
            ):
                b += 1
            ends.append(b)
        return ends

    def costs_between(self, low: float, high: float) -> list[float]:
        """Return the costs that stages can have, above `low` and at most `high`, in order."""
        sums, every = self.s_sums, range(self.num_layers + 1)
        spans = (sums[b] - sums[a] + 0.0 for a in every for b in every[a:])
        found = {cost for cost in spans if low < cost <= high}
        found |= {sums[b] - sums[0] + self.end_s[0] for b in every}
        found |= {sums[-1] - sums[a] + self.end_s[-1] for a in every}
        return sorted(cost for cost in found if low < cost <= high)


def fitting(layers: Layers, rank_of: Sequence[int], memory: Memory) -> Callable[[Partition], bool]:
    """Return the test of whether ranks can hold a partition: the `fits` of `cut_layers.improved`.

    >>> fits = fitting(Layers((1.0,) * 4, layer_bytes=(3,) * 4), (0, 1), Memory((6, 6), (1, 1)))
    >>> fits((range(1), range(1, 4)))
    False
    """
    work = Work(layers, rank_of, memory)
    return lambda partition: work.fits(bounds_of(partition))


def bounds_of(partition: Partition) -> list[int]:
    """Return the layers at which stages begin, and the number of layers.

    >>> bounds_of((range(3), range(3, 4)))
    [0, 3, 4]
    """
    return [0, *(stage.stop for stage in partition)]


def partition_of(bounds: Sequence[int]) -> Partition:
    """Return the partition with these bounds: the reverse of `bounds_of`."""
    return tuple(range(a, b) for a, b in pairwise(bounds))


def _sums(numbers: Sequence[float]) -> list[float]:
    return list(accumulate(numbers, initial=0))
