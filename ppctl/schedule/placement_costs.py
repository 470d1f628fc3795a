"""The memory that tasks take and free, and a model's costs on a placement of stages.

An activation lives from the start of a forward to the end of its B or W. An I frees nothing, since
its W needs the activation (the convention of the zero-bubble papers).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add

from ppctl.schedule.costs import OF_STAGES, Costs, OfStages, OpTimes, costs_of_stages
from ppctl.schedule.engine_traits import padded_layers
from ppctl.schedule.ir import KINDS, Schedule
from ppctl.schedule.partition.partition import Partition, stage_costs


@dataclass(frozen=True)
class Placed:
    """A model on a placement: the costs of its stages' tasks, and the memory of its ranks.

    pending_bytes: bytes that I hands to W in place of costs.activation_bytes; None: the activations
    stay until W.
    """

    costs: Costs
    fixed_bytes: tuple[float, ...] = ()  # bytes of each rank's parameters, optimizer and gradients
    pending_bytes: OfStages | None = None
    # bytes of a task's temporaries, for each stage, by kind
    temporary_bytes: tuple[Mapping[str, float], ...] = ()

    def anywhere(self, rank_of: tuple[int, ...]) -> Placed:
        """Return these costs, whatever the placement; `self.anywhere` is a `CostsOf`."""
        del rank_of
        return self

    def check(self, num_stages: int) -> None:
        """Raise ConfigError unless each tuple has one entry for each stage."""
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
        held = self.fixed_bytes or (0.0,) * schedule.num_ranks
        if self.temporary_bytes:  # the most of a task on each rank, counted at all times
            kinds = set(KINDS) & (schedule.kinds or {*OF_STAGES})  # without tasks: a split schedule
            most = [max(each[kind] for kind in kinds) for each in self.temporary_bytes]
            held = map(add, held, (max(most[s] for s in held) for held in schedule.stages_of))
        held = tuple(map(math.ceil, held))
        stash = tuple(math.ceil(self.costs.stage_bytes(s, chunks)) for s in stages)
        if self.pending_bytes is None:
            return Ledger(held, stash)
        pending = replace(self.costs, activation_bytes=self.pending_bytes)
        return Ledger(held, stash, tuple(math.ceil(pending.stage_bytes(s, chunks)) for s in stages))


# function from the rank of each stage to costs and memory; may raise ConfigError
CostsOf = Callable[[tuple[int, ...]], Placed]


@dataclass(frozen=True)
class Ledger:
    """The memory of a placement in whole units: chunks, or bytes.

    pending: memory of a microbatch on each stage from the start of I to the end of W; the stash
    then ends with I. None: the stash stays until W.
    """

    held: tuple[int, ...]  # memory of each rank at all times
    stash: tuple[int, ...]  # memory of each stage from the start of F to the end of B or W
    pending: tuple[int, ...] | None = None

    @staticmethod
    def counted(schedule: Schedule) -> Ledger:
        """Return the ledger with one unit for each stash."""
        return Ledger((0,) * schedule.num_ranks, (1,) * schedule.num_stages)

    def rise(self, stage: int, kind: str) -> int:
        """Return the memory that a task adds on its rank while it runs, in the ledger's units."""
        if kind == "F":
            return self.stash[stage]
        return self.pending[stage] if kind == "I" and self.pending is not None else 0

    def change(self, stage: int, kind: str) -> int:
        """Return the change of a rank's memory from before a task to after it, in ledger units."""
        if kind not in KINDS:
            return 0
        stash, pending = self.stash[stage], self.stash[stage]  # by default the stash stays until W
        if self.pending is not None:
            pending = self.pending[stage]
        return {"F": stash, "B": -stash, "I": pending - stash, "W": -pending}[kind]

    @cached_property
    def reserve(self) -> int:
        """Return the memory that an I adds. Forwards leave it free, so that no I gets stuck."""
        return max(self.pending or (0,))

    def peaks(self, schedule: Schedule) -> tuple[int, ...]:
        """Return the peak memory of each rank in the order of its tasks."""
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
        """Return the least peak of the fullest rank in any order: one microbatch on all its stages.

        All forwards of a microbatch run before its backwards, so no order needs less.
        """
        ranks = zip(self.held, schedule.stages_of, strict=True)
        return max(held + sum(self.stash[s] for s in stages) for held, stages in ranks)


def peak_activations(schedule: Schedule) -> tuple[float, ...]:
    """Return each rank's peak activations, in microbatches through 1/p of the model.

    If ranks have V chunks, a microbatch's activations in one chunk count as 1/V.

    >>> from ppctl.schedule.families.one_f_one_b import one_f_one_b
    >>> peak_activations(one_f_one_b(3, 8))
    (3.0, 2.0, 1.0)
    """
    return tuple(peak / schedule.num_chunks for peak in Ledger.counted(schedule).peaks(schedule))


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of a model's pieces on ranks of executor=mpmd."""

    layer: float = 0.0  # bytes of a layer at all times
    padded: float = 0.0  # bytes per layer of state that is padded to the largest stage
    stash: float = 0.0  # bytes that a layer's forward keeps
    pending: float | None = None  # bytes that I hands to W instead; None: the stash stays until W
    stage_stash: float = 0.0  # bytes of a microbatch that a stage keeps besides its layers' stashes
    embed: float = 0.0  # bytes of the first stage's rank at all times
    head: float = 0.0  # bytes of the last stage's rank at all times
    rank: float = 0.0  # bytes of every rank at all times, on top of the fields above
    # (kind of a task, its stage's layers, has_head=) -> bytes of its temporaries; None: not counted
    temporaries: Callable[..., int] | None = None


@dataclass(frozen=True)
class LayerCosts:
    """The costs of a model's layers on any placement of its stages.

    layers: cost of each layer relative to their mean; None: all equal. divide: function from the
    rank of each stage to a partition; may raise ConfigError. keeps_input, split: see
    `costs_of_stages`.

    >>> from ppctl.schedule.costs import FREE, PieceTimes
    >>> times = OpTimes(FREE, PieceTimes(1.0, 1.0, 1.0), PieceTimes(2.0, 0.0, 0.0))
    >>> LayerCosts(None, times, lambda _: (range(2),) * 2).on((0, 1)).costs.forward_s
    (2.0, 4.0)
    """

    layers: tuple[float, ...] | None
    times: OpTimes
    divide: Callable[[tuple[int, ...]], Partition]
    bytes: LayerBytes = LayerBytes()
    keeps_input: bool = False
    split: bool = False

    def on(self, rank_of: tuple[int, ...]) -> Placed:
        """Return the costs on a placement; `self.on` is a `CostsOf`."""
        # 1. costs and memory of stages
        partition, held = self.divide(rank_of), self.bytes
        sizes = stage_costs(partition, embed=0.0, head=0.0, layers=self.layers)
        costs = costs_of_stages(self.times, sizes, keeps_input=self.keeps_input, split=self.split)
        counts = [len(layers) for layers in partition]
        stash = tuple(n * held.stash + held.stage_stash for n in counts)
        pending = None if held.pending is None else tuple(n * held.pending for n in counts)

        temporaries, last = tuple[dict[str, float], ...](), len(counts) - 1
        if (of := held.temporaries) is not None:
            temporaries = tuple(
                {kind: of(kind, n, has_head=s == last) for kind in KINDS}
                for s, n in enumerate(counts)
            )

        # 2. bytes of each rank
        padded = padded_layers(counts, rank_of) * held.padded
        ranks = [held.rank + padded] * (max(rank_of) + 1)
        for rank, n in zip(rank_of, counts, strict=True):
            ranks[rank] += n * held.layer
        ranks[rank_of[0]] += held.embed
        ranks[rank_of[-1]] += held.head
        return Placed(replace(costs, activation_bytes=stash), tuple(ranks), pending, temporaries)
