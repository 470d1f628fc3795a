"""The stack protocol: all that the executors know of a model.

A model is an embedding and a head, which may share weights (`ends`), around `num_layers` layers, whose parameters have
the same shapes. Parameters are `{"ends": tree, "layers": tree}`; every leaf of "layers" has a leading axis of length L
in model order. Layers that differ, such as the parts that a function was cut into, are padded to the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ppctl.model.parallel import StageAxes

Tree = Any  # a pytree of arrays
NO_DECAY = ("scale", "bias")  # last names of parameters that no optimizer decays: norms and biases


@dataclass(frozen=True)
class Contents:
    """What stands in a layer of a network, or in its embedding or head."""

    name: str  # "embedding", "0", "1", ..., "head"
    params: Mapping[str, tuple[int, ...]]  # shapes by the author's names; one that several use is listed for each
    operations: Mapping[str, int]  # how often each comes, by JAX's names; reshapes aside


class VocabularyParts(NamedTuple):
    """What a rank of the pipeline does for its part of a vocabulary; `part`, int32 scalar, is which one.

    Nothing is sent to other ranks: the executors do that, which know when.

    embed(ends, inputs, part) -> x: a summand; the sum over parts is what the first layer takes.
    log_sums(ends, y, part) -> (sums, kept): logarithms of the sums of exponentials of the part's logits, [tokens], and
    what `head` reads besides; y is the output of the last layer.
    head(ends, y, targets, log_sums, kept, part) -> (sum of losses, number of losses): summands of what `Stack.head`
    returns; log_sums are those over all parts. Its gradients are those of the whole loss: of `ends` this part's, of y
    a summand.
    """

    embed: Callable[[Tree, jax.Array, jax.Array], jax.Array]
    log_sums: Callable[[Tree, jax.Array, jax.Array], tuple[jax.Array, Tree]]
    head: Callable[[Tree, jax.Array, jax.Array, jax.Array, Tree, jax.Array], tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class Stack:
    """A model as pure functions on pytrees: an embedding, `num_layers` layers, a head.

    x is the activation between layers, [batch, ...]; its shape and dtype never change from layer to layer.

    init_ends(key) -> ends: parameters of embedding and head. init_layer(key, l) -> layer: those of layer l, of the same
    shapes for every l. They are drawn with the key or given, as pretrained ones are: l is traced, so
    `jnp.asarray(weights)[l]` and not `weights[l]`.
    embed(ends, inputs) -> x: of one microbatch, inputs [batch, ...]; nothing may mix its examples.
    layer(layer, x) -> x: one function for all layers, or a tuple with one for each where they differ.
    head(ends, x, targets) -> (sum of losses, number of losses): scalars, summed in at least float32; the training loss
    is sum / number over the global batch.
    initial(key) -> {"ends", "layers"}: all initial parameters at once, instead of init_ends and init_layer.
    export(params) -> tree: parameters in the form that the model's author knows.
    outputs(ends, x) -> tree: what the head makes of x before it is compared with targets, such as logits; for whoever
    uses the model once it is trained.
    contents: of a network what stands in its embedding, its layers and its head, in this order.
    divided(axes) -> Stack: the same model as one device computes it whose stage is divided over tp and cp: its
    functions take this device's shards of parameters, and communicate as `ppctl.parallel` says; x is what it holds of
    activations. ConfigError where sizes do not fit. None: the model's stages are not divided so.
    sharding: the PartitionSpec over tp of each parameter (of one layer), like the parameters' tree; one, or None, may
    stand for all below it. Of what `divided` returns it says which shards the functions take; without `divided` XLA
    divides the functions over tp by it, which compute with whole arrays.
    has_vocabulary: whether `divided` heeds `axes.vocab_ranks` (`StageAxes`) and gives the parts; where its sharding of
    ends says tp, it so means the ranks of the pipeline too.
    parts: of what `divided` returns, where embedding and head are divided over ranks: what a rank does for its part.
    trainable: which parameters are trained: booleans like the parameters' tree (of one layer), of which one may stand
    for all below it; True: all. Those that are frozen get no gradients and no optimizer state, and W computes nothing
    for them.
    mixes_examples: None: a run tries on a few examples whether the loss of one depends on those beside it, and refuses
    such a model, of which microbatches make another function. True: so it is meant. False: it is known not to.

    A run checks the functions against each other on shapes alone, and reports what does not fit as a ConfigError.
    """

    num_layers: int
    init_ends: Callable[[jax.Array], Tree]
    init_layer: Callable[[jax.Array, jax.Array], Tree]
    embed: Callable[[Tree, jax.Array], jax.Array]
    layer: Callable[[Tree, jax.Array], jax.Array] | tuple[Callable[[Tree, jax.Array], jax.Array], ...]
    head: Callable[[Tree, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    initial: Callable[[jax.Array], Tree] | None = None  # all initial parameters of a key at once, where not by layer
    export: Callable[[Tree], Tree] | None = None  # parameters in the form that the model's author knows
    mixes_examples: bool | None = None  # None: not known
    outputs: Callable[[Tree, jax.Array], Tree] | None = None  # of the head, before the loss
    divided: Callable[[StageAxes], Stack] | None = None  # as one device computes it, where tp or cp divide stages
    sharding: Tree = field(default=None, compare=False)  # of parameters over tp
    contents: tuple[Contents, ...] = field(default=(), compare=False)  # of a network, which is cut into layers
    has_vocabulary: bool = False  # embedding and head may be divided over the ranks of the pipeline
    parts: VocabularyParts | None = field(default=None, compare=False)  # of embedding and head, one on each rank
    trainable: Tree = field(default=True, compare=False)  # of parameters, which are trained

    def trains(self, part: str) -> Tree:
        """Return which parameters of "ends", or of a layer ("layers"), are trained, as `trainable` says it."""
        return self.trainable[part] if isinstance(self.trainable, Mapping) else self.trainable

    @property
    def are_alike(self) -> bool:
        """Return whether all layers are the same function."""
        return not isinstance(self.layer, tuple)

    def layer_of(self, l: int) -> Callable[[Tree, jax.Array], jax.Array]:
        """Return the function of layer l."""
        return self.layer[l] if isinstance(self.layer, tuple) else self.layer


def over_ranks(parts: VocabularyParts) -> tuple[Callable, Callable]:
    """Return (embed, head) of a `Stack` for programs in which all ranks of a pipeline, axis pp, meet for them."""

    def embed(ends: Tree, inputs: jax.Array) -> jax.Array:
        return parts.embed(ends, inputs, jax.lax.axis_index("pp"))

    def head(ends: Tree, y: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        part = jax.lax.axis_index("pp")
        sums, kept = parts.log_sums(*jax.lax.stop_gradient((ends, y)), part)
        of_all = log_sums_of_parts(jax.lax.all_gather(sums, "pp"))
        return parts.head(ends, y, targets, of_all, kept, part)

    return embed, head


def log_sums_of_parts(sums: jax.Array) -> jax.Array:
    """Return the logarithms of sums of exponentials over all parts, [tokens], from those of each, [parts, tokens]."""
    return jax.nn.logsumexp(sums, axis=0)


def divisor(number: jax.Array) -> jax.Array:
    """Return what sums over so many losses are divided by for their mean: of none, whose sums are 0, by 1 and not 0.

    A batch in which nothing is learned, as of prompts alone, so has loss 0 and gradient 0.
    """
    return jnp.where(number == 0, 1, number)


def init(stack: Stack, seed: int) -> Tree:
    """Return initial parameters {"ends", "layers"}; leaves of "layers" are [num_layers, ...].

    Layer l's weights depend on the seed and on l only, never on the number of layers or on the layout.
    """
    if stack.initial is not None:
        return stack.initial(jax.random.key(seed))
    ends_key, layers_key = jax.random.split(jax.random.key(seed))
    layer = lambda l: stack.init_layer(jax.random.fold_in(layers_key, l), l)  # noqa: E731
    return {"ends": stack.init_ends(ends_key), "layers": jax.vmap(layer)(jnp.arange(stack.num_layers))}
