"""Traits of executors, for checks, commands and the planner, which need them before a run."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EngineTraits:
    """How an executor runs a schedule. Neither: no ranks, one device runs the whole model."""

    # all ranks run one program in lockstep on a ring: values in slots, stages padded to the largest
    in_ticks: bool = False
    # the host dispatches each task as a program, with separate temporaries; ranks run freely
    dispatches_tasks: bool = False

    @property
    def is_pipelined(self) -> bool:
        return self.in_ticks or self.dispatches_tasks

    def rank_layers(self, sizes: Sequence[int], rank_of: Sequence[int]) -> int:
        """Return the number of layers of the largest rank, padding included.

        sizes: number of layers of each stage. rank_of: rank of each stage.

        >>> [engine.rank_layers((2, 1), (0, 0)) for engine in (IN_TICKS, BY_TASKS)]
        [4, 3]
        """
        return padded_layers(sizes, rank_of) if self.in_ticks else max(rank_sums(sizes, rank_of))


ALONE = EngineTraits()
IN_TICKS, BY_TASKS = EngineTraits(in_ticks=True), EngineTraits(dispatches_tasks=True)


def padded_layers(sizes: Sequence[int], rank_of: Sequence[int]) -> int:
    """Return the number of layer slots of each rank, if all stages are padded to the largest."""
    return max(sizes) * max(Counter(rank_of).values())


def rank_sums(values: Sequence[Any], rank_of: Sequence[int]) -> list[Any]:
    """Return the sum of each rank's `values`, the numbers of its stages.

    >>> rank_sums((3, 2, 1), (0, 1, 0))
    [4, 2]
    """
    pairs = [*zip(rank_of, values, strict=True)]
    return [sum(n for at, n in pairs if at == rank) for rank in range(max(rank_of) + 1)]
