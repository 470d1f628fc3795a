"""The layouts that `ppctl tune` chooses from, with lower bounds. Standard library only."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from ppctl.planner.cost.planned_step import Microbatch, Step
from ppctl.planner.cost.step_bytes import array_bytes
from ppctl.planner.cost.step_time import op_times
from ppctl.schedule.engine_traits import IN_TICKS, EngineTraits
from ppctl.schedule.families.registry import BASELINE, FAMILIES
from ppctl.schedule.mesh_axes import DATA_AXES, MeshSizes
from ppctl.schedule.piece_times import OpTimes
from ppctl.schedule.remat import Remat

PREFERRED = (BASELINE, *(name for name in FAMILIES if name != BASELINE))  # order of equals
CHUNKS = (2, 4, 8)  # stages a rank, of the families that take a number of them
LEAST_EMBED_HEAD = 0.05  # share of a rank's layers (time) or memory, to divide the vocabulary


# of a mesh, microbatches, vocabulary parts: the step of ranks with equal shares, rounded up
StepOf = Callable[[MeshSizes, Microbatch, int], Step]


@dataclass(frozen=True)
class Space:
    """A model on devices, and the choices of its layout."""

    num_devices: int
    num_layers: int
    batch_size: int
    example_bytes: int  # of the data: inputs and targets
    engine: EngineTraits = IN_TICKS
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
        for mesh, remat in product(self.meshes, map(Remat.of, self.remats)):
            examples, left = divmod(self.batch_size, mesh.along(DATA_AXES))
            for number in () if left else divisors(examples):
                yield mesh, Microbatch(examples // number, number, self.example_bytes, remat)

    def kinds(self, pp: int) -> Iterator[tuple[str, int]]:
        """Yield (family, stages a rank) of the schedules for pp ranks."""
        most = min(self.num_layers // pp, max(1, self.max_chunks))
        for name in self.families:
            family = FAMILIES[name]
            if (pp == 1 and name != BASELINE) or (self.engine.in_ticks and not family.runs_on_ring):
                continue
            chunks = CHUNKS if family.knobs_for(1) else [family.num_chunks]
            yield from ((name, v) for v in chunks if v <= most)


@dataclass(frozen=True)
class Bounds:
    """Lower bounds of a mesh with microbatches, whatever its schedule and partition."""

    space: Space
    step: Step  # of ranks with equal shares, rounded up

    @property
    def mesh(self) -> MeshSizes:
        return self.step.layout.mesh

    @property
    def vocab_parts(self) -> int:
        return self.step.layout.vocab_parts

    @cached_property
    def op_times(self) -> OpTimes:
        return op_times(self.step)

    @cached_property
    def least_bytes(self) -> int:
        """Bytes of a rank with its share of the model, and one microbatch."""
        return self.with_stashes(1.0)

    def with_stashes(self, number: float) -> int:
        """Return the same with `number` microbatches, through all of the rank's layers."""
        step, share, pp = self.step, self.space.num_layers // self.mesh.pp, self.mesh.pp
        if not (self.space.engine.in_ticks or self.vocab_parts):  # the mean of all ranks
            step = replace(step, params=step.params.with_embed_head_over(pp))
        return sum(array_bytes(step.with_layers(share, share), {"stash": number}).values())

    @property
    def may_gain_by_parts(self) -> bool:
        """Whether the whole embedding and head take a share of time or memory that counts."""
        pp = self.mesh.pp
        layers_s = self.space.num_layers * self.op_times.layer.all_s
        if self.op_times.embed_head_s(pp) * pp >= LEAST_EMBED_HEAD * layers_s:
            return True
        params = self.step.params.with_embed_head_over(pp)
        layout = replace(self.step.layout, vocab_parts=pp)
        divided = replace(self, step=replace(self.step, params=params, layout=layout))
        saved = self.least_bytes - divided.least_bytes
        return saved >= LEAST_EMBED_HEAD * self.least_bytes

    def step_s(self, *, is_whole: bool = False) -> float:
        """Return a lower bound of the step time: work, the way to the ranks, and (is_whole) back.

        Whatever the partition, no rank is done before the mean of all: its work, and the middle
        stages before it, of a layer each. With remat=full the last stage runs its forwards in its
        backwards, and may hold any layers, unless the vocabulary is divided.
        """
        # 1. work of a rank
        microbatch, op_times, pp = self.step.microbatch, self.op_times, self.mesh.pp
        layer, embed_head_s = op_times.layer, op_times.embed_head_s(pp)
        last_s = layer.all_s
        if microbatch.remat.keeps_input_only and not self.vocab_parts:
            last_s -= layer.forward_s  # a layer of the last stage
        speed = (pp - 1) / layer.all_s + 1 / last_s  # layers a second, of all ranks
        number, num_layers = microbatch.number, self.space.num_layers
        rank_s = number * (num_layers + embed_head_s / layer.all_s) / speed

        # 2. the way through the stages before it
        way_s, hops = layer.forward_s, 1 + is_whole
        if is_whole:
            way_s += layer.input_grad_s + layer.weight_grad_s
        way_s *= min(self.space.layer_costs or (1.0,))
        rank_s += (pp - 1) / 2 * (hops * op_times.hop_s + max(0, pp - 2) / pp * way_s)

        # 3. work of all devices that share cores
        rank_devices = self.space.num_devices // pp
        work_s = number * (num_layers * last_s + embed_head_s) * rank_devices
        return max(rank_s, work_s / op_times.capacity) + op_times.overhead_s


def divisors(n: int) -> list[int]:
    """Return all divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
