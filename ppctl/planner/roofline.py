"""Seconds by counting: of work on a device of known speeds, and of collectives on known links.

An operation takes as long as its arithmetic or its memory traffic, whichever is longer (Williams, Waterman, Patterson
2009, CACM 52). Collectives run round a ring (Thakur, Rabenseifner, Gropp 2005, IJHPCA 19). Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Op:
    """An operation of a task on one example. `fixed_bytes`, of weights, do not grow with the examples."""

    flops: float
    bytes: float
    fixed_bytes: float = 0.0

    @property
    def is_nothing(self) -> bool:
        return not (self.flops or self.bytes or self.fixed_bytes)


@dataclass(frozen=True)
class Speed:
    """The speed of a device."""

    flops_per_s: float
    bytes_per_s: float

    def seconds(self, ops: Iterable[Op], examples: float) -> float:
        """Return the seconds of operations on so many examples, one operation after the other.

        >>> Speed(flops_per_s=100.0, bytes_per_s=10.0).seconds([Op(50.0, 1.0), Op(0.0, 1.0, fixed_bytes=2.0)], 4)
        2.6
        """
        return sum(
            max(examples * op.flops / self.flops_per_s, (examples * op.bytes + op.fixed_bytes) / self.bytes_per_s)
            for op in ops
        )


@dataclass(frozen=True)
class Link:
    """From a device to the next one of a ring: seconds of an empty message, bytes a second one way."""

    latency_s: float
    bytes_per_s: float

    def hop_s(self, num_bytes: float) -> float:
        """Return the seconds of a message to the next device."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def gather_s(self, num_bytes: float, size: int) -> float:
        """Return the seconds in which all `size` devices get `num_bytes`, of which each has an equal share.

        Or in which each gets the sum of its share.

        >>> Link(0.0, 10.0).gather_s(40.0, 4)
        3.0
        """
        return (size - 1) * self.hop_s(num_bytes / size)

    def sum_s(self, num_bytes: float, size: int) -> float:
        """Return the seconds in which all devices get the sum of what each has: shares are summed, then gathered."""
        return 2 * self.gather_s(num_bytes, size)


@dataclass(frozen=True)
class PieceWork:
    """The operations of one example through a piece of the model. Recomputing costs a forward."""

    forward: tuple[Op, ...]
    input_grad: tuple[Op, ...]
    weight_grad: tuple[Op, ...]


@dataclass(frozen=True)
class ModelWork:
    """The operations of a model, and the sizes of what passes through it."""

    embed: PieceWork
    layer: PieceWork
    head: PieceWork
    x_bytes: int  # of what passes between layers, an example
    stash_bytes: dict[str, int]  # what a forward keeps of a layer, an example, by remat; full: of a stage
    pending_bytes: dict[str, int]  # what I hands to W of a layer, an example, by remat

    def flops(self, num_layers: int) -> float:
        """Return the FLOPs of an example through the model and back, nothing recomputed."""
        pieces = ((self.embed, 1), (self.layer, num_layers), (self.head, 1))
        return sum(number * op.flops for piece, number in pieces for ops in vars(piece).values() for op in ops)
