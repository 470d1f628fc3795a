"""Op times by counting: seconds of the pieces of a model and of the collectives of a step on described hardware.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, prod

from ppctl.executors.hosts import over_hosts
from ppctl.planner.op_times import LayerGathers, OpTimes, PieceTimes
from ppctl.planner.roofline import Link, ModelWork, Op, PieceWork, Speed
from ppctl.schedule.remat import Remat

RINGS = "dp", "fsdp"  # axes that collectives alone go along; pp, and cp of a ring, hand values from device to device


@dataclass(frozen=True)
class Machine:
    """The devices that a plan is for: their speed, their links, and the cost of starting a task."""

    speed: Speed
    link: Link  # between devices of a host, or of a pod
    network: Link | None  # between hosts; None: links reach every device
    host_devices: int | None  # devices that links join; None: all
    task_s: float  # to start a task, or a tick
    cores: int | None = None  # that all devices share, as simulated ones do; a device alone keeps one busy
    order: str = "auto"  # mesh.order: which axes go over hosts first
    unroll: float = inf  # layers of a device that are unrolled in its program; more are scanned
    gathers_ahead: bool = False  # its programs compute while a gather travels

    def links(self, sizes: Mapping[str, int]) -> dict[str, Link]:
        """Return the slowest link of each axis of a mesh, which goes over as few hosts as hold it.

        Between hosts, collectives of an axis have the adapters of all its devices in a host, as NCCL's rings do, each
        of which carries a part; what one device sends to the next one goes by its own.
        """
        return {
            axis: self._between(n, sizes[axis] // n if axis in RINGS else 1) for axis, n in self.over(sizes).items()
        }

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
        return dict(sizes) if left else over_hosts(sizes, self.order, num_hosts)  # hosts that are not full: the worst


@dataclass(frozen=True)
class PlannedLayout:
    """How a model lies on devices: the mesh and the layers of its largest rank."""

    dp: int
    pp: int
    fsdp: int
    rank_layers: int  # of the rank that holds most, with padding
    chunk_layers: int  # of its largest chunk, with padding
    tp: int = 1
    cp: int = 1
    has_parts: bool = False  # every rank has a part of the vocabulary, which is never gathered over pp

    @property
    def end_devices(self) -> int:
        """The devices over which a rank's embedding and head are divided, as the optimizer keeps them."""
        return self.fsdp if self.has_parts else self.pp * self.fsdp

    @property
    def rank_devices(self) -> int:
        """The devices of a rank, which do the same at the same time."""
        return self.dp * self.fsdp * self.tp * self.cp

    def links(self, machine: Machine) -> dict[str, Link]:
        """Return the link of each axis, of pp and fsdp together as "both", and of dp and cp as "replicas"."""
        sizes = {"dp": self.dp, "pp": self.pp, "fsdp": self.fsdp, "tp": self.tp, "cp": self.cp}
        links = machine.links(sizes)
        both = {"both": ("pp", "fsdp"), "replicas": ("dp", "cp")}
        return links | {name: links[b if links[a] == machine.link else a] for name, (a, b) in both.items()}


def adds_in_place(layout: PlannedLayout, *, adds: bool, unroll: float) -> bool:
    """Return whether products add gradients to their sums, where the device's products can (`Speed.adds`).

    The gradients of a scan over layers are all made before they are added.
    """
    return adds and layout.rank_layers <= unroll


@dataclass(frozen=True)
class ParamBytes:
    """Sizes of parameters, as the optimizer keeps them; where tp divides them, of one device's shards."""

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

    gather: step | tick | layer, as executor.gather. casts: how often in a step parameters are cast to the dtype of
    compute.
    """

    in_place = adds_in_place(layout, adds=machine.speed.adds, unroll=machine.unroll)
    speed = replace(machine.speed, adds=in_place)

    links, sizes = layout.links(machine), {"pp": layout.pp, "tp": layout.tp, "cp": layout.cp}

    def seconds(piece: PieceWork, again: tuple[Op, ...] = ()) -> PieceTimes:
        parts = piece.forward, (*again, *piece.input_grad), piece.weight_grad
        f, i, w = ((speed.seconds(ops, microbatch_examples), sum(map(sent_s, ops))) for ops in parts)
        return PieceTimes(sum(f), sum(i), max(w) if machine.gathers_ahead else sum(w))

    def sent_s(op: Op) -> float:
        """Seconds of what devices that divide a stage send each other.

        Products wait for it, but in W: what it gathers again travels while its other products are computed.
        """
        return 0.0 if op.axis is None else op.sent_s(microbatch_examples, links[op.axis], sizes[op.axis])

    setting, layer, again = Remat.of(remat), work.layer, ()
    if setting.recomputes:  # of a stage (remat=full) the input of each layer is recomputed too
        again = layer.forward if layer.redo is None or setting.keeps_input_only else layer.redo

    hop_s = links["pp"].hop_s(microbatch_examples * work.x_bytes) if layout.pp > 1 else 0.0
    layer_bytes, gathers, gather_s = params.layer * params.compute_ratio, None, 0.0
    if gather == "tick":
        gather_s = links["fsdp"].gather_s(layout.chunk_layers * layer_bytes, layout.fsdp)
    elif gather == "layer" and layout.fsdp > 1:
        layer_s = links["fsdp"].gather_s(layer_bytes, layout.fsdp)
        gathers = LayerGathers(layer_s, machine.gathers_ahead, once_more=layout.rank_layers > machine.unroll)
    return OpTimes(
        embed=seconds(work.embed),
        layer=seconds(layer, again),
        head=seconds(work.head),
        task_s=machine.task_s + gather_s,
        hop_s=hop_s,
        overhead_s=overhead_s(params, machine, layout, gather=gather, casts=casts),
        capacity=inf if machine.cores is None else float(machine.cores),
        gathers=gathers,
    )


def overhead_s(
    params: ParamBytes, machine: Machine, layout: PlannedLayout, *, gather: str = "step", casts: int = 1
) -> float:
    """Return the per-step overhead: parameters gathered, gradients summed over replicas, the optimizer.

    Embedding and head are divided over pp and fsdp (a rank's part of a divided vocabulary over fsdp), a rank's layers
    over fsdp; sums over dp are of what each device keeps. Collectives of single arrays count as one, as compilers
    combine them.
    """
    read_and_written = 2 * (1 + params.moments) + 2  # gradients are read twice, once for their norm
    update = _trained(params, layout) * read_and_written
    moved_s = exchange_s(params, machine, layout, gather=gather, casts=casts)
    return moved_s + update / machine.speed.bytes_per_s


def exchange_s(
    params: ParamBytes, machine: Machine, layout: PlannedLayout, *, gather: str = "step", casts: int = 1
) -> float:
    """Return `overhead_s` without the optimizer: parameters cast and gathered, gradients summed over replicas.

    Parameters travel in the dtype of compute, gradients in that of the parameters. Tasks read layers from copies of
    their own, which are whole unless each task gathers them (gather=layer).
    """
    layers, embed_head = layout.rank_layers * params.layer, params.embed_head
    links = layout.links(machine)

    def there_and_back_s(link: Link, there: float, back: float, size: int, *, gathered: bool = True) -> float:
        there_s = link.gather_s(there * params.compute_ratio, size) if gathered else 0.0
        return there_s + (link.gather_s(back, size) if back else 0.0)  # summed and scattered

    trained = layout.rank_layers * params.trained_layer
    moved_s = there_and_back_s(links["fsdp"], layers, trained, layout.fsdp, gathered=gather == "step")
    of_ends = links["fsdp" if layout.has_parts else "both"]
    moved_s += there_and_back_s(of_ends, embed_head, params.trained_embed_head, layout.end_devices)
    sum_s = links["replicas"].sum_s(_trained(params, layout), layout.dp * layout.cp)
    copied = layers / layout.fsdp if gather == "layer" else layers
    cast_s = casts * (copied + embed_head) * (1 + params.compute_ratio) / machine.speed.bytes_per_s
    return moved_s + sum_s + cast_s


def _trained(params: ParamBytes, layout: PlannedLayout) -> float:
    """Return the bytes of the parameters that a device keeps and trains."""
    layers = layout.rank_layers * params.trained_layer
    return layers / layout.fsdp + params.trained_embed_head / layout.end_devices
