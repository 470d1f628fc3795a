"""The work and the sizes of a pipeline's step, counted from its model, and its costs on any ranks.

All are computed from the request and array shapes, so every process and command counts the same,
and finds the same schedule with `schedule=auto`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property

from ppctl.config import Hardware
from ppctl.executors.layer_placement import Placement
from ppctl.executors.model_shapes import Model, tree_bytes
from ppctl.executors.outer_layers import keep
from ppctl.executors.spmd.spmd_program import spmd_sizes
from ppctl.executors.work.parameter_bytes import param_bytes
from ppctl.executors.work.planned_step import Machine, Microbatch, PlannedLayout, Step
from ppctl.executors.work.rank_bytes import RankShare, layer_bytes, rank_bytes, workspace_bytes
from ppctl.executors.work.task_flops import work_of
from ppctl.model.stack import Stack
from ppctl.model.trainable_parameters import trained_part
from ppctl.schedule.costs import OpTimes, PieceTimes
from ppctl.schedule.engine_traits import IN_TICKS
from ppctl.schedule.partition.partition import Partition
from ppctl.schedule.placement_costs import LayerBytes, LayerCosts
from ppctl.schedule.tick_lowering import Ticks
from ppctl.training.pipeline.engines.train_states import States
from ppctl.training.pipeline.known_hardware import described_device
from ppctl.training.pipeline.layer_optimizers import LayerOptimizer, update_flops
from ppctl.training.pipeline.pipeline import Pipeline
from ppctl.training.pipeline.pipeline_request import divided_stack


def model_on(
    pipe: Pipeline,
    hardware: Hardware | None,
    stack: Stack | None = None,
    imbalance: float = 1.0,
    rank: int = 0,
) -> Model:
    """Return a pipeline's model on one device of a rank, with the kernels of `hardware`.

    hardware: None for the hardware of the mesh. stack: the model with those kernels, if already
    made. imbalance: as in `StackOptions.counted`.
    """
    if stack is None:
        stack, on_device = pipe.stack, pipe.stack.options.on_device
        if hardware is not None and on_device is not None:
            stack = on_device(described_device(hardware) or pipe.meshes.device)
        stack = stack.counted(imbalance)
        if stack is pipe.stack:
            return pipe.group_of(rank).model
    model = pipe.group_of(rank).model
    divided = divided_stack(stack, model.axes, pipe.batch_shapes)
    return replace(model, stack=stack.in_shards(divided), parts=divided.parts)


def pipeline_step(
    pipe: Pipeline,
    counted: Model,
    machine: Machine | None = None,
    *,
    adds: bool = False,
    rank: int | None = None,
) -> Step:
    """Return the step of a pipeline; counted: its model with the kernels to count.

    rank: one of ranks of unequal sizes or hardware; None: the largest of equal ones.
    """
    execution, schedule, group = pipe.execution, pipe.schedule, pipe.group_of(rank or 0)
    model, of_rank = group.model, group.layout.of_rank
    examples, number = model.microbatch["inputs"].shape[0], schedule.num_microbatches
    example_bytes = tree_bytes(model.microbatch) // examples
    mesh = replace(of_rank.sizes, pp=schedule.num_ranks) if rank is not None else pipe.meshes.sizes
    # executor=reference adds whole gradients after each microbatch, and casts parameters before it
    is_alone = not execution.engine.is_pipelined
    optimizer, flops = pipe.optimizer, 0
    if isinstance(optimizer, LayerOptimizer):
        flops = update_flops(optimizer.optimizer, optimizer.one_layer)
    return Step(
        work_of(counted),
        param_bytes(pipe.states.natural, model, of_rank.shards, flops),
        PlannedLayout(mesh, *layers_of(pipe, rank), schedule.vocab_parts),
        Microbatch(examples, number, example_bytes, execution.remat),
        machine,
        execution.gather,
        execution.unroll,
        adds=adds and not is_alone,
        casts=number if is_alone else 1,
    )


def layers_of(pipe: Pipeline, rank: int | None = None) -> tuple[int, int]:
    """Return the number of layers of a rank and of its largest stage; None: the largest rank."""
    sizes, rank_of = [len(layers) for layers in pipe.partition], pipe.schedule.rank_of
    if rank is not None:
        sizes = [n for n, r in zip(sizes, rank_of, strict=True) if r == rank]
        rank_of = (0,) * len(sizes)
    return pipe.execution.engine.rank_layers(sizes, rank_of), max(sizes)


@dataclass(frozen=True)
class ModelCosts:
    """The relative times of a model's stages and the bytes of ranks, for `schedule=auto`.

    With executor=mpmd a rank holds its layers, residuals and values in transit. With executor=spmd
    every rank holds as many layers as the largest rank, and buffer slots. The temporaries are those
    of the rank's largest task, or of the whole program; the update's are not counted.

    probe: a pipeline of the model; its schedule does not matter. divide: (rank of each stage) ->
    layers of each stage. vocab_parts: number of vocabulary parts, whose bytes are not counted.
    """

    probe: Pipeline
    divide: Callable[[tuple[int, ...]], Partition]
    vocab_parts: int = 0

    def layers(self, *, with_bytes: bool) -> LayerCosts:
        """Return the costs of the layers; with_bytes adds their bytes on ranks of executor=mpmd."""
        relative, remat = self.probe.relative_costs, self.probe.execution.remat
        layer = PieceTimes(1.0, 1.0 + remat.recomputes, 1.0)
        whole = lambda cost: PieceTimes(0.0, cost * layer.all_s, 0.0)  # noqa: E731
        embed, head = (whole(n / (self.vocab_parts or 1)) for n in (relative.embed, relative.head))
        times = OpTimes(embed, layer, head)
        times = times.in_parts(self.vocab_parts) if self.vocab_parts else times
        held, keeps_input = self._bytes() if with_bytes else LayerBytes(), remat.keeps_input_only
        return LayerCosts(relative.layers, times, self.divide, held, keeps_input=keeps_input)

    @cached_property
    def _step(self) -> Step:
        """The counted step of the probe. No product adds its result to a sum, as on any device."""
        return pipeline_step(self.probe, model_on(self.probe, None))

    def _bytes(self) -> LayerBytes:
        """Return the bytes of a layer, embedding, head and values in transit, for executor=mpmd."""
        model, step = self.probe.model, self._step
        embed_head = model.held["embed_head"]
        trained = trained_part(embed_head, model.stack.trains("embed_head"))
        embed_and_head = [
            RankShare(
                embed_head=tree_bytes(keep(embed_head, use)),
                trained_embed_head=tree_bytes(keep(trained, use)),
                over=step.layout.mesh.fsdp,
                batch=tree_bytes(model.microbatch[name]) * model.num_microbatches,
            )
            for use, name in zip(model.outer.uses, ("inputs", "targets"), strict=True)
        ]
        return layer_bytes(step, embed_and_head)

    def in_ticks_bytes(self, lowered: Ticks) -> int:
        """Return the bytes of a rank with executor=spmd."""
        probe, rank_of, slots = self.probe, lowered.schedule.rank_of, lowered.num_slots
        states = self._states(rank_of)
        splits = bool(slots.get("pending"))
        sizes = spmd_sizes(probe.model, states.layout, states.staged, splits=splits)
        counts = [len(layers) for layers in states.layout.placement.partition]
        step = self._step.with_layers(IN_TICKS.rank_layers(counts, rank_of), max(counts))
        return sum(rank_bytes(sizes, slots, workspace_bytes(step)).values())

    @cached_property
    def _states(self) -> Callable[[tuple[int, ...]], States]:
        """The function (rank of each stage) -> states of the model, memoized."""

        def states(rank_of: tuple[int, ...]) -> States:
            layout = replace(self.probe.layout, placement=Placement(self.divide(rank_of), rank_of))
            return replace(self.probe.states, layout=layout)

        return cache(states)
