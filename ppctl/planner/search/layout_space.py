"""The layouts that `ppctl tune` searches, and their lower bounds. Standard library only."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from ppctl.executors.work.planned_step import Microbatch, Step
from ppctl.executors.work.rank_bytes import rank_bytes, sizes_of
from ppctl.planner.cost.step_time import op_times
from ppctl.schedule.costs import OpTimes
from ppctl.schedule.engine_traits import IN_TICKS, EngineTraits
from ppctl.schedule.families.registry import BASELINE, FAMILIES
from ppctl.schedule.mesh_axes import DATA_AXES, MeshSizes
from ppctl.schedule.remat import Remat

# families in the order that decides between equal layouts
PREFERRED = (BASELINE, *(name for name in FAMILIES if name != BASELINE))
CHUNKS = (2, 4, 8)  # stages a rank to try, for families with this setting
LEAST_EMBED_HEAD = 0.05  # least share of time or memory, 0..1, to try vocabulary parts


# (mesh, microbatches, number of vocabulary parts) -> step if layers are divided evenly, rounded up
StepOf = Callable[[MeshSizes, Microbatch, int], Step]


@dataclass(frozen=True)
class Space:
    """A model on devices, and the choices of its layout."""

    num_devices: int
    num_layers: int
    batch_size: int
    example_bytes: int  # bytes of an example's inputs and targets
    engine: EngineTraits = IN_TICKS
    families: tuple[str, ...] = PREFERRED
    remats: tuple[str, ...] = tuple(map(str, Remat))
    max_chunks: int = 4
    layer_costs: tuple[float, ...] | None = None  # by layer, with mean 1; None: equal layers
    trained: float = 1.0  # trained share of the layers' weights
    divisions: tuple[MeshSizes, ...] = (MeshSizes(),)  # sizes of `STAGE_AXES`
    vocab: tuple[str, ...] = ("whole",)  # choices of schedule.vocab
    numbers: tuple[int, ...] | None = None  # choices of the number of microbatches; None: all

    @property
    def meshes(self) -> Sequence[MeshSizes]:
        """Return the meshes of all devices with at least one layer a rank.

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
        """Yield every mesh with every number of microbatches and every remat.

        Many microbatches can be faster: if they fit with remat=none, no forward is recomputed.
        (Tried and rejected: at most 8 microbatches a rank. 8.4e9 parameters with batches of 512 on
        8 A100 took 1.24 times as long.)
        """
        for mesh, remat in product(self.meshes, map(Remat.of, self.remats)):
            examples, left = divmod(self.batch_size, mesh.along(DATA_AXES))
            for number in () if left else divisors(examples):
                if self.numbers is None or number in self.numbers:
                    yield mesh, Microbatch(examples // number, number, self.example_bytes, remat)

    @property
    def that_divide(self) -> tuple[int, int] | None:
        """Return the nearest batch size and next smaller number of devices with a layout.

        None if this batch size has a layout on these devices.

        >>> Space(504, 8, 1024, 1).that_divide
        (1008, 448)
        """
        if not self.meshes or any(self.microbatches):
            return None
        shares = {mesh.along(DATA_AXES) for mesh in self.meshes}
        sizes = (max(1, round(self.batch_size / n)) * n for n in shares)
        batch = min(sizes, key=lambda size: abs(size - self.batch_size))
        numbers = [
            each.num_devices * pp * share
            for each in self.divisions
            for pp in range(1, self.num_layers + 1)
            for share in divisors(self.batch_size)
            if self.batch_size % (share * each.along(DATA_AXES)) == 0
        ]
        return batch, max((n for n in numbers if n < self.num_devices), default=1)

    def kinds(self, pp: int) -> Iterator[tuple[str, int]]:
        """Yield the schedules for pp ranks as (family, stages a rank)."""
        most = min(self.num_layers // pp, max(1, self.max_chunks))
        for name in self.families:
            family = FAMILIES[name]
            if (pp == 1 and name != BASELINE) or (self.engine.in_ticks and not family.runs_on_ring):
                continue
            chunks = CHUNKS if family.knobs_for(1) else [family.num_chunks]
            yield from ((name, v) for v in chunks if v <= most)


@dataclass(frozen=True)
class Bounds:
    """Lower bounds of a mesh with microbatches, for any schedule and partition."""

    space: Space
    step: Step  # step if layers are divided evenly over the ranks, rounded up

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
        """Return the bytes of a rank with its share of the model and one microbatch's stash."""
        return self.with_stashes(1.0)

    def with_stashes(self, number: float) -> int:
        """Return the bytes of a rank with the stashes of `number` microbatches in its layers."""
        step, share, pp = self.step, self.space.num_layers // self.mesh.pp, self.mesh.pp
        # only the first and last stages hold embed_head; the fullest rank has at least the mean
        if not (self.space.engine.in_ticks or self.vocab_parts):
            step = replace(step, params=step.params.with_embed_head_over(pp))
        sizes = sizes_of(step.with_layers(share, share))
        return sum(rank_bytes(sizes, {"stash": number}).values())

    @property
    def may_gain_by_parts(self) -> bool:
        """Return whether dividing the vocabulary may gain LEAST_EMBED_HEAD or more.

        It may if embedding and head take this share of the layers' time, or if their division
        saves this share of the fullest device's memory.
        """
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
        """Return a lower bound of the step time in seconds. is_whole: backwards are not split.

        For any partition, the slowest rank takes at least the mean time of all ranks. A rank's time
        is its work, plus a microbatch's way through the middle stages before it (at least one layer
        each), and with is_whole the way back. With remat=full and an undivided vocabulary, the last
        stage runs its forwards in its backwards: its layers are cheaper, and it may hold any number
        of them.
        """
        # 1. work of a rank
        microbatch, op_times, pp = self.step.microbatch, self.op_times, self.mesh.pp
        layer, embed_head_s = op_times.layer, op_times.embed_head_s(pp)
        last_s = layer.all_s
        if microbatch.remat.keeps_input_only and not self.vocab_parts:
            last_s -= layer.forward_s  # seconds of a layer on the last stage
        speed = (pp - 1) / layer.all_s + 1 / last_s  # layers a second on all ranks
        number, num_layers = microbatch.number, self.space.num_layers
        rank_s = number * (num_layers + embed_head_s / layer.all_s) / speed

        # 2. the way through the stages before the rank, and back
        way_s, hops = layer.forward_s, 1 + is_whole
        if is_whole:
            way_s += layer.input_grad_s + layer.weight_grad_s
        way_s *= min(self.space.layer_costs or (1.0,))
        rank_s += (pp - 1) / 2 * (hops * op_times.hop_s + max(0, pp - 2) / pp * way_s)

        # 3. work of all devices, if they share cores
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
