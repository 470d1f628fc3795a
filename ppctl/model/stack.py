"""The stack protocol: all that the executors know of a model.

Parameters are {"embed_head": tree, "layers": tree}; every leaf of "layers" has a leading axis of
length L in model order. Layers that differ, such as the parts of a network, are padded to the
largest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ppctl.model.layer_reports import Updates
from ppctl.model.parallel import StageAxes
from ppctl.model.random_keys import key_of_seed, names_key, without_key, wrapped

Tree = Any  # a pytree of arrays
Layers = Callable[..., jax.Array] | tuple[Callable[..., jax.Array], ...]
NO_DECAY = ("scale", "bias")  # last names of parameters that no optimizer decays: norms and biases


class VocabularyParts(NamedTuple):
    """A pipeline rank's functions for its part of a vocabulary; `part`, int32 scalar: its number.

    They send nothing to other ranks: the executors do.

    embed(embed_head, inputs, part) -> x: a summand of the first layer's input. log_sums(embed_head,
    y, part) -> (sums, kept): logarithms of the sums of exponentials of the part's logits, [tokens],
    and other values for `head`; y is the output of the last layer.
    head(embed_head, y, targets, log_sums, kept, part) -> (sum of losses, number of losses):
    summands of the results of `Stack.head`; log_sums are over all parts. Its gradients are those of
    the whole loss: this part's of `embed_head`, a summand of y's.
    """

    embed: Callable[[Tree, jax.Array, jax.Array], jax.Array]
    log_sums: Callable[[Tree, jax.Array, jax.Array], tuple[jax.Array, Tree]]
    head: Callable[..., tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class DividedStack:
    """A `Stack` as one device of a stage that is divided over axes, such as tp and cp, computes it.

    Its functions take this device's shards of parameters, communicate as `ppctl.parallel` says, and
    return summands: a loss is the sum over devices of what each returns. x is this device's part.

    embed, layer, head: as in `Stack`, with parts not called.
    sharding: the PartitionSpec of each parameter (of one layer), like the parameters' tree: in one
    dim tp, or other axes inside a stage; one, or None, may stand for a subtree. With parts, tp in
    embed_head also means the ranks of the pipeline.
    parts: the functions of a rank's part of embedding and head, where `axes.vocab_parts` is above
    0. None: unsupported.
    """

    embed: Callable[[Tree, Tree], jax.Array]
    layer: Layers
    head: Callable[[Tree, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    sharding: Tree = None
    parts: VocabularyParts | None = None


@dataclass(frozen=True)
class StackOptions:
    """All that a `Stack` may have besides its functions.

    outputs(embed_head, x) -> tree: the head's predictions before the loss, such as logits.
    trainable: whether parameters are trained: booleans like the parameters' tree (of one layer);
    one may stand for a subtree; True: all. Frozen parameters have no gradients, no optimizer state
    and no work in W.
    updates: functions (parameter, counts) -> next parameter, by the names of a layer's parameters,
    joined by "/", of which layers `ppctl.report` counts: after each step, for a layer, with counts
    summed over the global batch. No gradient, norm, decay or optimizer touches these.
    used_layers: how many layers compute with a part of their parameters, by its first name or by
    all names joined by "/"; without an entry: all. The others have zeros there, which no number of
    parameters counts.
    mixes_examples: None: a run tests on a few examples whether the loss of one depends on others,
    and refuses such a model, since microbatches change it. True: intended. False: known not to.
    check_batch(inputs, targets): raises ConfigError for a batch whose values the model does not
    take, such as ids out of range: NumPy arrays, or other arrays and shapes, of which it looks at
    the dtypes only. targets: None of a prediction.
    divided(axes) -> DividedStack: the same model as one device of a divided stage computes it.
    ConfigError for sizes that do not fit. None: cannot be divided so.
    sharding: without `divided`: the PartitionSpecs over tp, as in `DividedStack`, by which XLA
    divides the functions of whole arrays.
    on_device(device) -> Stack: the same model with the kernels of another device, attached or only
    described, for predictions.
    counted(imbalance) -> Stack: the same model with products whose sizes depend on data as one
    equation each, for predictions; imbalance: work of the most loaded device, over the mean.
    network: ppctl's own, of a cut `Network`: its cut, and the packing of its layers.
    """

    outputs: Callable[[Tree, jax.Array], Tree] | None = None
    trainable: Tree = True
    updates: Updates = field(default_factory=dict)
    used_layers: Mapping[str, int] = field(default_factory=dict)
    mixes_examples: bool | None = None  # None: unknown
    check_batch: Callable[[Any, Any], None] | None = None
    divided: Callable[[StageAxes], DividedStack] | None = None
    sharding: Tree = None
    on_device: Callable[[Any], Stack] | None = None
    counted: Callable[[float], Stack] | None = None
    network: Any = None


@dataclass(frozen=True)
class Stack:
    """A model as pure functions on pytrees: an embedding, `num_layers` layers, a head.

    x is the activation between layers, [batch, ...]; its shape and dtype never change from layer to
    layer.

    init_embed_head(key) -> embed_head: parameters of embedding and head.
    init_layer(key, l) -> layer: those of layer l, of the same shapes for every l; drawn with the
    key, or given, such as pretrained ones. l is traced: `jnp.asarray(weights)[l]`, not
    `weights[l]`.
    embed(embed_head, inputs) -> x: of one microbatch, inputs [batch, ...] or a dict of such arrays,
    without mixing examples.
    layer(layer, x) -> x: one function for all layers, or a tuple with one for each. A layer that
    names a parameter `key` gets a random key for each example, [batch], in training (a function of
    seed, step, layer and example, whatever the layout), and None otherwise: `ppctl.dropout`.
    head(embed_head, x, targets) -> (sum of losses, number of losses): scalars, summed in at least
    float32; the training loss is sum / number over the global batch.
    options: everything else.

    A run checks the functions against each other by shapes; misfits are a ConfigError.
    """

    num_layers: int
    init_embed_head: Callable[[jax.Array], Tree]
    init_layer: Callable[[jax.Array, jax.Array], Tree]
    embed: Callable[[Tree, Tree], jax.Array]
    layer: Layers
    head: Callable[[Tree, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    options: StackOptions = field(default=StackOptions(), compare=False)

    def with_options(self, **changes: Any) -> Stack:
        """Return the same model with other `StackOptions`, by their names."""
        return replace(self, options=replace(self.options, **changes))

    @cached_property
    def param_shapes(self) -> Tree:
        """The shapes of the parameters that `init` returns."""
        return jax.eval_shape(lambda: init(self, 0))

    def counts(self, params: Tree) -> Tree:
        """Return how many numbers each parameter has, without those that no layer computes with.

        params: all parameters, or their shapes.
        """
        used = self.options.used_layers

        def count(path: tuple, leaf: Any) -> int:
            names = [str(getattr(key, "key", key)) for key in path]
            if names[0] != "layers":
                return leaf.size
            whole = used.get(names[1], leaf.shape[0]) if len(names) > 1 else leaf.shape[0]
            return leaf.size // leaf.shape[0] * used.get("/".join(names[1:]), whole)

        return jax.tree_util.tree_map_with_path(count, params)

    def counted(self, imbalance: float = 1.0) -> Stack:
        """Return the model as predictions trace it: see `StackOptions.counted`."""
        return self if self.options.counted is None else self.options.counted(imbalance)

    def in_shards(self, divided: DividedStack) -> Stack:
        """Return the model for programs of one device, whose functions take its shards."""
        return replace(self, embed=divided.embed, layer=divided.layer, head=divided.head)

    def trains(self, part: str) -> Tree:
        """Return `trainable` of "embed_head", or of one layer ("layers")."""
        which = self.options.trainable
        return which[part] if isinstance(which, Mapping) else which

    @property
    def takes_key(self) -> bool:
        """Whether a layer names a parameter `key`."""
        return any(map(names_key, self.layer if isinstance(self.layer, tuple) else (self.layer,)))

    @property
    def are_alike(self) -> bool:
        """Whether all layers are the same function."""
        return not isinstance(self.layer, tuple)

    def without_keys(self) -> Stack:
        """Return the same model with layers as in evaluations."""
        if not self.takes_key:
            return self
        functions = tuple(map(self.layer_of, range(self.num_layers)))
        return replace(self, layer=functions[0] if self.are_alike else functions)

    def layer_of(self, l: int) -> Callable[[Tree, jax.Array], jax.Array]:
        """Return the function of layer l, as in evaluations."""
        return without_key(self.layer[l] if isinstance(self.layer, tuple) else self.layer)


def over_ranks(parts: VocabularyParts) -> tuple[Callable, Callable]:
    """Return (embed, head) for programs in which all ranks, axis pp, meet for them."""

    def embed(embed_head: Tree, inputs: jax.Array) -> jax.Array:
        return parts.embed(embed_head, inputs, jax.lax.axis_index("pp"))

    def head(embed_head: Tree, y: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        part = jax.lax.axis_index("pp")
        sums, kept = parts.log_sums(*jax.lax.stop_gradient((embed_head, y)), part)
        of_all = log_sums_of_parts(jax.lax.all_gather(sums, "pp"))
        return parts.head(embed_head, y, targets, of_all, kept, part)

    return embed, head


def log_sums_of_parts(sums: jax.Array) -> jax.Array:
    """Return the log sums over all parts, [tokens], from those of each, [parts, tokens]."""
    return jax.nn.logsumexp(sums, axis=0)


def num_examples(inputs: Tree) -> int:
    """Return the number of examples of inputs, an array [examples, ...] or a tree of them."""
    return jax.tree.leaves(inputs)[0].shape[0]


def divisor(number: Tree) -> jax.Array:
    """Return the divisor of sums over `number` losses for their mean: 1 for 0.

    So a batch without targets, such as of prompts only, has loss 0 and gradient 0. number: of
    losses, or that of a head with metrics: {"number", name: (weighted sum of values, of weights)}.
    """
    number = number_of(number)
    return jnp.where(number == 0, 1, number)


def number_of(number: Tree) -> jax.Array:
    """Return the number of losses, also from that of a head with metrics."""
    return number["number"] if isinstance(number, dict) else number


def metric_means(number: Tree) -> dict[str, jax.Array]:
    """Return the mean of each metric that a head counts next to the number of losses."""
    sums = number if isinstance(number, dict) else {}
    return {name: a[0] / divisor(a[1]) for name, a in sums.items() if name != "number"}


def init(stack: Stack, seed: int) -> Tree:
    """Return initial parameters {"embed_head", "layers"}; leaves of "layers" are [num_layers, ...].

    Layer l's weights depend on the seed and on l only, never on the number of layers or on the
    layout.
    """
    if stack.options.network is not None:
        return stack.options.network.initial(wrapped(key_of_seed(seed)))
    first, second = jax.random.split(wrapped(key_of_seed(seed)))
    layer = lambda l: stack.init_layer(jax.random.fold_in(second, l), l)  # noqa: E731
    return {
        "embed_head": stack.init_embed_head(first),
        "layers": jax.vmap(layer)(jnp.arange(stack.num_layers)),
    }
