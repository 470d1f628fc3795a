"""The layouts that `ppctl tune` chooses from, with lower bounds. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

from ppctl.planner.cost.array_sizes import Microbatch, held_bytes
from ppctl.planner.cost.counted_costs import (
    Machine,
    ParamBytes,
    PlannedLayout,
    adds_in_place,
    op_times,
)
from ppctl.planner.cost.op_times import OpTimes, seconds_of_part
from ppctl.planner.cost.roofline import ModelWork
from ppctl.schedule.families.registry import BASELINE, FAMILIES
from ppctl.schedule.mesh_axes import DATA_AXES, MeshSizes
from ppctl.schedule.remat import Remat

PREFERRED = (BASELINE, *(name for name in FAMILIES if name != BASELINE))  # order of equals
CHUNKS = (2, 4, 8)  # stages a rank, of the families that take a number of them
LEAST_EMBED_HEAD = 0.05  # share of a rank's layers (time) or memory, to divide the vocabulary


class DeviceModel(NamedTuple):
    """A model as one device of a stage computes and holds it, with the axes that divide it."""

    work: ModelWork
    params: ParamBytes


DeviceModels = Callable[..., DeviceModel]  # of a division, and ranks of a divided vocabulary


@dataclass(frozen=True)
class Space:
    """A model on so many devices, and the choices of its layout."""

    num_devices: int
    num_layers: int
    batch_size: int
    example_bytes: int  # of the data: inputs and targets
    in_ticks: bool = True  # executor=spmd: ranks in lockstep
    gather: str = "step"  # executor.gather
    families: tuple[str, ...] = PREFERRED
    remats: tuple[str, ...] = tuple(map(str, Remat))
    max_chunks: int = 4
    layer_costs: tuple[float, ...] | None = None  # over their mean; None: layers are alike
    trained: float = 1.0  # share of the layers' weights
    divisions: tuple[MeshSizes, ...] = (MeshSizes(),)  # of a stage: sizes of `STAGE_AXES`
    vocab: tuple[str, ...] = ("whole",)  # embedding and head, as schedule.vocab

    @property
    def meshes(self) -> Sequence[MeshSizes]:
        """A layer for each rank at least.

        >>> [mesh.shape[:3] for mesh in Space(4, 2, 8, 1).meshes]
        [(1, 1, 4), (2, 1, 2), (4, 1, 1), (1, 2, 2), (2, 2, 1)]
        """
        return [
            replace(division, dp=dp, pp=pp, fsdp=n // (dp * pp))
            for division in self.divisions
            if self.num_devices % division.num_devices == 0
            for n in [self.num_devices // division.num_devices]
            for pp in divisors(n)
            if pp <= self.num_layers
            for dp in divisors(n // pp)
        ]

    @property
    def microbatches(self) -> Iterator[tuple[MeshSizes, Microbatch]]:
        """Every mesh with every number of microbatches and every remat.

        Many microbatches are no waste: where they fit with remat=none, no forward is run again.
        (Tried and rejected: 8 for each rank at most. 8.4e9 parameters, batches of 512 on 8 A100
        took 1.24 times as long.)
        """
        for mesh, remat in product(self.meshes, self.remats):
            examples, left = divmod(self.batch_size, mesh.along(DATA_AXES))
            for number in () if left else divisors(examples):
                yield mesh, Microbatch(examples // number, number, self.example_bytes, remat)

    def kinds(self, pp: int) -> Iterator[tuple[str, int]]:
        """Yield (family, stages a rank) of the schedules for pp ranks."""
        most = min(self.num_layers // pp, max(1, self.max_chunks))
        for name in self.families:
            family = FAMILIES[name]
            if (pp == 1 and name != BASELINE) or (self.in_ticks and not family.runs_on_ring):
                continue
            chunks = CHUNKS if family.knobs_for(1) else [family.num_chunks]
            yield from ((name, v) for v in chunks if v <= most)


@dataclass(frozen=True)
class Bounds:
    """Lower bounds of a mesh with microbatches, whatever its schedule and partition."""

    space: Space
    work: ModelWork
    params: ParamBytes
    machine: Machine
    mesh: MeshSizes
    microbatch: Microbatch
    has_parts: bool = False  # each rank has a part of the vocabulary, in work and params too

    def adds_in_place(self, num_layers: int) -> bool:
        """Return whether products of a rank with so many layers add gradients to their sums."""
        machine = self.machine
        return adds_in_place(num_layers, adds=machine.speed.adds, unroll=machine.unroll)

    @property
    def num_parts(self) -> int:
        """The number of parts of the vocabulary; 0 where it is whole."""
        return self.mesh.pp if self.has_parts else 0

    def layout(self, rank_layers: int, chunk_layers: int) -> PlannedLayout:
        """Return how the model lies on the mesh, given the largest rank's and chunk's layers."""
        return PlannedLayout(self.mesh, rank_layers, chunk_layers, self.has_parts)

    @cached_property
    def op_times(self) -> OpTimes:
        """Of ranks with equal shares."""
        layers = -(-self.space.num_layers // self.mesh.pp)
        return self.op_times_at(self.layout(layers, layers))

    def op_times_at(self, layout: PlannedLayout) -> OpTimes:
        return op_times(
            self.work,
            self.params,
            self.machine,
            layout,
            microbatch_examples=self.microbatch.examples,
            remat=self.microbatch.remat,
            gather=self.space.gather,
        )

    @cached_property
    def memory(self) -> Mapping[str, int]:
        """Bytes by part of a rank with its share of the model, and one microbatch."""
        return self.with_stashes(1.0)

    def with_stashes(self, number: float) -> Mapping[str, int]:
        """Return the same with so many microbatches, through all of the rank's layers."""
        layers = self.space.num_layers // self.mesh.pp
        return self.held_bytes(self.layout(layers, layers), {"stash": number})

    def held_bytes(self, layout: PlannedLayout, slots: Mapping[str, float]) -> dict[str, int]:
        """Return the bytes by part on one device of a layout, without temporaries."""
        sizes = self.work, self.params, layout, self.microbatch
        return held_bytes(*sizes, slots, gather=self.space.gather)

    @cached_property
    def embed_head_s(self) -> float:
        """Seconds of embedding and head of a microbatch, of all ranks together."""
        if self.has_parts:
            return self.num_parts * sum(seconds_of_part(self.op_times, self.num_parts).values())
        return self.op_times.embed.all_s + self.op_times.head.all_s

    @property
    def may_gain_by_parts(self) -> bool:
        """Whether the whole embedding and head take a share of time or memory that counts."""
        params, pp = self.params, self.mesh.pp
        layers_s = self.space.num_layers * self.op_times.layer.all_s
        if self.embed_head_s * pp >= LEAST_EMBED_HEAD * layers_s:
            return True
        embed_head, frozen = params.embed_head // pp, params.frozen_embed_head // pp
        params = replace(params, embed_head=embed_head, frozen_embed_head=frozen)
        divided = replace(self, params=params, has_parts=True)
        now, then = (sum(each.memory.values()) for each in (self, divided))
        return now - then >= LEAST_EMBED_HEAD * now

    def step_s(self, *, is_whole: bool = False) -> float:
        """Return a lower bound of the step time: work, the way to the ranks, and (is_whole) back.

        Whatever the partition, no rank is done before the mean of all: its work, and the middle
        stages before it, of a layer each. With remat=full the last stage runs its forwards in its
        backwards, and may hold any layers, unless the vocabulary is divided.
        """
        # 1. work of a rank
        op_times, pp, number = self.op_times, self.mesh.pp, self.microbatch.number
        layer, embed_head_s, last_s = op_times.layer, self.embed_head_s, op_times.layer.all_s
        if Remat.of(self.microbatch.remat).keeps_input_only and not self.has_parts:
            last_s -= layer.forward_s  # a layer of the last stage
        speed = (pp - 1) / layer.all_s + 1 / last_s  # layers a second, of all ranks
        rank_s = number * (self.space.num_layers + embed_head_s / layer.all_s) / speed

        # 2. the way through the stages before it
        way_s, hops = layer.forward_s, 1 + is_whole
        if is_whole:
            way_s += layer.input_grad_s + layer.weight_grad_s
        way_s *= min(self.space.layer_costs or (1.0,))
        rank_s += (pp - 1) / 2 * (hops * op_times.hop_s + max(0, pp - 2) / pp * way_s)

        # 3. work of all devices that share cores
        rank_devices = self.space.num_devices // pp
        work_s = number * (self.space.num_layers * last_s + embed_head_s) * rank_devices
        return max(rank_s, work_s / op_times.capacity) + op_times.overhead_s


def divisors(n: int) -> list[int]:
    """Return all divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
