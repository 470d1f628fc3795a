"""The costs of a model on a placement of its stages, and the memory that tasks take of a rank and give back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from ppctl.schedule.costs import Costs, OfStages
from ppctl.schedule.ir import Schedule


@dataclass(frozen=True)
class Placed:
    """A model on a placement: the costs of its stages' tasks, and what its ranks hold.

    costs.activation_bytes: what a forward keeps. pending_bytes: what I hands to W in place of it; None: what the
    forward keeps stays until W. fixed_bytes: of each rank, whatever runs (parameters, optimizer, sums of gradients).
    """

    costs: Costs
    fixed_bytes: tuple[float, ...] = ()
    pending_bytes: OfStages | None = None

    def anywhere(self, rank_of: tuple[int, ...]) -> Placed:
        """Return the same for any placement: a `CostsOf`."""
        del rank_of
        return self

    def check(self, num_stages: int) -> None:
        """Raise ConfigError where a tuple has not one entry a stage."""
        self.costs.check(num_stages)
        if self.pending_bytes is not None:
            replace(self.costs, activation_bytes=self.pending_bytes).check(num_stages)

    def ledger(self, schedule: Schedule) -> Ledger:
        """Return the bytes of a schedule on this placement, rounded up.

        >>> from ppctl.schedule.families.one_f_one_b import one_f_one_b
        >>> Placed(Costs(activation_bytes=(3.0, 2.5)), (10.0, 10.0)).ledger(one_f_one_b(2, 4))
        Ledger(held=(10, 10), stash=(3, 3), pending=None)
        """
        stages, chunks = range(schedule.num_stages), schedule.num_chunks
        held = tuple(map(math.ceil, self.fixed_bytes or (0.0,) * schedule.num_ranks))
        stash = tuple(math.ceil(self.costs.stage_bytes(s, chunks)) for s in stages)
        if self.pending_bytes is None:
            return Ledger(held, stash)
        pending = replace(self.costs, activation_bytes=self.pending_bytes)
        return Ledger(held, stash, tuple(math.ceil(pending.stage_bytes(s, chunks)) for s in stages))


CostsOf = Callable[[tuple[int, ...]], Placed]  # of the rank of each stage; ConfigError: the model is not divided so


@dataclass(frozen=True)
class Ledger:
    """The memory of a placement in whole units: chunks, or bytes.

    held: by each rank, whatever runs. stash: of each stage, from the start of a microbatch's F to the end of its B or
    W. pending: of each stage, from the start of I to the end of W, where the stash ends with I; None: it does not.
    """

    held: tuple[int, ...]
    stash: tuple[int, ...]
    pending: tuple[int, ...] | None = None

    @staticmethod
    def counted(schedule: Schedule) -> Ledger:
        """Return the ledger that counts the stashes of chunks."""
        return Ledger((0,) * schedule.num_ranks, (1,) * schedule.num_stages)

    def rise(self, stage: int, kind: str) -> int:
        """Return what a task takes in addition while it runs."""
        if kind == "F":
            return self.stash[stage]
        return self.pending[stage] if kind == "I" and self.pending is not None else 0

    def change(self, stage: int, kind: str) -> int:
        """Return by how much a rank holds more once the task has run."""
        if kind == "F":
            return self.stash[stage]
        if kind == "B" or self.pending is None:
            return 0 if kind == "I" else -self.stash[stage]
        return self.pending[stage] - self.stash[stage] if kind == "I" else -self.pending[stage]

    @cached_property
    def reserve(self) -> int:
        """Return the memory that an input gradient may take in addition, which must not keep it from running."""
        return max(self.pending or (0,))

    def peaks(self, schedule: Schedule) -> tuple[int, ...]:
        """Return the most that each rank holds at the same time, in the order of its tasks."""
        found: list[int] = []
        for rank, tasks in enumerate(schedule.ranks):
            live = peak = self.held[rank]
            for stage, kind, _ in tasks:
                peak = max(peak, live + self.rise(stage, kind))
                live += self.change(stage, kind)
            found.append(peak)
        return tuple(found)

    def least(self, schedule: Schedule) -> int:
        """Return the least that the fullest rank holds in any order: a microbatch in all of its stages at once.

        No backward of a microbatch runs before its last forward.
        """
        return max(
            held + sum(self.stash[s] for s in stages)
            for held, stages in zip(self.held, schedule.stages_of, strict=True)
        )
