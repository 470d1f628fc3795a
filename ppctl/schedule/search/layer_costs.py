"""A model as its layers, embedding and head, from which the costs of every placement of stages follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ppctl.schedule.costs import Costs
from ppctl.schedule.partition.partition import Partition, stage_costs
from ppctl.schedule.search.ledger import Placed


class Piece(NamedTuple):
    """Seconds of one microbatch through a piece of a model, and bytes: always, of its forward, what I hands to W."""

    forward_s: float = 0.0
    input_grad_s: float = 0.0
    weight_grad_s: float = 0.0
    fixed_bytes: float = 0.0
    stash_bytes: float = 0.0
    pending_bytes: float | None = None  # None: what the forward keeps stays until W


NOTHING = Piece()
SECONDS = Piece._fields[:3]


@dataclass(frozen=True)
class LayerCosts:
    """The costs of a model's pieces, and how its layers are divided over stages.

    layers: of each layer, in those of `layer`. divide: from the rank of each stage to the layers of each stage;
    ConfigError where that cannot be. rank_bytes: held by every rank besides its pieces. padded_bytes: of a layer
    besides its own, held by every rank as if all its stages were as large as the largest. stage_stash_bytes: kept of a
    microbatch by every stage besides its layers. head_in_backward: the forward of the last stage runs in its backward
    (remat=full).

    >>> half = LayerCosts((1.0,) * 4, Piece(1.0, 1.0, 1.0), head=Piece(2.0, 2.0, 2.0), divide=lambda _: (range(2),) * 2)
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
        """Return the costs on a placement: the `costs` of `search.auto.choose`."""
        partition = self.divide(rank_of)
        sizes = stage_costs(partition, embed=0.0, head=0.0, layers=self.layers)
        seconds = {name: [size * getattr(self.layer, name) for size in sizes] for name in SECONDS}
        for stage, piece in ((0, self.embed), (-1, self.head)):
            for name in SECONDS:
                seconds[name][stage] += getattr(piece, name)
        if self.head_in_backward:
            seconds["forward_s"][-1] = 0.0
        counts = [len(layers) for layers in partition]
        fixed = [n * self.layer.fixed_bytes for n in counts]
        stash = [n * self.layer.stash_bytes + self.stage_stash_bytes for n in counts]
        pending = None if self.layer.pending_bytes is None else tuple(n * self.layer.pending_bytes for n in counts)
        padded = max(Counter(rank_of).values()) * max(counts) * self.padded_bytes
        ranks = [self.rank_bytes + padded] * (max(rank_of) + 1)
        for stage, piece in ((0, self.embed), (-1, self.head)):
            stash[stage] += piece.stash_bytes
            fixed[stage] += piece.fixed_bytes
        for rank, size in zip(rank_of, fixed, strict=True):
            ranks[rank] += size
        costs = Costs(*map(tuple, seconds.values()), transfer_s=self.hop_s, activation_bytes=tuple(stash))
        return Placed(costs, tuple(ranks), pending)
