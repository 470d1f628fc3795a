"""The programs of tasks on one device, traced inside shard_map over the submesh of a rank.

Tasks communicate over tp and cp, where these divide the stage, and over fsdp, where they gather its layers: values are
of this device's examples, sums of gradients are its own. Sums, stashes and pendings have a leading axis of length 1
here, and one entry a device outside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.executors.auto_axes import dim_of, is_spec, shards_by
from ppctl.executors.layout import gather_shards
from ppctl.executors.mpmd.task_plan import FORWARD, Role
from ppctl.executors.stage.embedding_head import add_embedding_grad, add_head_grads
from ppctl.executors.stage.layers import DividedWeights
from ppctl.executors.stage.stage import LayerSlots, Stage
from ppctl.model.parallel import WHOLE, StageAxes
from ppctl.model.stack import Stack
from ppctl.model.trainable import trained_flags, trained_part
from ppctl.schedule.remat import Remat

Tree = Any


def is_none(a: Any) -> bool:
    return a is None


@dataclass(frozen=True, eq=False)
class Model:
    """A model as the programs see it, equal to itself alone.

    Shapes are those of one device's examples and of its shards over tp; parameters are whole otherwise, and over tp
    too where XLA divides them.
    """

    stack: Stack  # where tp or cp divide it, as one device computes it
    ends: Tree  # shapes of embedding and head, natural
    layer: Tree  # shapes of one layer
    microbatch: Tree  # shapes of one device's examples of a microbatch: {"inputs", "targets"}
    num_microbatches: int
    remat: Remat
    unroll: int
    dtype: Any
    axes: StageAxes = WHOLE
    own_ends: tuple[bool, ...] | None = None  # where ranks have parts of embedding and head: which leaves are divided
    layer_specs: Tree = None  # PartitionSpecs of a layer that tasks gather over fsdp; None: they are given it whole
    auto_specs: Tree = None  # where XLA divides what is whole here: specs over tp of {"ends", "layers"}, of one layer
    in_order: bool = False  # as of a `Stage`

    def __post_init__(self) -> None:
        object.__setattr__(self, "remat", Remat.of(self.remat))  # may be given by its name

    @property
    def auto(self) -> tuple[str, ...]:
        """The axes over which XLA divides."""
        return () if self.auto_specs is None else ("tp",)

    @cached_property
    def held(self) -> Tree:
        """Shapes of {"ends", "layers"}, of one layer, as one device holds them."""
        whole = {"ends": self.ends, "layers": self.layer}
        return whole if self.auto_specs is None else shards_by(self.auto_specs, whole, "tp", self.axes.tp)

    @cached_property
    def x(self) -> jax.ShapeDtypeStruct:
        """Shape of the activation that passes between layers."""
        return self.traced(
            lambda: jax.eval_shape(self.stack.embed, self.computed(self.ends), self.microbatch["inputs"])
        )

    def traced(self, function: Callable[[], Any]) -> Any:
        """Return function(), of shapes alone, which may trace what the model's layers send over tp and cp."""
        found: list[Any] = []
        jax.make_jaxpr(lambda: found.append(function()), axis_env=list(self.axes.sizes))()
        return found[0]

    @cached_property
    def stage(self) -> Stage:
        gather = None if self.layer_specs is None else partial(gather_shards, specs=self.layer_specs)
        return Stage(
            *(self.stack.layer, self.remat, self.computed(self.layer), self.x, gather, self.divided),
            trainable=self.stack.trains("layers"),
            in_order=self.in_order,
        )

    @cached_property
    def divided(self) -> DividedWeights | None:
        """Where XLA divides the parameters of a layer; None where it does not."""
        if self.auto_specs is None:
            return None
        specs = jax.tree.leaves(self.auto_specs["layers"], is_leaf=is_spec)
        return DividedWeights(tuple(map(dim_of, specs)), self.axes.tp)

    @cached_property
    def uses(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """For each leaf of embedding and head, whether the embedding uses it, and whether the head does; one does."""
        leaves, treedef = jax.tree.flatten(self.computed(self.ends))

        def used(function: Any, *args: Any) -> list[bool]:
            call = lambda leaves, args: function(jax.tree.unflatten(treedef, leaves), *args)  # noqa: E731
            jaxpr = jax.make_jaxpr(call, axis_env=list(self.axes.sizes))(leaves, args).jaxpr
            read = {id(v) for equation in jaxpr.eqns for v in equation.invars} | {id(v) for v in jaxpr.outvars}
            return [id(v) in read for v in jaxpr.invars[: len(leaves)]]

        by_embedding = used(self.stack.embed, self.microbatch["inputs"])
        by_head = used(self.stack.head, self.x, self.microbatch["targets"])
        by_head = [head or not embedding for embedding, head in zip(by_embedding, by_head, strict=True)]
        return tuple(by_embedding), tuple(by_head)

    @property
    def shared(self) -> tuple[bool, ...]:
        """For each leaf of embedding and head, whether both use it, or all parts whole, and it is trained."""
        is_trained = trained_flags(self.ends, self.stack.trains("ends"))
        if self.own_ends is not None:
            return tuple(trained and not own for trained, own in zip(is_trained, self.own_ends, strict=True))
        return tuple(a and b and c for a, b, c in zip(*self.uses, is_trained, strict=True))

    @cached_property
    def losses(self) -> Tree:
        """Shapes of the sum of losses and of their number."""
        ends, targets = self.computed(self.ends), self.microbatch["targets"]
        return self.traced(lambda: jax.eval_shape(self.stack.head, ends, self.x, targets))

    def trained_ends(self, ends: Tree) -> Tree:
        """Return a tree like that of embedding and head with None for what is frozen."""
        return trained_part(ends, self.stack.trains("ends"))

    def trained_layers(self, w: Any) -> Any:
        """Return layers, listed, or a tree like that of one, with None for what is frozen."""
        which = self.stack.trains("layers")
        return [trained_part(layer, which) for layer in w] if isinstance(w, list) else trained_part(w, which)

    def used_by(self, is_first: bool, is_last: bool) -> tuple[bool, ...]:
        """Return for each leaf of embedding and head whether a rank with the first or the last stage holds it.

        Where they are divided every rank holds all leaves, its parts of them or the whole.
        """
        if self.own_ends is not None:
            return (True,) * len(self.own_ends)
        return tuple((is_first and a) or (is_last and b) for a, b in zip(*self.uses, strict=True))

    def keep(self, ends: Tree, used: tuple[bool, ...]) -> Tree:
        """Return `ends` with None for leaves not used."""
        leaves, treedef = jax.tree.flatten(ends, is_leaf=is_none)
        return jax.tree.unflatten(treedef, [leaf if use else None for leaf, use in zip(leaves, used, strict=True)])

    def fill(self, ends: Tree) -> Tree:
        """Return `ends` with zeros for leaves that are None, which nothing uses."""
        leaves, treedef = jax.tree.flatten(self.ends)
        found = jax.tree.leaves(ends, is_leaf=is_none)
        zeros = (jnp.zeros(a.shape, self.dtype) for a in leaves)
        return jax.tree.unflatten(treedef, [z if a is None else a for z, a in zip(zeros, found, strict=True)])

    def computed(self, shapes: Tree) -> Tree:
        """Return shapes of parameters in the compute dtype."""
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, self.dtype), shapes)

    # what a task calls

    def microbatch_of(self, batch: jax.Array, m: jax.Array) -> jax.Array:
        """Return microbatch m of this device's examples of a batch."""
        return jax.lax.dynamic_index_in_dim(batch.reshape(self.num_microbatches, -1, *batch.shape[1:]), m, 0, False)

    def embed(self, v: dict[str, Any]) -> jax.Array:
        return self.stack.embed(self.fill(v["ends_in"]), self.microbatch_of(v["inputs"], v["m"]))

    def embed_grad(self, v: dict[str, Any], gx: jax.Array) -> Tree:
        """Return acc_in with the gradient of the embedding added."""
        inputs = self.microbatch_of(v["inputs"], v["m"])
        embed = lambda ends, inputs: self.stack.embed(self.fill(ends), inputs)  # noqa: E731
        total, which = drop_device_dim(v["acc_in"]), self.stack.trains("ends")
        return add_device_dim(add_embedding_grad(embed, v["ends_in"], inputs, gx, total, which))

    def loss(self, v: dict[str, Any], y: jax.Array) -> Tree:
        """Return losses with the loss of y added."""
        return add_to_sums(
            v["losses"], self.stack.head(self.fill(v["ends_out"]), y, self.microbatch_of(v["targets"], v["m"]))
        )

    def head(self, v: dict[str, Any], y: jax.Array) -> tuple[jax.Array, tuple[Tree, Tree]]:
        """Return (gradient of y, (losses with the loss of y added, acc_out with the head's gradient added))."""
        targets = self.microbatch_of(v["targets"], v["m"])
        head = lambda ends, y, targets: self.stack.head(self.fill(ends), y, targets)  # noqa: E731
        total, which = drop_device_dim(v["acc_out"]), self.stack.trains("ends")
        gy, ends, loss, number = add_head_grads(head, v["ends_out"], y, targets, total, which)
        return gy, (add_to_sums(v["losses"], (loss, number)), add_device_dim(ends))


def add_to_sums(total: Tree, update: Tree) -> Tree:
    """Add `update` to a sum, which alone has a leading axis."""
    return jax.tree.map(lambda t, u: t + u.astype(t.dtype)[None], total, update)


def add_device_dim(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: a[None], tree)


def drop_device_dim(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: a[0], tree)


def run_task(model: Model, kind: str, role: Role, v: dict[str, Any]) -> dict[str, Any]:
    """Return the values that a task of this kind writes, by name, from those that it reads."""
    stage, first = model.stage, role.first_layer
    layer_slots = None if first is None else LayerSlots(numbers=range(first, first + role.num_layers))
    out: dict[str, Any] = {}
    if kind in (FORWARD, "F"):
        x = model.embed(v) if role.is_first else v["x"]
        out["y"], stash = stage.forward(v["w"], layer_slots, x)
        if kind == "F":
            out["stash"] = add_device_dim(stash)
        if role.is_last and kind == "F":
            out["gy"], (out["losses"], out["acc_out"]) = model.head(v, out["y"])
        elif role.is_last:
            out["losses"] = model.loss(v, out["y"])
        return out
    if kind == "W":
        out["acc"] = stage.weight_grad(v["w"], layer_slots, drop_device_dim(v["pending"]), v["acc"])
        return out
    recomputed = lambda: model.embed(v) if role.is_first else v["x"]  # noqa: E731
    stash = recomputed() if stage.keeps_input else drop_device_dim(v["stash"])
    cotangent = lambda y: model.head(v, y) if stage.keeps_input and role.is_last else (v["gy"], (None, None))  # noqa: E731
    if kind == "B":
        found = stage.backward(v["w"], layer_slots, stash, cotangent, v["acc"])
        out["gx"], out["acc"], (out["losses"], out["acc_out"]) = found
    else:
        out["gx"], pending, (out["losses"], out["acc_out"]) = stage.input_grad(v["w"], layer_slots, stash, cotangent)
        out["pending"] = add_device_dim(pending)
    if role.is_first:
        out["acc_in"] = model.embed_grad(v, out["gx"])
    return out
