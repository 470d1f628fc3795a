"""What `schedule=auto` knows of a model: relative seconds of its stages by FLOPs, and bytes of its ranks by shapes.

Both follow from the request alone, so that every process and every command finds the same schedule. With executor=mpmd
a rank holds its own layers, what a microbatch keeps until its backward, and values on their way; with executor=spmd all
ranks hold as many layers as the largest, and slots. What tasks need only while they run, and the update after them, are
the planner's to count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.executors.layout import Layout
from ppctl.executors.spmd.memory import shard_bytes, spmd_bytes, tree_bytes, waiting_bytes
from ppctl.model.trainable import trained_part
from ppctl.schedule.ir import Schedule
from ppctl.schedule.partition.partition import Partition
from ppctl.schedule.search.layer_costs import LayerCosts, Piece
from ppctl.schedule.ticks import Ticks
from ppctl.training.engines.make import tick_options
from ppctl.training.engines.states import States
from ppctl.training.pipeline import Pipeline

Tree = Any
VALUES = 4  # activations and gradients of a microbatch that are on their way to a rank or from it at the same time


@dataclass(frozen=True)
class ModelCosts:
    """The costs of a model's stages on any placement.

    probe: the model pipelined by any schedule. divide: from the rank of each stage to the layers of each stage.
    may_split: whether what I hands to W counts.
    """

    probe: Pipeline
    divide: Callable[[tuple[int, ...]], Partition]
    may_split: bool

    def layers(self, *, with_bytes: bool) -> LayerCosts:
        """Return the model as pieces; with_bytes: and what ranks hold of them with executor=mpmd."""
        relative, remat = self.probe.relative_costs, self.probe.execution.remat
        seconds = 1.0, 1.0 + remat.recompute_forwards, 1.0
        embed_s, head_s = (each * sum(seconds) for each in (relative.embed, relative.head))
        late = remat.keeps_input_only  # then the last stage's forward runs in its backward, and the head's task with it
        head = (0.0, head_s) if late else (head_s, 0.0)
        parts = [(*seconds,), (0.0, embed_s, 0.0), (*head, 0.0)]
        if not with_bytes:
            return self._layers([Piece(*part) for part in parts], late=late)
        stash, pending = waiting_bytes(self.probe.model, 1, with_pending=self.may_split)
        padded, own = self._layer_bytes
        of_layer = (own, 0 if late else stash, pending if self.may_split else None)
        pieces = [Piece(*parts[0], *of_layer)]
        pieces += [Piece(*part, size) for part, size in zip(parts[1:], self._ends_bytes, strict=True)]
        x = tree_bytes(self.probe.model.x)
        sizes = {"rank_bytes": VALUES * x, "padded_bytes": padded, "stage_stash_bytes": x if late else 0.0}
        return self._layers(pieces, late=late, **sizes)

    def _layers(self, pieces: list[Piece], *, late: bool, **sizes: float) -> LayerCosts:
        layer, embed, head = pieces
        return LayerCosts(
            self.probe.relative_costs.layers, layer, self.divide, embed, head, head_in_backward=late, **sizes
        )

    @property
    def _layer_bytes(self) -> tuple[float, float]:
        """Bytes of a layer on one device: of the state, padded to the largest stage; of copies and gradients."""
        model = self.probe.model
        layer, fsdp = model.held["layers"], self.probe.mesh.shape["fsdp"]
        copies = 1 / fsdp if self.probe.execution.gathers_by_layer else 1.0
        return self._always(layer, model.trained_layers(layer), copies)

    @property
    def _ends_bytes(self) -> tuple[float, float]:
        """The same for what the embedding and the head use, on the first and the last rank, and their data."""
        model, found = self.probe.model, list[float]()
        for use, name in zip(model.uses, ("inputs", "targets"), strict=True):
            held = model.keep(model.held["ends"], use)
            trained = model.keep(model.trained_ends(model.held["ends"]), use)
            data = tree_bytes(model.microbatch[name]) * model.num_microbatches
            found.append(sum(self._always(held, trained, 1.0)) + data)
        return found[0], found[1]

    def _always(self, params: Tree, trained: Tree, copies: float) -> tuple[float, float]:
        """Return the bytes of the state of parameters, and of all that goes with them.

        copies: those that tasks read, in the dtype of compute.
        """
        state, fsdp = self.probe.states.natural, self.probe.mesh.shape["fsdp"]
        moments = tree_bytes(state["optimizer"]) / tree_bytes(trained_part(state["params"], self.probe.stack.trainable))
        copied = sum(a.size for a in jax.tree.leaves(params)) * jnp.dtype(self.probe.dtype).itemsize
        sums = tree_bytes(trained)
        return (tree_bytes(params) + moments * sums) / fsdp, copies * copied + sums

    def in_ticks_bytes(self, lowered: Ticks) -> int:
        """Return the bytes of a device with executor=spmd, as its program holds them."""
        schedule, probe = lowered.schedule, self.probe
        states = self._states(schedule)
        gather = tick_options(states.layout, probe.execution, probe.dtype).gather
        held = spmd_bytes(probe.model, states.layout, lowered, gather, states.staged["params"]["layers"])
        state = sum(shard_bytes(states.staged[part]) for part in ("params", "optimizer"))
        return state + sum(held.values()) + probe.engine.memory()[0]["batch"]

    def _states(self, schedule: Schedule) -> States:
        layout = self.probe.layout
        there = Layout(layout.mesh, self.divide(schedule.rank_of), schedule.rank_of, layout.shards, layout.auto)
        found = self._placed.get(schedule.rank_of)
        return self._placed.setdefault(schedule.rank_of, found or States(there, self.probe.states.init))

    @cached_property
    def _placed(self) -> dict[tuple[int, ...], States]:
        return {}
