"""The memory that tasks take and give back, and the costs of a model on a placement of stages.

An activation lives from the start of a forward to the end of its B or W; an I frees nothing, since
its W needs the activation (the convention of the zero-bubble papers).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ppctl.schedule.costs import Costs, OfStages
from ppctl.schedule.ir import KINDS, Schedule
from ppctl.schedule.partition.partition import Partition, stage_costs


@dataclass(frozen=True)
class Placed:
    """A model on a placement: the costs of its stages' tasks, and the memory of its ranks.

    costs.activation_bytes: kept by a forward. pending_bytes: handed from I to W in its place; None:
    the stash stays until W. fixed_bytes: of each rank, always (parameters, optimizer, gradients).
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


CostsOf = Callable[[tuple[int, ...]], Placed]  # of the rank of each stage; may raise ConfigError


@dataclass(frozen=True)
class Ledger:
    """The memory of a placement in whole units: chunks, or bytes.

    held: by each rank, always. stash: of each stage, from the start of a microbatch's F to the end
    of its B or W. pending: of each stage, from the start of I to the end of W, if the stash ends
    with I; None: it does not.
    """

    held: tuple[int, ...]
    stash: tuple[int, ...]
    pending: tuple[int, ...] | None = None

    @staticmethod
    def counted(schedule: Schedule) -> Ledger:
        """Return the ledger that counts the stashes of chunks."""
        return Ledger((0,) * schedule.num_ranks, (1,) * schedule.num_stages)

    def rise(self, stage: int, kind: str) -> int:
        """Return the extra memory of a task while it runs."""
        if kind == "F":
            return self.stash[stage]
        return self.pending[stage] if kind == "I" and self.pending is not None else 0

    def change(self, stage: int, kind: str) -> int:
        """Return the change of a rank's memory once the task has run."""
        if kind not in KINDS:
            return 0
        stash, pending = self.stash[stage], self.stash[stage]  # from I to W the stash stays
        if self.pending is not None:
            pending = self.pending[stage]
        return {"F": stash, "B": -stash, "I": pending - stash, "W": -pending}[kind]

    @cached_property
    def reserve(self) -> int:
        """Return the extra memory of an input gradient, which must not keep it from running."""
        return max(self.pending or (0,))

    def peaks(self, schedule: Schedule) -> tuple[int, ...]:
        """Return the most that each rank holds at the same time, in the order of its tasks."""
        peaks: list[int] = []
        for live, tasks, counts in zip(self.held, schedule.ranks, schedule.counts, strict=True):
            peak = live
            steps = {(s, kind): (self.rise(s, kind), self.change(s, kind)) for kind, s, _ in counts}
            for task in tasks:
                rise, change = steps[task[:2]]
                peak = max(peak, live + rise)
                live += change
            peaks.append(peak)
        return tuple(peaks)

    def least(self, schedule: Schedule) -> int:
        """Return the least memory of the fullest rank in any order: a microbatch in all its stages.

        No backward of a microbatch runs before its last forward.
        """
        ranks = zip(self.held, schedule.stages_of, strict=True)
        return max(held + sum(self.stash[s] for s in stages) for held, stages in ranks)


def peak_activations(schedule: Schedule) -> tuple[float, ...]:
    """Return each rank's most activations at once, in microbatches through 1/p of the model.

    The stash of a chunk counts 1/V.

    >>> from ppctl.schedule.families.one_f_one_b import one_f_one_b
    >>> peak_activations(one_f_one_b(3, 8))
    (3.0, 2.0, 1.0)
    """
    return tuple(peak / schedule.num_chunks for peak in Ledger.counted(schedule).peaks(schedule))


class Piece(NamedTuple):
    """Seconds of a microbatch through a piece of a model, and its bytes."""

    forward_s: float = 0.0
    input_grad_s: float = 0.0
    weight_grad_s: float = 0.0
    fixed_bytes: float = 0.0  # always held
    stash_bytes: float = 0.0  # that a forward keeps
    pending_bytes: float | None = None  # that I hands to W instead; None: the stash stays until W


NOTHING = Piece()
SECONDS = Piece._fields[:3]


@dataclass(frozen=True)
class LayerCosts:
    """The costs of a model's pieces, and how its layers are divided over stages.

    layers: of each layer, in units of `layer`. divide: from the rank of each stage to the layers of
    each stage, or ConfigError. rank_bytes: held by every rank besides its pieces. padded_bytes: of
    a layer besides its own, held by every rank as if all its stages were as large as the largest.
    stage_stash_bytes: kept of a microbatch by every stage besides its layers. head_in_backward: the
    forward of the last stage runs in its backward (remat=full).

    >>> one, four = Piece(1.0, 1.0, 1.0), (1.0,) * 4
    >>> half = LayerCosts(four, one, lambda _: (range(2),) * 2, head=Piece(2.0, 2.0, 2.0))
    >>> half.on((0, 1)).costs.forward_s
    (2.0, 4.0)
    """

    layers: tuple[float, ...]
    layer: Piece
    divide: Callable[[tuple[int, ...]], Partition]
    embed: Piece = NOTHING
    head: Piece = NOTHING
    hop_s: float = 0.0
    rank_bytes: float = 0.0
    padded_bytes: float = 0.0
    stage_stash_bytes: float = 0.0
    head_in_backward: bool = False

    def on(self, rank_of: tuple[int, ...]) -> Placed:
        """Return the costs on a placement: the `costs` of `auto_search.choose`."""
        # 1. seconds and bytes of each stage
        partition = self.divide(rank_of)
        sizes = stage_costs(partition, embed=0.0, head=0.0, layers=self.layers)
        seconds = {name: [size * getattr(self.layer, name) for size in sizes] for name in SECONDS}
        counts = [len(layers) for layers in partition]
        fixed = [n * self.layer.fixed_bytes for n in counts]
        stash = [n * self.layer.stash_bytes + self.stage_stash_bytes for n in counts]
        handed = self.layer.pending_bytes
        pending = None if handed is None else tuple(n * handed for n in counts)
        # 2. embedding and head
        for stage, piece in ((0, self.embed), (-1, self.head)):
            for name in SECONDS:
                seconds[name][stage] += getattr(piece, name)
            stash[stage] += piece.stash_bytes
            fixed[stage] += piece.fixed_bytes
        if self.head_in_backward:
            seconds["forward_s"][-1] = 0.0
        # 3. bytes of each rank
        padded = max(Counter(rank_of).values()) * max(counts) * self.padded_bytes
        ranks = [self.rank_bytes + padded] * (max(rank_of) + 1)
        for rank, size in zip(rank_of, fixed, strict=True):
            ranks[rank] += size
        of_stages = map(tuple, seconds.values())
        costs = Costs(*of_stages, transfer_s=self.hop_s, activation_bytes=tuple(stash))
        return Placed(costs, tuple(ranks), pending)
