"""A model on one device: its shapes and its stage."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

from ppctl.executors.outer_layers import OuterLayers, traced
from ppctl.executors.parameter_layout import gather_shard, parameter_of, sharded_over
from ppctl.executors.stage.stage import Stage
from ppctl.model.layer_inputs import PARAMS, LayerInputs, outer_numbers
from ppctl.model.layer_reports import cast_embed_head, cast_layers, check_reports
from ppctl.model.parallel import WHOLE, StageAxes
from ppctl.model.stack import Stack, VocabularyParts, num_examples
from ppctl.model.trainable_parameters import trained_part
from ppctl.schedule.remat import Remat

Tree = Any


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

    @property
    def divides_rows(self) -> bool:
        """Whether devices along tp hold parts of the rows of activations."""
        return self.axes.divides_rows and not self.auto

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
        args = self.computed["embed_head"], self.microbatch["inputs"]
        return self.traced(lambda: jax.eval_shape(self.stack.outer[0], *args))

    def traced(self, function: Callable[[], Any]) -> Any:
        """Return function(), traced with the axes inside a stage."""
        return traced(function, self.axes)

    @cached_property
    def inputs(self) -> LayerInputs:
        """The extra inputs of layers, embedding and head."""
        of = self.stack, self.computed, self.x, self.microbatch
        return self.traced(lambda: LayerInputs.of(*of))

    def with_inputs(self, layer: Tree) -> Tree:
        """Return the shapes of a layer with its extra inputs; if it takes keys, its number."""
        place, number = (jax.ShapeDtypeStruct((), dtype) for dtype in (self.master, jnp.int32))
        return self.inputs.extended(layer, place, number)

    def with_outer_inputs(self, embed_head: Tree) -> Tree:
        """Return the shapes of embedding and head with their extra inputs."""
        place = jax.ShapeDtypeStruct((), self.master)
        numbers = jax.ShapeDtypeStruct((2,), jnp.int32)
        return self.inputs.outer.extended(embed_head, place, numbers)

    def computed_params(self, params: Tree, numbers: Any, place: Any = 1) -> Tree:
        """Return staged parameters in the compute dtype, layers with extra inputs.

        numbers: layer number of each slot, int [V, 1, K]; used only if layers take keys. place: the
        value of the places of attached losses.
        """
        shape = jax.tree.leaves(params["layers"])[0].shape[:3]
        places = jnp.full(shape, place, self.master)
        place, outer = jnp.asarray(place, self.master), outer_numbers(self.stack.num_layers)
        extended = {
            "embed_head": self.inputs.outer.extended(params["embed_head"], place, outer),
            "layers": self.inputs.extended(params["layers"], places, numbers),
        }
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

    def trained_weights(self, w: Any) -> Any:
        """Return extended layers (a list, one or stacked) with None for frozen parameters."""
        which = self.inputs.trainable(self.stack)["layers"]
        if isinstance(w, list):
            return [trained_part(layer, which) for layer in w]
        return trained_part(w, which)

    @cached_property
    def outer(self) -> OuterLayers:
        """Embedding and head."""
        return OuterLayers(
            stack=self.stack,
            embed_head=self.embed_head,
            microbatch=self.microbatch,
            x=self.x,
            computed=self.computed["embed_head"],
            dtype=self.dtype,
            axes=self.axes,
            inputs=self.inputs,
            own_embed_head=self.own_embed_head,
            parts=self.parts,
        )

    def check_reports(self) -> None:
        """Raise ConfigError unless layers report the counts that the stack declares."""
        of = self.stack, self.computed, self.x, self.microbatch
        self.traced(lambda: check_reports(*of, outside=self.inputs.outside))

    @property
    def computed(self) -> Tree:
        """Shapes of {"embed_head", "layers"} (one layer), cast as in `computed_layer`."""
        embed_head = cast_embed_head(self.embed_head, self.dtype, self.stack.uncast)
        return {"embed_head": embed_head, "layers": self.computed_layer}

    @property
    def computed_layer(self) -> Tree:
        """Shapes of a layer in the compute dtype, except for the parameters in `Stack.uncast`."""
        return cast_layers(self.layer, self.dtype, self.stack.uncast)


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
