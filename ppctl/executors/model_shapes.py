"""A model on one device: its shapes, its stage, and the leaves that embedding and head use."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ppctl.executors.parameter_layout import gather_shard, parameter_of, sharded_over
from ppctl.executors.stage.layer_programs import add_embedding_grad, add_head_grads
from ppctl.executors.stage.stage import Stage
from ppctl.model.layer_inputs import PARAMS, LayerInputs, without_attached
from ppctl.model.layer_reports import cast_layers, check_reports
from ppctl.model.parallel import WHOLE, StageAxes
from ppctl.model.stack import Stack, VocabularyParts, num_examples
from ppctl.model.trainable_parameters import trained_flags, trained_part
from ppctl.schedule.remat import Remat

Tree = Any


def is_none(a: Any) -> bool:
    return a is None


@dataclass(frozen=True, eq=False)
class Model:
    """A model as one device's programs see it; models compare by identity.

    Batches have the shapes of one device's examples. Parameters have the shapes of the device's
    shards if axes divide the stage; shapes are whole if the stage is undivided or XLA divides it.
    """

    stack: Stack  # stack with the functions of one device
    embed_head: Tree  # shapes of embedding and head, in natural form
    layer: Tree  # shapes of one layer
    microbatch: Tree  # shapes of one device's examples of a microbatch: {"inputs", "targets"}
    num_microbatches: int
    remat: Remat
    unroll: int
    dtype: Any
    axes: StageAxes = WHOLE
    # for each leaf of embed_head, whether the pipeline ranks divide it; None: they divide no leaf
    own_embed_head: tuple[bool, ...] | None = None
    # specs of a layer, if tasks gather it over fsdp; None: all layers are gathered once a step
    layer_specs: Tree = None
    auto_specs: Tree = None  # specs of {"embed_head", "layers"}, if XLA divides the model
    platform: str = "cpu"  # "cpu" | "gpu" | "tpu"
    parts: VocabularyParts | None = None  # functions for a rank's part of the vocabulary

    def __post_init__(self) -> None:
        object.__setattr__(self, "remat", Remat.of(self.remat))  # also takes a name

    @property
    def for_gpu(self) -> bool:
        """Whether programs need `Stage(in_order=True)`, and loops instead of branches in ticks."""
        return self.platform == "gpu"

    @property
    def communicates(self) -> bool:
        """Whether tasks have collectives, besides the hops between them."""
        return bool(self.axes.divided or self.axes.vocab_parts or self.auto) or (
            self.layer_specs is not None
        )

    @property
    def auto(self) -> tuple[str, ...]:
        """The axes that XLA divides the model over."""
        specs = [] if self.auto_specs is None else jax.tree.leaves(self.auto_specs)
        return tuple(dict.fromkeys(name for spec in specs for name in sharded_over(spec)))

    @cached_property
    def held(self) -> Tree:
        """Shapes of {"embed_head", "layers"} (one layer) on one device."""
        whole = {"embed_head": self.embed_head, "layers": self.layer}
        if self.auto_specs is None:
            return whole
        mesh = AbstractMesh(*zip(*((size, name) for name, size in self.axes.sizes), strict=True))

        def shard(spec: P, a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(a.shape), a.dtype)

        return jax.tree.map(shard, self.auto_specs, whole)

    @cached_property
    def x(self) -> jax.ShapeDtypeStruct:
        """Shape of the activation between layers."""
        args = self.computed(self.embed_head), self.microbatch["inputs"]
        return self.traced(lambda: jax.eval_shape(self.stack.embed, *args))

    def traced(self, function: Callable[[], Any]) -> Any:
        """Return function(), traced with the axes inside a stage: layers may use collectives."""
        found: list[Any] = []
        jax.make_jaxpr(lambda: found.append(function()), axis_env=list(self.axes.sizes))()
        return found[0]

    @cached_property
    def inputs(self) -> LayerInputs:
        """The extra inputs of layers. Raises ConfigError if embedding or head attach a loss."""
        embed_head, batch = self.computed(self.embed_head), self.microbatch
        with without_attached("embedding"):
            self.traced(lambda: jax.eval_shape(self.stack.embed, embed_head, batch["inputs"]))
        with without_attached("head"):
            args = embed_head, self.x, batch["targets"]
            self.traced(lambda: jax.eval_shape(self.stack.head, *args))
        layer = self.stack, self.computed_layer, self.x
        return self.traced(lambda: LayerInputs.of(*layer))

    def with_inputs(self, layer: Tree) -> Tree:
        """Return the shapes of a layer with its extra inputs; if it takes keys, its number."""
        place, number = (jax.ShapeDtypeStruct((), dtype) for dtype in (self.master, jnp.int32))
        return self.inputs.extended(layer, place, number)

    def computed_params(self, params: Tree, numbers: Any, place: Any = 1) -> Tree:
        """Return staged parameters in the compute dtype, layers with extra inputs.

        numbers: layer number of each slot, int [V, 1, K]; used only if layers take keys. place: the
        value of the places of attached losses.
        """
        shape = jax.tree.leaves(params["layers"])[0].shape[:3]
        places = jnp.full(shape, place, self.master)
        extended = params | {"layers": self.inputs.extended(params["layers"], places, numbers)}
        return self.inputs.computed(extended, self.dtype, self.stack.uncast)

    @cached_property
    def stage(self) -> Stage:
        """The stage in a train step: its layers get keys if they take any."""
        keys = jax.ShapeDtypeStruct((self.num_examples, 2), jnp.uint32)
        layer = self.with_inputs(self.computed_layer)
        return self._stage(jax.eval_shape(self.inputs.with_keys, layer, keys))

    @cached_property
    def evaluation_stage(self) -> Stage:
        """The stage in an evaluation: its layers get no keys."""
        layer = self.with_inputs(self.computed_layer)
        return self._stage(layer) if self.inputs.has_key else self.stage

    def _stage(self, layer: Tree) -> Stage:
        inputs, gather = self.inputs, None
        if self.layer_specs is not None:
            gather = partial(self.gather_layers, specs=inputs.extended(self.layer_specs, P(), P()))
        how = gather, inputs.trainable(self.stack)["layers"], self.for_gpu
        return Stage(inputs.functions(self.stack.layer), self.remat, layer, self.x, *how)

    def gather_layers(self, layers: Tree, specs: Tree) -> Tree:
        """Gather extended layers over fsdp, inside shard_map. specs: their PartitionSpecs."""
        rounded = self.stack.options.rounded_weights

        def whole(path: tuple, leaf: jax.Array, spec: P) -> jax.Array:
            return gather_shard(leaf, spec, rounded.get("/".join(parameter_of(path)[1:])))

        trees = ({"layers": self.inputs.separate(tree)[0]} for tree in (layers, specs))
        params = jax.tree_util.tree_map_with_path(whole, *trees)["layers"]
        return layers | {PARAMS: params} if self.inputs else params

    @property
    def num_examples(self) -> int:
        """Number of examples in a microbatch on one device."""
        return num_examples(self.microbatch["inputs"])

    @property
    def master(self) -> Any:
        """Dtype of parameters and of sums of gradients."""
        return jax.tree.leaves(self.embed_head or self.layer)[0].dtype

    @cached_property
    def uses(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """(flags of the leaves that the embedding uses, flags of those that the head uses).

        A leaf that neither uses counts as the head's.
        """
        leaves, treedef = jax.tree.flatten(self.computed(self.embed_head))

        def used(function: Any, *args: Any) -> list[bool]:
            call = lambda leaves, args: function(jax.tree.unflatten(treedef, leaves), *args)  # noqa: E731
            jaxpr = jax.make_jaxpr(call, axis_env=list(self.axes.sizes))(leaves, args).jaxpr
            read = {id(v) for equation in jaxpr.eqns for v in equation.invars}
            read |= {id(v) for v in jaxpr.outvars}
            return [id(v) in read for v in jaxpr.invars[: len(leaves)]]

        by_embedding = used(self.stack.embed, self.microbatch["inputs"])
        by_head = used(self.stack.head, self.x, self.microbatch["targets"])
        by_head = [a or not b for a, b in zip(by_head, by_embedding, strict=True)]
        return tuple(by_embedding), tuple(by_head)

    @property
    def shared(self) -> tuple[bool, ...]:
        """Flags of the trained leaves of embed_head that embedding and head share.

        With a divided vocabulary these are the undivided leaves, which every rank uses.
        """
        is_trained = trained_flags(self.embed_head, self.stack.trains("embed_head"))
        if self.own_embed_head is not None:
            return tuple(a and not b for a, b in zip(is_trained, self.own_embed_head, strict=True))
        return tuple(a and b and c for a, b, c in zip(*self.uses, is_trained, strict=True))

    @cached_property
    def losses(self) -> Tree:
        """Shapes of (sum of losses, number of losses)."""
        embed_head, targets = self.computed(self.embed_head), self.microbatch["targets"]
        return self.traced(lambda: jax.eval_shape(self.stack.head, embed_head, self.x, targets))

    def trained_embed_head(self, embed_head: Tree) -> Tree:
        """Return a tree like `embed_head` with None for frozen parameters."""
        return trained_part(embed_head, self.stack.trains("embed_head"))

    def trained_weights(self, w: Any) -> Any:
        """Return extended layers (a list, one or stacked) with None for frozen parameters."""
        which = self.inputs.trainable(self.stack)["layers"]
        if isinstance(w, list):
            return [trained_part(layer, which) for layer in w]
        return trained_part(w, which)

    def used_by(self, is_first: bool, is_last: bool) -> tuple[bool, ...]:
        """Return flags of the embed_head leaves that a rank with the first or last stage uses.

        With a divided vocabulary every rank uses all leaves.
        """
        if self.own_embed_head is not None:
            return (True,) * len(self.own_embed_head)
        return tuple((is_first and a) or (is_last and b) for a, b in zip(*self.uses, strict=True))

    def keep(self, embed_head: Tree, used: tuple[bool, ...]) -> Tree:
        """Return `embed_head` with None for unused leaves."""
        leaves, treedef = jax.tree.flatten(embed_head, is_leaf=is_none)
        kept = [leaf if use else None for leaf, use in zip(leaves, used, strict=True)]
        return jax.tree.unflatten(treedef, kept)

    def fill(self, embed_head: Tree) -> Tree:
        """Return `embed_head` with zeros for unused leaves, which are None."""
        leaves, treedef = jax.tree.flatten(self.embed_head)
        found = jax.tree.leaves(embed_head, is_leaf=is_none)
        zeros = (jnp.zeros(a.shape, self.dtype) for a in leaves)
        filled = [z if a is None else a for z, a in zip(zeros, found, strict=True)]
        return jax.tree.unflatten(treedef, filled)

    # embedding and head from a rank's leaves (None: unused), or from its part of the vocabulary

    def embed(self, embed_head: Tree, inputs: Tree, part: jax.Array | None = None) -> jax.Array:
        if part is not None and self.parts is not None:
            return self.parts.embed(embed_head, inputs, part)
        return self.stack.embed(self.fill(embed_head), inputs)

    def head(self, embed_head: Tree, y: jax.Array, targets: Tree, *known: Any) -> tuple:
        """Return (sum of losses, their number).

        known: the last arguments of `VocabularyParts.head`, if the vocabulary is divided.
        """
        if known and self.parts is not None:
            return self.parts.head(embed_head, y, targets, *known)
        return self.stack.head(self.fill(embed_head), y, targets)

    def add_embedding(
        self, embed_head: Tree, inputs: Tree, gx: jax.Array, total: Tree, part: Any = None
    ) -> Tree:
        """Return `total` plus the embedding's gradient; gx: gradient of the embedding's result.

        part: number of the vocabulary part, if executor=mpmd divides the vocabulary, else None.
        """
        trains, embed = self.stack.trains("embed_head"), partial(self.embed, part=part)
        return add_embedding_grad(embed, embed_head, inputs, gx, total, trains)

    def add_head(
        self, embed_head: Tree, y: jax.Array, targets: Tree, total: Tree, *known: Any
    ) -> tuple[jax.Array, Tree, Any]:
        """Return (gradient of y, `total` with the head's gradient, (sum of losses, number))."""
        trains, head = self.stack.trains("embed_head"), lambda *args: self.head(*args, *known)
        gy, total, *losses = add_head_grads(head, embed_head, y, targets, total, trains)
        return gy, total, tuple(losses)

    def check_reports(self) -> None:
        """Raise ConfigError unless layers report the counts that the stack declares."""
        layers = [*map(self.stack.layer_of, range(self.stack.num_layers))]
        how = self.stack.options.updates, self.stack.trains("layers")
        self.traced(lambda: check_reports(layers, self.computed_layer, self.x, *how))

    @property
    def computed_layer(self) -> Tree:
        """Shapes of a layer in the compute dtype, except for the parameters in `Stack.uncast`."""
        return cast_layers(self.layer, self.dtype, self.stack.uncast)

    def computed(self, shapes: Tree) -> Tree:
        """Return shapes of parameters in the compute dtype."""
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, self.dtype), shapes)


def tree_bytes(tree: Tree) -> int:
    """Return the bytes of a tree of undivided arrays or shapes."""
    return sum(prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def shard_bytes(tree: Tree) -> int:
    """Return the bytes of a tree of sharded arrays or shapes on one device."""
    each = ((a, a.sharding.shard_shape(a.shape)) for a in jax.tree.leaves(tree))
    return sum(prod(shape) * a.dtype.itemsize for a, shape in each)


def shard_shapes(tree: Tree) -> Tree:
    """Return the shapes of one device's shards of a tree of sharded arrays or shapes."""
    one = lambda a: jax.ShapeDtypeStruct(a.sharding.shard_shape(a.shape), a.dtype)  # noqa: E731
    return jax.tree.map(one, tree)
