"""A train step as records: a model's work and sizes, their layout, the devices. Stdlib only."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod
from typing import NamedTuple, Self

from ppctl.executors.device_mesh import over_hosts
from ppctl.executors.parameter_bytes import ParamBytes
from ppctl.planner.cost.roofline import Link, ModelWork, Op, Speed
from ppctl.schedule.mesh_axes import COPY_AXES, RANK_AXES, MeshSizes, axes_dividing
from ppctl.schedule.remat import Remat

# axes of gathers and sums over all devices; along pp and cp values hop, tp lies inside hosts
RINGS = tuple(axis for axis in RANK_AXES if axis not in axes_dividing("weights", "tokens"))


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
    vocab_parts: int = 0  # one on each rank, never gathered over pp; 0: the vocabulary is whole

    @property
    def embed_head_axes(self) -> tuple[str, ...]:
        """The axes over which the optimizer's embedding and head are divided."""
        return ("fsdp",) if self.vocab_parts else ("pp", "fsdp")

    @property
    def rank_devices(self) -> int:
        """The devices of a rank, which do the same at the same time."""
        return self.mesh.along(RANK_AXES)


class Ring(NamedTuple):
    """Devices that communicate along some axes, and the slowest link between two of them."""

    link: Link
    size: int


@dataclass(frozen=True)
class Microbatch:
    """A microbatch of one device."""

    examples: int
    number: int  # microbatches a step
    example_bytes: int  # of the data: inputs and targets
    remat: Remat


@dataclass(frozen=True)
class Step:
    """A train step of a model: all that its cost follows from but the order of its tasks."""

    work: ModelWork  # of one device
    params: ParamBytes
    layout: PlannedLayout
    microbatch: Microbatch
    machine: Machine | None  # None: nothing is known of the devices, and seconds are not asked for
    gather: str = "step"  # step | layer, as executor.gather
    unroll: float = inf  # layers of a device that are unrolled in its program; more are scanned
    adds: bool = False  # products of the devices can add their results to sums
    casts: int = 1  # how often in a step parameters are cast to the dtype of compute

    def with_layers(self, rank_layers: int, chunk_layers: int) -> Self:
        """Return the same where the largest rank, and its largest chunk, have these layers."""
        layout = replace(self.layout, rank_layers=rank_layers, chunk_layers=chunk_layers)
        return replace(self, layout=layout)

    def adds_in_place(self, num_layers: int) -> bool:
        """Return whether products add gradients to their sums: not those of a scan over layers."""
        return self.adds and num_layers <= self.unroll

    @property
    def known_machine(self) -> Machine:
        assert self.machine is not None, "seconds of unknown devices"
        return self.machine

    @cached_property
    def _links(self) -> dict[str, Link]:
        return self.known_machine.links(self.layout.mesh.by_axis)

    def ring(self, axes: Iterable[str]) -> Ring:
        """Return the ring of all devices along some axes."""
        inner, axes = self.known_machine.link, tuple(axes)
        between = (self._links[axis] for axis in axes if self._links[axis] != inner)
        return Ring(next(between, inner), self.layout.mesh.along(axes))

    def sent_s(self, op: Op) -> float:
        """Return the seconds of a collective between devices that divide a stage, else 0.

        In an exchange between hosts each device sends by its own adapter.
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
        """The bytes of the parameters that a device keeps and trains."""
        return self.kept(self.params.trained_layer, self.params.trained_embed_head)

    @property
    def summed_bytes(self) -> Iterator[tuple[Ring, float]]:
        """Yield (ring of copies, bytes of gradients that a device sums over it)."""
        whole = self.trained_bytes
        for axes, *sizes in self.params.own:
            own = self.kept(*sizes)
            whole -= own
            yield self.ring(axis for axis in COPY_AXES if axis not in axes), own
        yield self.ring(COPY_AXES), whole

    def kept(self, layer: int, embed_head: float) -> float:
        """Return the bytes that a device keeps: so many of a layer, and of embedding and head."""
        layout, mesh = self.layout, self.layout.mesh
        embed_head /= mesh.along(layout.embed_head_axes)
        return layout.rank_layers * layer / mesh.fsdp + embed_head

    @property
    def expert_bytes(self) -> float:
        """The values of experts' rows in the backward of a layer, besides its residuals."""
        peak = self.work.expert_bytes.get(self.microbatch.remat)
        return 0.0 if peak is None else max(0.0, peak.of(self.microbatch.examples))

    @property
    def head_bytes(self) -> float:
        """The peak of the head on a microbatch."""
        return max(0.0, self.work.head_bytes.of(self.microbatch.examples))
