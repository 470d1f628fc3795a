"""Traits of executors, for checks, commands and the planner, which need them before a run."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class EngineTraits:
    """How an executor runs a schedule.

    timeline: "ticks": all ranks run one program in lockstep, on a ring. "tasks": the host
    dispatches each task as a program, and ranks run freely. None: no ranks, one device runs the
    whole model.
    """

    timeline: Literal["ticks", "tasks"] | None

    @property
    def is_pipelined(self) -> bool:
        return self.timeline is not None

    @property
    def in_ticks(self) -> bool:
        """Return whether ranks run in ticks: values in slots, all stages padded to the largest."""
        return self.timeline == "ticks"

    @property
    def dispatches_tasks(self) -> bool:
        """Return whether each task, not the whole step, is a program, with separate temporaries."""
        return self.timeline == "tasks"

    def rank_layers(self, sizes: Sequence[int], rank_of: Sequence[int]) -> int:
        """Return the number of layers of the largest rank, padding included.

        sizes: number of layers of each stage. rank_of: rank of each stage.

        >>> [engine.rank_layers((2, 1), (0, 0)) for engine in (IN_TICKS, BY_TASKS)]
        [4, 3]
        """
        return padded_layers(sizes, rank_of) if self.in_ticks else max(layers_of(sizes, rank_of))


ALONE, IN_TICKS, BY_TASKS = EngineTraits(None), EngineTraits("ticks"), EngineTraits("tasks")


def padded_layers(sizes: Sequence[int], rank_of: Sequence[int]) -> int:
    """Return the number of layer slots of each rank, if all stages are padded to the largest."""
    return max(sizes) * max(Counter(rank_of).values())


def layers_of(sizes: Sequence[int], rank_of: Sequence[int]) -> list[int]:
    """Return the number of layers of each rank, given each stage's layers and rank."""
    sums = [0] * (max(rank_of) + 1)
    for size, rank in zip(sizes, rank_of, strict=True):
        sums[rank] += size
    return sums
