"""The costs of a model for `schedule=auto`: relative times of stages, and bytes of ranks.

Both are computed from the request and array shapes, so every process and command finds the same
schedule. With executor=mpmd a rank holds its layers, residuals and values in transit. With
executor=spmd every rank holds as many layers as the largest rank, and buffer slots. Temporaries of
tasks and of the update are not counted.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from ppctl.executors.layer_placement import Placement
from ppctl.executors.model_shapes import shard_bytes, tree_bytes
from ppctl.executors.spmd.spmd_program import spmd_bytes, waiting_bytes
from ppctl.executors.work.parameter_bytes import param_bytes
from ppctl.schedule.partition.partition import Partition
from ppctl.schedule.piece_times import OpTimes, PieceTimes
from ppctl.schedule.placement_costs import LayerBytes, LayerCosts
from ppctl.schedule.tick_lowering import Ticks
from ppctl.training.pipeline.engines.train_states import States
from ppctl.training.pipeline.pipeline import Pipeline

VALUES = 4  # number of values in transit at a rank, each an activation or gradient


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

    def _bytes(self) -> LayerBytes:
        """Return the bytes of a layer, embedding, head and values in transit, for executor=mpmd."""
        # 1. layers
        probe, model, fsdp = self.probe, self.probe.model, self.probe.meshes.sizes.fsdp
        params = param_bytes(probe.states.natural, model, probe.layout.of_rank.shards)
        stash, pending = waiting_bytes(model, 1, with_pending=True)
        copies = 1 / fsdp if probe.execution.gathers_by_layer else 1.0
        padded, layer = params.held(params.layer, params.trained_layer, fsdp, copies)

        # 2. the embedding with the inputs, the head with the targets
        embed_head, sizes = model.held["embed_head"], list[float]()
        for use, name in zip(model.uses, ("inputs", "targets"), strict=True):
            whole = tree_bytes(model.keep(embed_head, use))
            trained = tree_bytes(model.keep(model.trained_embed_head(embed_head), use))
            held = params.held(whole, trained, fsdp)
            sizes.append(sum(held) + tree_bytes(model.microbatch[name]) * model.num_microbatches)

        # 3. stashed values and values in transit; with remat=full stages keep only their inputs
        x, keeps_input = tree_bytes(model.x), probe.execution.remat.keeps_input_only
        waiting = (0.0, pending, x) if keeps_input else (stash, pending, 0.0)
        return LayerBytes(layer, padded, *waiting, *sizes, rank=VALUES * x)

    def in_ticks_bytes(self, lowered: Ticks) -> int:
        """Return the bytes of the state, buffers and batch on one device with executor=spmd."""
        probe, states = self.probe, self._states(lowered.schedule.rank_of)
        layers = states.staged["params"]["layers"]
        held = spmd_bytes(probe.model, states.layout, lowered, layers)
        state = sum(shard_bytes(states.staged[part]) for part in ("params", "optimizer"))
        return state + sum(held.values()) + probe.engine.memory()[0]["batch"]

    def _states(self, rank_of: tuple[int, ...]) -> States:
        """Return the states of the model; rank_of: the rank of each stage. Memoized."""
        if rank_of not in self._placed:
            layout = replace(self.probe.layout, placement=Placement(self.divide(rank_of), rank_of))
            self._placed[rank_of] = replace(self.probe.states, layout=layout)
        return self._placed[rank_of]

    @cached_property
    def _placed(self) -> dict[tuple[int, ...], States]:
        return {}
