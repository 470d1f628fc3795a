"""A train step as records: the model's work and sizes, layout, devices. Standard library only."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod
from typing import NamedTuple, Self

from ppctl.executors.device_mesh import over_hosts
from ppctl.executors.work.parameter_bytes import ParamBytes
from ppctl.executors.work.roofline import Link, ModelWork, Op, Speed
from ppctl.schedule.mesh_axes import COPY_AXES, RANK_AXES, MeshSizes, axes_dividing
from ppctl.schedule.remat import Remat

# axes whose gathers and sums run round rings over hosts; not tp, which stays inside a host, nor pp
# and cp, along which values hop
RINGS = tuple(axis for axis in RANK_AXES if axis not in axes_dividing("weights", "tokens"))


@dataclass(frozen=True)
class Machine:
    """The target devices of a plan: their speed, their links, and the seconds to start a task."""

    speed: Speed
    link: Link  # link between devices of a host or pod
    network: Link | None  # link between hosts; None: `link` reaches every device
    host_devices: int | None  # devices of a host or pod; None: all
    task_s: float  # seconds to start a task or a tick
    # CPU cores shared by simulated devices, at most one core a device; None: no sharing
    cores: int | None = None
    order: str = "auto"  # mesh.order: axes to be placed over hosts first
    gathers_ahead: bool = False  # whether gathers overlap compute

    def links(self, sizes: Mapping[str, int]) -> dict[str, Link]:
        """Return the slowest link of each axis, for a mesh placed on as few hosts as possible.

        Between hosts, a collective of an axis uses the adapters of all its devices in a host, as
        NCCL's rings do. A hop uses the adapter of one device.
        """
        over = self.over(sizes).items()
        in_host = {axis: sizes[axis] // n if axis in RINGS else 1 for axis, n in over}
        return {axis: self._between(n, in_host[axis]) for axis, n in over}

    def _between(self, num_hosts: int, in_host: int) -> Link:
        """Return the link of an axis over num_hosts hosts, with in_host of its devices in each."""
        if num_hosts == 1 or self.network is None:
            return self.link
        fastest = max(self.link.bytes_per_s, self.network.bytes_per_s)
        return replace(self.network, bytes_per_s=min(fastest, in_host * self.network.bytes_per_s))

    def over(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the number of hosts that each axis of a mesh spans."""
        num_devices = prod(sizes.values())
        if self.network is None or self.host_devices is None or num_devices <= self.host_devices:
            return dict.fromkeys(sizes, 1)
        num_hosts, left = divmod(num_devices, self.host_devices)
        if not left:
            return over_hosts(sizes, self.order, num_hosts)
        # partly filled hosts. Without dp, ranks that divide a host lie inside one, in device order
        of_rank = num_devices // sizes["pp"]
        if self.order == "auto" and sizes["dp"] == 1 and self.host_devices % of_rank == 0:
            return dict.fromkeys(sizes, 1) | {"pp": sizes["pp"]}
        return dict(sizes)  # the worst case, a host for each device


@dataclass(frozen=True)
class PlannedLayout:
    """The layout of a model on devices: the mesh, and the layers of the largest rank."""

    mesh: MeshSizes
    rank_layers: int  # layers of the largest rank, with padding
    chunk_layers: int  # layers of its largest chunk, with padding
    vocab_parts: int = 0  # vocabulary parts, one a rank, not gathered over pp; 0: undivided

    @property
    def embed_head_axes(self) -> tuple[str, ...]:
        """Return the axes that divide the optimizer state of embedding and head."""
        return ("fsdp",) if self.vocab_parts else ("pp", "fsdp")

    @property
    def rank_devices(self) -> int:
        """Return the number of devices of a rank. They run the same tasks at the same time."""
        return self.mesh.along(RANK_AXES)


class Ring(NamedTuple):
    """Devices that communicate along some axes, and the slowest link between two of them."""

    link: Link
    size: int


@dataclass(frozen=True)
class Microbatch:
    """The microbatches of one device."""

    examples: int  # examples a microbatch
    number: int  # microbatches a step
    example_bytes: int  # bytes of an example's inputs and targets
    remat: Remat


@dataclass(frozen=True)
class Step:
    """A train step of a model: everything that its cost depends on, except the order of tasks."""

    work: ModelWork  # work of one device
    params: ParamBytes
    layout: PlannedLayout
    microbatch: Microbatch
    machine: Machine | None  # None: unknown devices; only bytes can be predicted
    gather: str = "step"  # step | layer: executor.gather
    unroll: float = inf  # maximum number of layers to unroll; more are scanned
    adds: bool = False  # whether the devices' matrix products can add their results to sums
    casts: int = 1  # number of casts of the parameters to the compute dtype in a step

    def with_layers(self, rank_layers: int, chunk_layers: int) -> Self:
        """Return the step with these layers on the largest rank and in its largest chunk."""
        layout = replace(self.layout, rank_layers=rank_layers, chunk_layers=chunk_layers)
        return replace(self, layout=layout)

    def adds_in_place(self, num_layers: int) -> bool:
        """Return whether products add gradients to sums; False if num_layers layers are scanned."""
        return self.adds and num_layers <= self.unroll

    @property
    def gathers_by_layer(self) -> bool:
        """Return whether each task gathers its layers over fsdp."""
        return self.gather == "layer" and self.layout.mesh.fsdp > 1

    @property
    def known_machine(self) -> Machine:
        assert self.machine is not None, "seconds of unknown devices"
        return self.machine

    @cached_property
    def _links(self) -> dict[str, Link]:
        return self.known_machine.links(self.layout.mesh.by_axis)

    def ring(self, axes: Iterable[str]) -> Ring:
        """Return the ring of all devices along these axes."""
        inner, axes = self.known_machine.link, tuple(axes)
        between = (self._links[axis] for axis in axes if self._links[axis] != inner)
        return Ring(next(between, inner), self.layout.mesh.along(axes))

    def sent_s(self, op: Op) -> float:
        """Return the seconds of a collective inside a stage; 0 for other operations.

        In an exchange between hosts each device sends through a separate adapter.
        """
        if not op.axes:
            return 0.0
        machine, ring = self.known_machine, self.ring(op.axes)
        over = machine.over(self.layout.mesh.by_axis)
        num_hosts = prod(over[axis] for axis in op.axes)
        if op.collective == "exchange" and num_hosts > 1 and machine.network is not None:
            ring = Ring(machine.network, num_hosts)
        return op.sent_s(self.microbatch.examples, *ring)

    @property
    def trained_bytes(self) -> float:
        """Return the bytes of a device's shards of the trained parameters."""
        return self.kept(self.params.trained_layer, self.params.trained_embed_head)

    @property
    def summed_bytes(self) -> Iterator[tuple[Ring, float]]:
        """Yield (ring of replicas, bytes of gradients that each device sums over this ring)."""
        whole = self.trained_bytes
        for axes, *sizes in self.params.own:
            own = self.kept(*sizes)
            whole -= own
            yield self.ring(axis for axis in COPY_AXES if axis not in axes), own
        yield self.ring(COPY_AXES), whole

    def kept(self, layer: int, embed_head: float) -> float:
        """Return the bytes of a device's shards of its rank's layers and of embed_head.

        layer, embed_head: unsharded bytes of one layer, and of embed_head.
        """
        layout, mesh = self.layout, self.layout.mesh
        embed_head /= mesh.along(layout.embed_head_axes)
        return layout.rank_layers * layer / mesh.fsdp + embed_head

    @property
    def expert_bytes(self) -> float:
        """Return the bytes of experts' rows in the backward of a layer, besides its residuals."""
        peak = self.work.expert_bytes.get(self.microbatch.remat)
        return 0.0 if peak is None else max(0.0, peak.of(self.microbatch.examples))

    @property
    def head_bytes(self) -> float:
        """Return the peak bytes of the head on a microbatch."""
        return max(0.0, self.work.head_bytes.of(self.microbatch.examples))
