"""Predicted seconds of operations on a device with known speeds, and of collectives on known links.

An operation takes as long as its arithmetic or its memory traffic, whichever is longer (Williams,
Waterman, Patterson 2009, CACM 52). Collectives run round a ring (Thakur, Rabenseifner, Gropp 2005,
IJHPCA 19), sums of small arrays up and down a tree (NVIDIA, "Massively Scale Your Deep Learning
Training with NCCL 2.4", 2019). Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil, log2
from typing import Literal

TILE = (128, 256)  # rows and columns, or the reverse, of the tile that a core makes, as in cuBLAS
LEAST_DEPTH = 128  # minimum depth of a core's share if several cores make one tile

Kernel = Literal["product", "fp8", "experts", "attention_forward", "attention_backward"]
# gather: all-gather or reduce-scatter; sum: all-reduce; exchange: all-to-all; hop: to a neighbour
Collective = Literal["gather", "sum", "exchange", "hop"]


@dataclass(frozen=True)
class Extent:
    """A size that is affine in the number of examples: each * n + fixed."""

    each: float = 0.0
    fixed: float = 0.0

    def of(self, examples: float) -> float:
        return examples * self.each + self.fixed


@dataclass(frozen=True)
class ProductShape:
    """Batched matrix products in one kernel: `number` times [rows, depth] x [depth, columns]."""

    rows: Extent
    columns: Extent
    depth: Extent
    number: Extent = Extent(fixed=1.0)

    def efficiency(self, examples: float, cores: int) -> float:
        """Return the share of the cores' time that computes results, 0..1; the rest is wasted.

        Each core makes a tile of the result, and all tiles take the same time. So time is wasted in
        partial tiles, and on cores that idle in the last wave (NVIDIA, Matrix Multiplication
        Background User's Guide: tile and wave quantization). If there are fewer tiles than cores,
        several cores make one tile, each from a share of its depth (split-K).

        >>> sizes = [Extent(fixed=n) for n in (4096, 2048, 2048)]  # 256 tiles, in two waves of 132
        >>> round(ProductShape(*sizes).efficiency(1, cores=132), 4)
        0.9697
        """
        sizes = self.rows, self.columns, self.depth, self.number
        rows, columns, depth, number = (n.of(examples) for n in sizes)
        ways = TILE, TILE[::-1]
        tiles = number * min(ceil(rows / high) * ceil(columns / wide) for high, wide in ways)
        shares = max(1, min(cores // ceil(tiles), int(depth // LEAST_DEPTH))) if tiles else 1
        waves = ceil(tiles * shares / cores)
        covered = waves * cores * TILE[0] * TILE[1]
        return number * rows * columns * shares / covered if waves else 1.0


@dataclass(frozen=True)
class Op:
    """An operation of a task on one example.

    sum_bytes: bytes read and written to add a product's result to a sum, for any number of
    examples. The addition is a separate pass if the device's products do not add.
    axes: mesh axes of a collective inside a stage. `bytes` is then the size of the array that is
    gathered, summed, scattered or passed on.
    """

    flops: float
    bytes: float
    fixed_bytes: float = 0.0  # bytes of weights, for any number of examples
    kernel: Kernel = "product"  # kernel that computes the FLOPs, if any
    shape: ProductShape | None = None  # shape of matrix products, else None
    sum_bytes: float = 0.0
    axes: tuple[str, ...] = ()
    collective: Collective = "gather"
    times: Extent = Extent(fixed=1.0)  # number of sends, each with an equal part of the bytes

    def sent_s(self, examples: float, link: Link, size: int) -> float:
        """Return the seconds of a collective over `size` devices."""
        times = self.times.of(examples)
        num_bytes = (examples * self.bytes + self.fixed_bytes) / times
        if self.collective == "hop":
            return times * link.hop_s(num_bytes)
        ways = {"gather": link.gather_s, "sum": link.sum_s, "exchange": link.exchange_s}
        return times * ways[self.collective](num_bytes, size)

    @property
    def is_nothing(self) -> bool:
        return not (self.flops or self.bytes or self.fixed_bytes or self.sum_bytes)


@dataclass(frozen=True)
class Speed:
    """The speed of a device."""

    flops_per_s: float  # FLOP/s of large matrix products
    bytes_per_s: float  # bytes/s of memory traffic
    attention_forward: float | None = None  # FLOP/s of attention kernels; None: as products
    attention_backward: float | None = None
    experts: float | None = None  # FLOP/s of grouped products; None: as products
    fp8: float | None = None  # FLOP/s of products of 8-bit floats; None: as products
    cores: int | None = None  # cores that share a product's tiles; None: equal speed at any size
    adds: bool = False  # whether products add their results to sums, as cuBLAS's do

    def seconds(self, ops: Iterable[Op], examples: float) -> float:
        """Return the seconds of operations on `examples` examples, one after the other.

        Collectives inside a stage (`Op.axes`) are left out.

        >>> ops = Op(50.0, 1.0), Op(0.0, 1.0, fixed_bytes=2.0)
        >>> Speed(flops_per_s=100.0, bytes_per_s=10.0).seconds(ops, 4)
        2.6
        """
        return sum(self._seconds(op, examples) for op in ops if not op.axes)

    def _seconds(self, op: Op, examples: float) -> float:
        traffic, added = examples * op.bytes + op.fixed_bytes, op.sum_bytes
        compute_s = examples * op.flops / self.reached(op, examples)
        if self.adds:
            return max(compute_s, (traffic + added) / self.bytes_per_s)
        return max(compute_s, traffic / self.bytes_per_s) + added / self.bytes_per_s

    def reached(self, op: Op, examples: float) -> float:
        """Return the FLOP/s of an operation if memory traffic does not limit it."""
        if op.kernel == "attention_forward":
            return self.attention_forward or self.flops_per_s
        if op.kernel == "attention_backward":
            return self.attention_backward or self.flops_per_s
        of_kernel = {"product": None, "fp8": self.fp8, "experts": self.experts}
        most = of_kernel[op.kernel] or self.flops_per_s
        if op.shape is None or self.cores is None:
            return most
        return most * op.shape.efficiency(examples, self.cores)


@dataclass(frozen=True)
class Link:
    """A link to the next device of a ring: seconds of an empty message, bytes/s one way."""

    latency_s: float
    bytes_per_s: float

    def hop_s(self, num_bytes: float) -> float:
        """Return the seconds of a message to the next device."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def gather_s(self, num_bytes: float, size: int) -> float:
        """Return the seconds of an all-gather to, or a reduce-scatter from, arrays of num_bytes.

        >>> Link(0.0, 10.0).gather_s(40.0, 4)
        3.0
        """
        return (size - 1) * self.hop_s(num_bytes / size)

    def exchange_s(self, num_bytes: float, size: int) -> float:
        """Return the seconds of an all-to-all of `num_bytes` on each of `size` devices or hosts.

        All parts travel at the same time.

        >>> Link(0.0, 10.0).exchange_s(40.0, 4)
        3.0
        """
        return self.hop_s(num_bytes * (size - 1) / size) if size > 1 else 0.0

    def sum_s(self, num_bytes: float, size: int) -> float:
        """Return the seconds of an all-reduce: round a ring, or up and down a tree.

        >>> Link(1.0, 10.0).sum_s(80.0, 8), Link(1.0, 10.0).sum_s(0.0, 8)
        (28.0, 6.0)
        """
        if size == 1:
            return 0.0
        return min(2 * self.gather_s(num_bytes, size), 2 * ceil(log2(size)) * self.hop_s(num_bytes))


@dataclass(frozen=True)
class PieceWork:
    """The operations of one example in a piece of the model: embedding, a layer or head.

    redo: matrix products and collectives of the forward that a backward recomputes from the piece's
    input. Those that only the next piece needs are left out. None: the whole forward is recomputed.
    """

    forward: tuple[Op, ...]
    input_grad: tuple[Op, ...]
    weight_grad: tuple[Op, ...]
    redo: tuple[Op, ...] | None = None

    @property
    def once(self) -> tuple[Op, ...]:
        """Return all operations, without recomputation."""
        return self.forward + self.input_grad + self.weight_grad


@dataclass(frozen=True)
class ModelWork:
    """The operations of a model and the bytes of its values, for one example unless noted."""

    embed: PieceWork
    layer: PieceWork
    head: PieceWork
    x_bytes: int  # bytes of the activation between layers
    # bytes that the forward of a layer keeps, by remat; with remat=full, the forward of a stage
    stash_bytes: Mapping[str, int]
    pending_bytes: Mapping[str, int]  # bytes handed from a layer's I to W, by remat
    residual_bytes: float = 0.0  # bytes of a layer's residuals, saved or recomputed
    head_bytes: Extent = Extent()  # peak bytes of the head, for all examples
    # peak bytes of I in a layer with experts, besides the residuals, for all examples; by remat
    expert_bytes: dict[str, Extent] = field(default_factory=dict[str, Extent])
