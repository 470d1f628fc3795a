"""A model as layers, embedding and head: the costs of every placement of stages follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ppctl.schedule.costs import Costs
from ppctl.schedule.partition.partition import Partition, stage_costs
from ppctl.schedule.search.placement_costs import Placed


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
