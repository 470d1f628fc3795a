"""Op times by counting: seconds of a model's pieces and a step's collectives on described hardware.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import NamedTuple

from ppctl.executors.axes_over_hosts import over_hosts
from ppctl.planner.cost.op_times import LayerGathers, OpTimes, PieceTimes
from ppctl.planner.cost.roofline import Link, ModelWork, Op, PieceWork, Speed
from ppctl.schedule.mesh_axes import COPY_AXES, RANK_AXES, STAGE_AXES, MeshSizes
from ppctl.schedule.remat import Remat

# axes of collectives once a step; along pp values hop, axes inside a stage lie inside hosts
RINGS = tuple(axis for axis in RANK_AXES if axis not in STAGE_AXES)


@dataclass(frozen=True)
class Machine:
    """The devices that a plan is for: their speed, their links, and the cost of starting a task."""

    speed: Speed
    link: Link  # between devices of a host, or of a pod
    network: Link | None  # between hosts; None: links reach every device
    host_devices: int | None  # devices that links join; None: all
    task_s: float  # to start a task, or a tick
    cores: int | None = None  # shared by simulated devices, of which each alone keeps one busy
    order: str = "auto"  # mesh.order: which axes go over hosts first
    unroll: float = inf  # layers of a device that are unrolled in its program; more are scanned
    gathers_ahead: bool = False  # its programs compute while a gather travels

    def links(self, sizes: Mapping[str, int]) -> dict[str, Link]:
        """Return the slowest link of each axis of a mesh, which goes over as few hosts as hold it.

        Between hosts, collectives of an axis use the adapters of all its devices in a host, as
        NCCL's rings do; a hop uses the adapter of one device.
        """
        over = self.over(sizes).items()
        in_host = {axis: sizes[axis] // n if axis in RINGS else 1 for axis, n in over}
        return {axis: self._between(n, in_host[axis]) for axis, n in over}

    def _between(self, num_hosts: int, in_host: int) -> Link:
        """Return the link of an axis over so many hosts, with so many of its devices in each."""
        if num_hosts == 1 or self.network is None:
            return self.link
        fastest = max(self.link.bytes_per_s, self.network.bytes_per_s)
        return replace(self.network, bytes_per_s=min(fastest, in_host * self.network.bytes_per_s))

    def over(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return over how many hosts each axis of a mesh goes."""
        num_devices = prod(sizes.values())
        if self.network is None or self.host_devices is None or num_devices <= self.host_devices:
            return dict.fromkeys(sizes, 1)
        num_hosts, left = divmod(num_devices, self.host_devices)
        if left:  # hosts are not full: the worst case
            return dict(sizes)
        return over_hosts(sizes, self.order, num_hosts)


@dataclass(frozen=True)
class PlannedLayout:
    """How a model lies on devices: the mesh and the layers of its largest rank."""

    mesh: MeshSizes
    rank_layers: int  # of the rank that holds most, with padding
    chunk_layers: int  # of its largest chunk, with padding
    has_parts: bool = False  # each rank has a part of the vocabulary, never gathered over pp

    @property
    def end_axes(self) -> tuple[str, ...]:
        """The axes over which the optimizer's embedding and head are divided."""
        return ("fsdp",) if self.has_parts else ("pp", "fsdp")

    @property
    def end_devices(self) -> int:
        """The number of devices over which the optimizer's embedding and head are divided."""
        return self.mesh.along(self.end_axes)

    @property
    def rank_devices(self) -> int:
        """The devices of a rank, which do the same at the same time."""
        return self.mesh.along(RANK_AXES)

    def ring_of(self, machine: Machine) -> Callable[[Sequence[str]], Ring]:
        """Return the function from axes to the ring of all devices along them."""
        links, inner = machine.links(self.mesh.by_axis), machine.link

        def ring(axes: Sequence[str]) -> Ring:
            between = (links[axis] for axis in axes if links[axis] != inner)
            return Ring(next(between, inner), self.mesh.along(axes))

        return ring


class Ring(NamedTuple):
    """Devices that communicate along some axes, and the slowest link between two of them."""

    link: Link
    size: int


def layers_of_ranks(sizes: Sequence[int], rank_of: Sequence[int]) -> list[int]:
    """Return the number of layers of each rank, given each stage's layers and rank."""
    sums = [0] * (max(rank_of) + 1)
    for size, rank in zip(sizes, rank_of, strict=True):
        sums[rank] += size
    return sums


def adds_in_place(rank_layers: int, *, adds: bool, unroll: float) -> bool:
    """Return whether products add gradients to their sums; adds: whether the device's can.

    The gradients of a scan over layers are all made before they are added.
    """
    return adds and rank_layers <= unroll


@dataclass(frozen=True)
class ParamBytes:
    """Sizes of parameters as the optimizer keeps them: of one device's shards where tp divides."""

    layer: int
    embed_head: int  # of embedding and head together
    moments: float  # of the optimizer, over the parameters that are trained
    compute_ratio: float  # size of the dtype of compute over that of the parameters
    frozen_layer: int = 0  # of a layer's, what is not trained
    frozen_embed_head: int = 0  # of embedding and head likewise

    @property
    def trained_layer(self) -> int:
        return self.layer - self.frozen_layer

    @property
    def trained_embed_head(self) -> int:
        return self.embed_head - self.frozen_embed_head


def op_times(
    work: ModelWork,
    params: ParamBytes,
    machine: Machine,
    layout: PlannedLayout,
    *,
    microbatch_examples: int,
    remat: str,
    gather: str = "step",
    casts: int = 1,
) -> OpTimes:
    """Return the op times of a layout for microbatches of so many examples on each device.

    gather: step | layer, as executor.gather. casts: how often in a step parameters are cast
    to the dtype of compute.
    """
    # 1. the links, and whether products add gradients to their sums
    in_place = adds_in_place(layout.rank_layers, adds=machine.speed.adds, unroll=machine.unroll)
    speed, ring_of = replace(machine.speed, adds=in_place), layout.ring_of(machine)

    # 2. pieces
    def sent_s(op: Op) -> float:
        """Return the seconds of sends between devices that divide a stage."""
        return op.sent_s(microbatch_examples, *ring_of(op.axes)) if op.axes else 0.0

    def seconds(piece: PieceWork, again: tuple[Op, ...] = ()) -> PieceTimes:
        parts = piece.forward, (*again, *piece.input_grad), piece.weight_grad
        f, i, w = (
            (speed.seconds(ops, microbatch_examples), sum(map(sent_s, ops))) for ops in parts
        )
        # products wait for sends, but in W: gathers travel while its other products are computed
        return PieceTimes(sum(f), sum(i), max(w) if machine.gathers_ahead else sum(w))

    setting, layer, again = Remat.of(remat), work.layer, ()
    if setting.recomputes:  # of a stage (remat=full) the input of each layer is recomputed too
        again = layer.forward if layer.redo is None or setting.keeps_input_only else layer.redo

    # 3. transfers, gathers and per-step overhead
    ranks = ring_of(("pp",))
    return OpTimes(
        embed=seconds(work.embed),
        layer=seconds(layer, again),
        head=seconds(work.head),
        task_s=machine.task_s,
        hop_s=ranks.link.hop_s(microbatch_examples * work.x_bytes) if ranks.size > 1 else 0.0,
        overhead_s=overhead_s(params, machine, layout, gather, casts),
        capacity=inf if machine.cores is None else float(machine.cores),
        gathers=_gathers(params, machine, layout, gather),
    )


def _gathers(
    params: ParamBytes, machine: Machine, layout: PlannedLayout, gather: str
) -> LayerGathers | None:
    """Return the gathers of layers within tasks, or None."""
    link, size = layout.ring_of(machine)(("fsdp",))
    if gather == "step" or size == 1:
        return None
    layer_s = link.gather_s(params.layer * params.compute_ratio, size)
    once_more = layout.rank_layers > machine.unroll
    return LayerGathers(layer_s, machine.gathers_ahead, once_more=once_more)


def overhead_s(
    params: ParamBytes,
    machine: Machine,
    layout: PlannedLayout,
    gather: str = "step",
    casts: int = 1,
) -> float:
    """Return the per-step overhead: `exchange_s` and the optimizer."""
    read_and_written = 2 * (1 + params.moments) + 2  # gradients are read twice, once for their norm
    update = _trained(params, layout) * read_and_written
    moved_s = exchange_s(params, machine, layout, gather, casts)
    return moved_s + update / machine.speed.bytes_per_s


def exchange_s(
    params: ParamBytes,
    machine: Machine,
    layout: PlannedLayout,
    gather: str = "step",
    casts: int = 1,
) -> float:
    """Return the seconds in which parameters are cast and gathered, gradients summed over replicas.

    Parameters travel in the dtype of compute, gradients in that of the parameters. Tasks read
    copies of layers, whole unless each task gathers them (gather=layer). Embedding and head are
    divided over pp and fsdp (a part of a divided vocabulary over fsdp), a rank's layers over fsdp.
    Sums over copies are of each device's shards. Collectives of single arrays count as one, as
    compilers combine them.
    """
    # 1. gathers of parameters, and sums of gradients that are scattered
    layers, embed_head = layout.rank_layers * params.layer, params.embed_head
    ring_of = layout.ring_of(machine)

    def moved_s(ring: Ring, there: float | None, back: float) -> float:
        link, size = ring
        there_s = 0.0 if there is None else link.gather_s(there * params.compute_ratio, size)
        return there_s + (link.gather_s(back, size) if back else 0.0)

    trained = layout.rank_layers * params.trained_layer
    gathered = layers if gather == "step" else None
    seconds = moved_s(ring_of(("fsdp",)), gathered, trained)
    seconds += moved_s(ring_of(layout.end_axes), embed_head, params.trained_embed_head)

    # 2. sums over replicas, and casts
    copies = ring_of(COPY_AXES)
    sum_s = copies.link.sum_s(_trained(params, layout), copies.size)
    copied = layers / layout.mesh.fsdp if gather == "layer" else layers
    cast_s = casts * (copied + embed_head) * (1 + params.compute_ratio) / machine.speed.bytes_per_s
    return seconds + sum_s + cast_s


def _trained(params: ParamBytes, layout: PlannedLayout) -> float:
    """Return the bytes of the parameters that a device keeps and trains."""
    layers = layout.rank_layers * params.trained_layer
    return layers / layout.mesh.fsdp + params.trained_embed_head / layout.end_devices
