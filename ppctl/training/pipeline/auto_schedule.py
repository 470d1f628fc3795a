"""The model as `schedule=auto` sees it: relative seconds of stages, bytes of ranks by shapes.

Both follow from the request alone, so that every process and command finds the same schedule. With
executor=mpmd a rank holds its layers, residuals and values in transit; with executor=spmd all ranks
hold as many layers as the largest, and slots. Temporaries of tasks and the update are not counted.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.executors.model_shapes import shard_bytes, tree_bytes
from ppctl.executors.spmd.spmd_program import spmd_bytes, waiting_bytes
from ppctl.model.trainable_parameters import trained_part
from ppctl.schedule.partition.partition import Partition
from ppctl.schedule.search.placement_costs import LayerCosts, Piece
from ppctl.schedule.tick_lowering import Ticks
from ppctl.training.pipeline.engines.train_states import States
from ppctl.training.pipeline.pipeline import Pipeline

Tree = Any
VALUES = 4  # activations and gradients of a microbatch in transit to or from a rank at once


@dataclass(frozen=True)
class ModelCosts:
    """The costs of a model's stages on any placement.

    probe: the model pipelined by any schedule. divide: rank of each stage -> layers of each stage.
    """

    probe: Pipeline
    divide: Callable[[tuple[int, ...]], Partition]

    def layers(self, *, with_bytes: bool) -> LayerCosts:
        """Return the model as pieces; with_bytes: with their bytes on ranks of executor=mpmd."""
        # 1. seconds; with remat=full the last stage's forward and head run in its backward
        relative, remat = self.probe.relative_costs, self.probe.execution.remat
        seconds = 1.0, 1.0 + remat.recomputes, 1.0
        embed_s, head_s = (each * sum(seconds) for each in (relative.embed, relative.head))
        late = remat.keeps_input_only
        embed = Piece(0.0, embed_s, 0.0)
        head = Piece(0.0, head_s, 0.0) if late else Piece(head_s, 0.0, 0.0)
        if not with_bytes:
            return self._layers(Piece(*seconds), embed, head, head_in_backward=late)
        # 2. bytes
        stash, pending = waiting_bytes(self.probe.model, 1, with_pending=True)
        padded, unpadded = self._layer_bytes
        embed_bytes, head_bytes = self._embed_head_bytes
        layer = Piece(*seconds, unpadded, 0 if late else stash, pending)
        embed, head = embed._replace(fixed_bytes=embed_bytes), head._replace(fixed_bytes=head_bytes)
        x = tree_bytes(self.probe.model.x)
        sizes = {"rank_bytes": VALUES * x, "padded_bytes": padded}
        sizes |= {"stage_stash_bytes": x if late else 0.0, "head_in_backward": late}
        return self._layers(layer, embed, head, **sizes)

    def _layers(self, layer: Piece, embed: Piece, head: Piece, **sizes: Any) -> LayerCosts:
        of_layers = self.probe.relative_costs.layers
        return LayerCosts(of_layers, layer, self.divide, embed, head, **sizes)

    @property
    def _layer_bytes(self) -> tuple[float, float]:
        """Bytes of a layer on a device: of the (padded) state; of copies and gradients."""
        model = self.probe.model
        layer, fsdp = model.held["layers"], self.probe.mesh.shape["fsdp"]
        copies = 1 / fsdp if self.probe.execution.gathers_by_layer else 1.0
        return self._always(layer, trained_part(layer, model.stack.trains("layers")), copies)

    @property
    def _embed_head_bytes(self) -> tuple[float, float]:
        """Bytes of embedding and of head, each with its data, on the first and the last rank."""
        model, sizes = self.probe.model, list[float]()
        for use, name in zip(model.uses, ("inputs", "targets"), strict=True):
            held = model.keep(model.held["embed_head"], use)
            trained = model.keep(model.trained_embed_head(model.held["embed_head"]), use)
            data = tree_bytes(model.microbatch[name]) * model.num_microbatches
            sizes.append(sum(self._always(held, trained, 1.0)) + data)
        return sizes[0], sizes[1]

    def _always(self, params: Tree, trained: Tree, copies: float) -> tuple[float, float]:
        """Return the bytes of parameters' state, and of their copies and sums."""
        state, fsdp = self.probe.states.natural, self.probe.mesh.shape["fsdp"]
        all_trained = trained_part(state["params"], self.probe.stack.options.trainable)
        moments = tree_bytes(state["optimizer"]) / tree_bytes(all_trained)
        copied = sum(a.size for a in jax.tree.leaves(params)) * jnp.dtype(self.probe.dtype).itemsize
        sums = tree_bytes(trained)
        return (tree_bytes(params) + moments * sums) / fsdp, copies * copied + sums

    def in_ticks_bytes(self, lowered: Ticks) -> int:
        """Return the bytes of a device with executor=spmd, as its program holds them."""
        probe, states = self.probe, self._states(lowered.schedule.rank_of)
        layers = states.staged["params"]["layers"]
        held = spmd_bytes(probe.model, states.layout, lowered, layers)
        state = sum(shard_bytes(states.staged[part]) for part in ("params", "optimizer"))
        return state + sum(held.values()) + probe.engine.memory()[0]["batch"]

    def _states(self, rank_of: tuple[int, ...]) -> States:
        """Return the states on a placement, memoized."""
        if rank_of not in self._placed:
            layout = replace(self.probe.layout, partition=self.divide(rank_of), rank_of=rank_of)
            self._placed[rank_of] = replace(self.probe.states, layout=layout)
        return self._placed[rank_of]

    @cached_property
    def _placed(self) -> dict[tuple[int, ...], States]:
        return {}
