"""The layouts that `ppctl tune` may choose from, with lower bounds of time and memory. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import inf
from typing import NamedTuple

from ppctl.planner.analytic import Machine, ParamBytes, PlannedLayout, op_times
from ppctl.planner.op_times import OpTimes, seconds_of_part
from ppctl.planner.roofline import ModelWork, Speed
from ppctl.planner.sizes import Microbatch, held_bytes
from ppctl.schedule.families.registry import BASELINE, FAMILIES
from ppctl.schedule.remat import Remat

PREFERRED = (BASELINE, *(name for name in FAMILIES if name != BASELINE))  # the order, where several are as good
CHUNKS = (2, 4, 8)  # stages a rank, of the families that take a number of them
LEAST_ENDS = 0.05  # of a rank's layers in time, or of its memory: where the vocabulary is divided over ranks at all


class MeshSizes(NamedTuple):
    """The sizes of a mesh's axes."""

    dp: int
    pp: int
    fsdp: int
    tp: int = 1
    cp: int = 1

    @property
    def divides_stages(self) -> bool:
        return self.tp * self.cp > 1


class DeviceModel(NamedTuple):
    """A model as one device of a stage computes and holds it, where tp and cp divide it."""

    work: ModelWork
    params: ParamBytes


@dataclass(frozen=True)
class Space:
    """A model on so many devices, and what may be chosen."""

    num_devices: int
    num_layers: int
    batch_size: int
    example_bytes: int  # of the data: inputs and targets
    in_ticks: bool = True  # executor=spmd: ranks in lockstep
    gather: str = "step"  # executor.gather
    families: tuple[str, ...] = PREFERRED
    remats: tuple[str, ...] = tuple(map(str, Remat))
    max_chunks: int = 4
    layer_costs: tuple[float, ...] | None = None  # relative, in means of them; None: all layers are alike
    trained: float = 1.0  # share of the layers' weights
    divisions: tuple[tuple[int, int], ...] = ((1, 1),)  # tp and cp
    vocab: tuple[str, ...] = ("whole",)  # embedding and head, as schedule.vocab

    @property
    def meshes(self) -> Sequence[MeshSizes]:
        """A layer for each rank at least.

        >>> [tuple(mesh)[:3] for mesh in Space(4, 2, 8, 1).meshes]
        [(1, 1, 4), (2, 1, 2), (4, 1, 1), (1, 2, 2), (2, 2, 1)]
        """
        return [
            MeshSizes(dp, pp, n // (dp * pp), tp, cp)
            for tp, cp in self.divisions
            if self.num_devices % (tp * cp) == 0
            for n in [self.num_devices // (tp * cp)]
            for pp in divisors(n)
            if pp <= self.num_layers
            for dp in divisors(n // pp)
        ]

    @property
    def microbatches(self) -> Iterator[tuple[MeshSizes, Microbatch]]:
        """Every mesh with every number of microbatches and every remat.

        Many microbatches are no waste: where they fit with remat=none, no forward is run again. (Tried and rejected: 8
        for each rank at most. 8.4e9 parameters, batches of 512 on 8 A100 took 1.24 times as long.)
        """
        for mesh, remat in product(self.meshes, self.remats):
            examples, left = divmod(self.batch_size, mesh.dp * mesh.fsdp)
            for number in () if left else divisors(examples):
                yield mesh, Microbatch(examples // number, number, self.example_bytes, remat)

    def kinds(self, pp: int) -> Iterator[tuple[str, int]]:
        """Yield (family, stages a rank) of the schedules for pp ranks."""
        for name in self.families if pp > 1 else [name for name in self.families if name == BASELINE]:
            family = FAMILIES[name]
            if self.in_ticks and not family.runs_on_ring:
                continue
            chunks = CHUNKS if family.knobs_for(1) else [family.num_chunks]
            yield from ((name, v) for v in chunks if v * pp <= self.num_layers and v <= max(1, self.max_chunks))


@dataclass(frozen=True)
class Bounds:
    """Lower bounds of a mesh with microbatches, whatever its schedule and partition.

    has_parts: every rank has a part of the vocabulary, as work and params count it.
    """

    space: Space
    work: ModelWork
    params: ParamBytes
    machine: Machine
    mesh: MeshSizes
    microbatch: Microbatch
    has_parts: bool = False

    @property
    def num_parts(self) -> int:
        """The number of parts of the vocabulary; 0 where it is whole."""
        return self.mesh.pp if self.has_parts else 0

    def layout(self, rank_layers: int, chunk_layers: int) -> PlannedLayout:
        """Return how the model lies on the mesh, with so many layers on its largest rank and in its largest chunk."""
        sizes = {"rank_layers": rank_layers, "chunk_layers": chunk_layers}
        return PlannedLayout(**self.mesh._asdict(), **sizes, has_parts=self.has_parts)

    @cached_property
    def op_times(self) -> OpTimes:
        """Of ranks with equal shares."""
        layers = -(-self.space.num_layers // self.mesh.pp)
        return self.op_times_at(self.layout(layers, layers))

    def sent_at(self, layout: PlannedLayout) -> OpTimes:
        """Return the op times of what devices along tp and cp send alone: as if computing took no time."""
        free = replace(self.machine, speed=Speed(inf, inf), task_s=0.0)
        return replace(self.op_times_at(layout, free, self.work.along("tp", "cp")), task_s=0.0, hop_s=0.0)

    def op_times_at(
        self, layout: PlannedLayout, machine: Machine | None = None, work: ModelWork | None = None
    ) -> OpTimes:
        return op_times(
            work or self.work,
            self.params,
            machine or self.machine,
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
        return held_bytes(self.work, self.params, layout, self.microbatch, slots, gather=self.space.gather)

    @cached_property
    def ends_s(self) -> float:
        """Seconds of embedding and head of a microbatch, of all ranks together."""
        if self.has_parts:
            return self.num_parts * sum(seconds_of_part(self.op_times, self.num_parts).values())
        return self.op_times.embed.all_s + self.op_times.head.all_s

    @property
    def may_gain_by_parts(self) -> bool:
        """Return whether embedding and head, which are whole, take a share of a rank's time or memory that counts."""
        layers_s, params, pp = self.space.num_layers * self.op_times.layer.all_s, self.params, self.mesh.pp
        if self.ends_s * pp >= LEAST_ENDS * layers_s:
            return True
        ends, frozen = params.embed_head // pp, params.frozen_embed_head // pp
        divided = replace(self, params=replace(params, embed_head=ends, frozen_embed_head=frozen), has_parts=True)
        now, then = (sum(each.memory.values()) for each in (self, divided))
        return now - then >= LEAST_ENDS * now

    def step_s(self, *, is_whole: bool = False) -> float:
        """Return a lower bound of the step time: its work, and the way to the ranks, with whole backwards also back.

        Whatever the partition, no rank is done before the mean of all: its work, and the middle stages before it, of a
        layer each. With remat=full the last stage runs its forwards in its backwards, and may hold any layers; not
        where the vocabulary is divided.
        """
        op_times, pp, number = self.op_times, self.mesh.pp, self.microbatch.number
        layer, embed_head_s = op_times.layer, self.ends_s
        is_left_to_backward = Remat.of(self.microbatch.remat).keeps_input_only and not self.has_parts
        last_s = layer.all_s - (layer.forward_s if is_left_to_backward else 0.0)  # of a layer of that stage
        speed = (pp - 1) / layer.all_s + 1 / last_s  # layers a second, of all ranks
        rank_s = number * (self.space.num_layers + embed_head_s / layer.all_s) / speed
        way_s, hops = layer.forward_s, 1 + is_whole
        if is_whole:
            way_s += layer.input_grad_s + layer.weight_grad_s
        way_s *= min(self.space.layer_costs or (1.0,))
        rank_s += (pp - 1) / 2 * (hops * op_times.hop_s + max(0, pp - 2) / pp * way_s)
        rank_devices = self.space.num_devices // pp
        together_s = number * (self.space.num_layers * last_s + embed_head_s) * rank_devices / op_times.capacity
        return max(rank_s, together_s) + op_times.overhead_s


def divisors(n: int) -> list[int]:
    """Return all divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
