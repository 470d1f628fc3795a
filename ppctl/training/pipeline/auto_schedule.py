"""The costs of a model for `schedule=auto`: relative times of stages, and bytes of ranks.

Both are computed from the request and array shapes, so every process and command finds the same
schedule. With executor=mpmd a rank holds its layers, residuals and values in transit. With
executor=spmd every rank holds as many layers as the largest rank, and buffer slots. The temporaries
are those of the rank's largest task, or of the whole program; the update's are not counted.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from ppctl.executors.layer_placement import Placement
from ppctl.executors.model_shapes import tree_bytes
from ppctl.executors.outer_layers import keep
from ppctl.executors.spmd.spmd_program import spmd_sizes
from ppctl.executors.work.planned_step import Step
from ppctl.executors.work.rank_bytes import RankShare, layer_bytes, rank_bytes, workspace_bytes
from ppctl.model.trainable_parameters import trained_part
from ppctl.schedule.engine_traits import IN_TICKS
from ppctl.schedule.partition.partition import Partition
from ppctl.schedule.piece_times import OpTimes, PieceTimes
from ppctl.schedule.placement_costs import LayerBytes, LayerCosts
from ppctl.schedule.tick_lowering import Ticks
from ppctl.training.pipeline.engines.train_states import States
from ppctl.training.pipeline.pipeline import Pipeline
from ppctl.training.pipeline.pipeline_step import model_on, pipeline_step


@dataclass(frozen=True)
class ModelCosts:
    """The costs of a model's stages on any placement.

    probe: a pipeline of the model; its schedule does not matter. divide: (rank of each stage) ->
    layers of each stage.
    """

    probe: Pipeline
    divide: Callable[[tuple[int, ...]], Partition]

    def layers(self, *, with_bytes: bool) -> LayerCosts:
        """Return the costs of the layers; with_bytes adds their bytes on ranks of executor=mpmd."""
        relative, remat = self.probe.relative_costs, self.probe.execution.remat
        layer = PieceTimes(1.0, 1.0 + remat.recomputes, 1.0)
        whole = lambda cost: PieceTimes(0.0, cost * layer.all_s, 0.0)  # noqa: E731
        times = OpTimes(whole(relative.embed), layer, whole(relative.head))
        held, keeps_input = self._bytes() if with_bytes else LayerBytes(), remat.keeps_input_only
        return LayerCosts(relative.layers, times, self.divide, held, keeps_input=keeps_input)

    @cached_property
    def _step(self) -> Step:
        """The counted step of the probe. No product adds its result to a sum, as on any device."""
        return pipeline_step(self.probe, model_on(self.probe, None))

    def _bytes(self) -> LayerBytes:
        """Return the bytes of a layer, embedding, head and values in transit, for executor=mpmd."""
        model, step = self.probe.model, self._step
        embed_head, ends = model.held["embed_head"], list[RankShare]()
        trained = trained_part(embed_head, model.stack.trains("embed_head"))
        for use, name in zip(model.outer.uses, ("inputs", "targets"), strict=True):
            share = RankShare(
                embed_head=tree_bytes(keep(embed_head, use)),
                trained_embed_head=tree_bytes(keep(trained, use)),
                over=step.layout.mesh.fsdp,
                batch=tree_bytes(model.microbatch[name]) * model.num_microbatches,
            )
            ends.append(share)
        return layer_bytes(step, ends)

    def in_ticks_bytes(self, lowered: Ticks) -> int:
        """Return the bytes of a rank with executor=spmd."""
        probe, rank_of, slots = self.probe, lowered.schedule.rank_of, lowered.num_slots
        states = self._states(rank_of)
        splits = bool(slots.get("pending"))
        sizes = spmd_sizes(probe.model, states.layout, states.staged, splits=splits)
        counts = [len(layers) for layers in states.layout.placement.partition]
        step = self._step.with_layers(IN_TICKS.rank_layers(counts, rank_of), max(counts))
        return sum(rank_bytes(sizes, slots, workspace_bytes(step)).values())

    def _states(self, rank_of: tuple[int, ...]) -> States:
        """Return the states of the model; rank_of: the rank of each stage. Memoized."""
        if rank_of not in self._placed:
            layout = replace(self.probe.layout, placement=Placement(self.divide(rank_of), rank_of))
            self._placed[rank_of] = replace(self.probe.states, layout=layout)
        return self._placed[rank_of]

    @cached_property
    def _placed(self) -> dict[tuple[int, ...], States]:
        return {}
