"""Seconds by counting: of work on a device of known speeds, and of collectives on known links.

An operation takes as long as its arithmetic or its memory traffic, whichever is longer (Williams, Waterman, Patterson
2009, CACM 52). Collectives run round a ring (Thakur, Rabenseifner, Gropp 2005, IJHPCA 19). Standard library only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

TILE = 128, 256  # of a matrix product's result that a core makes at a time, either way round: cuBLAS's most efficient
LEAST_DEPTH = 128  # of the numbers that are summed up, of a core's share where several cores make one tile

Kernel = Literal["product", "attention_forward", "attention_backward"]
Collective = Literal["gather", "sum", "hop"]  # gather: or a sum that is scattered


@dataclass(frozen=True)
class Extent:
    """A number of rows or the like: so many for each example, and so many whatever the examples."""

    each: float = 0.0
    fixed: float = 0.0

    def of(self, examples: float) -> float:
        return examples * self.each + self.fixed


@dataclass(frozen=True)
class ProductShape:
    """Matrix products that run as one: `number` of them, [rows, depth] x [depth, columns]."""

    rows: Extent
    columns: Extent
    depth: Extent
    number: Extent = Extent(fixed=1.0)

    def efficiency(self, examples: float, cores: int) -> float:
        """Return the share of the cores' time in which they compute what is asked for, 0..1.

        The result is cut into tiles, each of one core, and all cores go on to their next tile together: what sticks out
        of the last tiles, and cores that the last wave of tiles leaves idle, are lost (NVIDIA, Matrix Multiplication
        Background User's Guide: tile and wave quantization). Where there are fewer tiles than cores, several make one
        tile, each of a share of its depth (split-K).

        >>> sizes = [Extent(fixed=n) for n in (4096, 2048, 2048)]  # 256 tiles, in two waves of 132
        >>> round(ProductShape(*sizes).efficiency(1, cores=132), 4)
        0.9697
        """
        rows, columns, depth, number = (n.of(examples) for n in (self.rows, self.columns, self.depth, self.number))
        short, wide = TILE
        tiles = number * min(
            ceil(rows / short) * ceil(columns / wide),
            ceil(rows / wide) * ceil(columns / short),
        )
        shares = max(1, min(cores // ceil(tiles), int(depth // LEAST_DEPTH))) if tiles else 1
        waves = ceil(tiles * shares / cores)
        return number * rows * columns * shares / (waves * cores * short * wide) if waves else 1.0


@dataclass(frozen=True)
class Op:
    """An operation of a task on one example. `fixed_bytes`, of weights, do not grow with the examples.

    sum_bytes: of the sum that a product's result is added to, read and written, whatever the examples; a pass of its
    own where the device's products do not add.
    axis: of the mesh, along which devices that divide a stage send: bytes are then those of the array that is gathered,
    summed, scattered or handed on, and go by a link, not by memory.
    """

    flops: float
    bytes: float
    fixed_bytes: float = 0.0
    kernel: Kernel = "product"  # what computes the FLOPs, if there are any
    shape: ProductShape | None = None  # of matrix products
    sum_bytes: float = 0.0
    axis: str | None = None
    collective: Collective = "gather"
    times: Extent = Extent(fixed=1.0)  # that it is sent, each time a part of the bytes

    def sent_s(self, examples: float, link: Link, size: int) -> float:
        """Return the seconds of a collective over `size` devices."""
        times = self.times.of(examples)
        num_bytes = (examples * self.bytes + self.fixed_bytes) / times
        if self.collective == "hop":
            return times * link.hop_s(num_bytes)
        return times * (link.gather_s(num_bytes, size) if self.collective == "gather" else link.sum_s(num_bytes, size))

    @property
    def is_nothing(self) -> bool:
        return not (self.flops or self.bytes or self.fixed_bytes or self.sum_bytes)


@dataclass(frozen=True)
class Speed:
    """The speed of a device. FLOP/s are those of large matrix products, and of kernels of attention; None: as products.

    cores: those that share the tiles of a product; None: products of all sizes are as fast. adds: a product adds its
    result to a sum itself, as cuBLAS's do.
    """

    flops_per_s: float
    bytes_per_s: float
    attention_forward: float | None = None
    attention_backward: float | None = None
    cores: int | None = None
    adds: bool = False

    def seconds(self, ops: Iterable[Op], examples: float) -> float:
        """Return the seconds of operations on so many examples, one operation after the other.

        >>> Speed(flops_per_s=100.0, bytes_per_s=10.0).seconds([Op(50.0, 1.0), Op(0.0, 1.0, fixed_bytes=2.0)], 4)
        2.6
        """
        return sum(self._seconds(op, examples) for op in ops if op.axis is None)

    def _seconds(self, op: Op, examples: float) -> float:
        traffic, added = examples * op.bytes + op.fixed_bytes, op.sum_bytes
        compute_s = examples * op.flops / self.reached(op, examples)
        if self.adds:
            return max(compute_s, (traffic + added) / self.bytes_per_s)
        return max(compute_s, traffic / self.bytes_per_s) + added / self.bytes_per_s

    def reached(self, op: Op, examples: float) -> float:
        """Return the FLOP/s of an operation on so many examples, where memory does not hold it up."""
        if op.kernel == "attention_forward":
            return self.attention_forward or self.flops_per_s
        if op.kernel == "attention_backward":
            return self.attention_backward or self.flops_per_s
        if op.shape is None or self.cores is None:
            return self.flops_per_s
        return self.flops_per_s * op.shape.efficiency(examples, self.cores)


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
    """The operations of one example through a piece of the model.

    redo: products of the forward that a backward from the piece's input runs again: not the last ones, whose result
    nothing but the next piece needs. None: all of the forward.
    """

    forward: tuple[Op, ...]
    input_grad: tuple[Op, ...]
    weight_grad: tuple[Op, ...]
    redo: tuple[Op, ...] | None = None

    @property
    def once(self) -> tuple[Op, ...]:
        """All operations where nothing is recomputed."""
        return self.forward + self.input_grad + self.weight_grad

    def along(self, axes: Collection[str]) -> PieceWork:
        """Return the piece without what devices send along other axes."""

        def kept(ops: tuple[Op, ...]) -> tuple[Op, ...]:
            return tuple(op for op in ops if op.axis is None or op.axis in axes)

        redo = None if self.redo is None else kept(self.redo)
        return PieceWork(kept(self.forward), kept(self.input_grad), kept(self.weight_grad), redo)


@dataclass(frozen=True)
class ModelWork:
    """The operations of a model, and the sizes of what passes through it."""

    embed: PieceWork
    layer: PieceWork
    head: PieceWork
    x_bytes: int  # of what passes between layers, an example
    stash_bytes: dict[str, int]  # what a forward keeps of a layer, an example, by remat; full: of a stage
    pending_bytes: dict[str, int]  # what I hands to W of a layer, an example, by remat
    residual_bytes: float = 0.0  # what a backward reads of a forward that it has run again, of a layer, an example
    head_bytes: Extent = Extent()  # the most that the head has in memory at the same time

    def along(self, *axes: str) -> ModelWork:
        """Return the work without what devices send along other axes."""
        pieces = {name: getattr(self, name).along(axes) for name in ("embed", "layer", "head")}
        return replace(self, **pieces)

    def flops(self, num_layers: int) -> float:
        """Return the FLOPs of an example through the model and back, nothing recomputed."""
        pieces = ((self.embed, 1), (self.layer, num_layers), (self.head, 1))
        return sum(number * op.flops for piece, number in pieces for op in piece.once)
