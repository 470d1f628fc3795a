"""How an executor runs a schedule, as checks, commands and the planner know it before it runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class EngineTraits:
    """The traits of an executor.

    timeline: "ticks": ranks run in lockstep, as one program on a ring; "tasks": each task is a
    program, dispatched by the host to ranks that run freely; None: there are no ranks, one device
    runs the whole model.
    """

    timeline: Literal["ticks", "tasks"] | None

    @property
    def is_pipelined(self) -> bool:
        return self.timeline is not None

    @property
    def in_ticks(self) -> bool:
        """Whether values have the slots of ticks, and all ranks hold stages like the largest."""
        return self.timeline == "ticks"

    @property
    def dispatches_tasks(self) -> bool:
        """Whether programs, with their temporaries, are those of tasks, and not of a whole step."""
        return self.timeline == "tasks"

    def rank_layers(self, sizes: Sequence[int], rank_of: Sequence[int]) -> int:
        """Return the layers of the largest rank, with padding, of the layers of each stage.

        >>> [engine.rank_layers((2, 1), (0, 0)) for engine in (IN_TICKS, BY_TASKS)]
        [4, 3]
        """
        of_ranks = layers_of_ranks(sizes, rank_of)
        return max(sizes) * (len(rank_of) // len(of_ranks)) if self.in_ticks else max(of_ranks)


ALONE, IN_TICKS, BY_TASKS = EngineTraits(None), EngineTraits("ticks"), EngineTraits("tasks")


def layers_of_ranks(sizes: Sequence[int], rank_of: Sequence[int]) -> list[int]:
    """Return the number of layers of each rank, given each stage's layers and rank."""
    sums = [0] * (max(rank_of) + 1)
    for size, rank in zip(sizes, rank_of, strict=True):
        sums[rank] += size
    return sums
