"""The stack protocol: the form of a model that the executors run.

Parameters are {"embed_head": tree, "layers": tree}. Every leaf of "layers" has a leading axis of
length num_layers, in model order. Layers of different sizes, such as the parts of a network, are
padded to the largest.
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
# end of the names of Pallas kernels that add their sum to their last operand
ADDS_TO_LAST = "_adds_to_last"
NO_DECAY = ("scale", "bias")  # last names of parameters without weight decay: norms and biases


class VocabularyParts(NamedTuple):
    """A pipeline rank's functions for its part of a vocabulary that the ranks divide.

    `part` is the index of the part, an int32 scalar. The functions do not communicate with other
    ranks; the executors do.

    Attributes:
        embed: (embed_head, inputs, part) -> this part's summand of the first layer's input.
        log_sums: (embed_head, y, part) -> (sums, kept). y is the last layer's output. sums
            [tokens]: logarithms of the sums of exponentials of the part's logits. kept: other
            values for `head`.
        head: (embed_head, y, targets, log_sums, kept, part) -> (sum of losses, number of losses),
            both summands of the results of `Stack.head`. log_sums are over all parts. The gradients
            are those of the whole loss: complete for this part of `embed_head`, a summand for y.
    """

    embed: Callable[[Tree, jax.Array, jax.Array], jax.Array]
    log_sums: Callable[[Tree, jax.Array, jax.Array], tuple[jax.Array, Tree]]
    head: Callable[..., tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class DividedStack:
    """The functions of a `Stack` on one device of a stage that is divided over axes (tp, cp, ...).

    They take this device's shards of the parameters and this device's part of x. The results of
    `head` are summed over the devices; `ppctl.parallel` states the rule for collectives.

    Attributes:
        embed, layer, head: As in `Stack`. With `parts`, embed and head are not called.
        sharding: A tree like the parameters' (of one layer) with the PartitionSpec of each: one dim
            over tp, or over other axes inside a stage. One spec, or None, may stand for a subtree.
            With `parts`, the pipeline ranks also divide the sharded dims of embed_head.
        parts: The functions that replace embed and head if pipeline ranks divide the vocabulary
            (`axes.vocab_parts` above 0). None: the model does not support this.
        outputs: (embed_head, x, targets) -> tree: the whole outputs (`StackOptions.outputs`) of the
            examples, gathered from the devices of the stage, for metrics. None: a step has no
            metrics.
    """

    embed: Callable[[Tree, Tree], jax.Array]
    layer: Layers
    head: Callable[[Tree, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    sharding: Tree = None
    parts: VocabularyParts | None = None
    outputs: Callable[[Tree, jax.Array, jax.Array], Tree] | None = None


@dataclass(frozen=True)
class StackOptions:
    """Options of a `Stack` besides its functions.

    Attributes:
        outputs: (embed_head, x) -> tree: the head's predictions before the loss, such as logits.
        trainable: A tree of booleans like the parameters' (of one layer): whether each is trained.
            One boolean may stand for a subtree; True: all. Frozen parameters have no gradients, no
            optimizer state and no weight-gradient work.
        updates: {name: (parameter, counts) -> next parameter} for the parameters of a layer that it
            passes to `ppctl.report`. A name is the parameter's path joined by "/", with
            "embed_head/" before it for a parameter of embedding and head. Each function runs after
            a step, for one layer, with counts summed over the global batch. These
            parameters have no gradient, and no norm, decay or optimizer includes them.
        keep_dtype: Names of parameters of a layer, as in `updates`, that keep their dtype, as those
            in `updates` do. All others are cast to the compute dtype.
        divisors: (inputs, targets) -> (number of losses, number of units), sums over the given
            examples. Attached losses are divided by the units, such as tokens that are not padding.
            None: by the number of losses, as the head's sum is.
        used_layers: The number of layers that compute with a part of the parameters, by the part's
            first name or by its path joined by "/"; without an entry: all layers. The other layers
            have zeros for the part, and parameter counts leave these out.
        mixes_examples: Whether the loss of an example depends on other examples. True: intended.
            False: it does not. None: unknown; a run tests it on a few examples, and refuses a model
            that mixes them, since microbatches would change its loss.
        rounded_weights: {name: dim} of the matrices of a layer that it reads only as 8-bit values
            (`ppctl.model.fp8_products`). A name is the parameter's path joined by "/". Each scale
            covers one index of the other dim. These matrices are gathered over fsdp in 8 bits.
        check_batch: (inputs, targets) -> None. Raises ConfigError for unsupported values, such as
            ids out of range. It checks the values of NumPy arrays, and only the dtypes of other
            arrays and shapes. targets: None in predictions.
        divided: (axes) -> `DividedStack`: the functions on one device of a divided stage.
            ConfigError for sizes that do not fit. None: unsupported.
        sharding: Without `divided`: the PartitionSpecs over tp, as in `DividedStack`; XLA divides
            the functions of whole arrays by them.
        on_device: (device) -> Stack: the same model with the kernels of another device, attached or
            only described, for predictions.
        counted: (imbalance) -> Stack: the same model for predictions. In it, a product whose size
            depends on data is one equation. imbalance: work of the most loaded device relative to
            the mean.
        initial: (key) -> {"embed_head", "layers"}: all initial parameters, for a model that draws
            them together, in place of `init_embed_head` and `init_layer`.
        author_model: (params) -> the object that the author made, such as a Flax module, with these
            parameters, in the form of `Pipeline.params`.
        network: Internal: the cut of a `Network`, and the packing of its layers.
    """

    outputs: Callable[[Tree, jax.Array], Tree] | None = None
    trainable: Tree = True
    updates: Updates = field(default_factory=dict)
    keep_dtype: tuple[str, ...] = ()
    divisors: Callable[[Tree, Tree], tuple[Any, Any]] | None = None
    used_layers: Mapping[str, int] = field(default_factory=dict)
    mixes_examples: bool | None = None  # None: unknown
    rounded_weights: Mapping[str, int] = field(default_factory=dict)
    check_batch: Callable[[Any, Any], None] | None = None
    divided: Callable[[StageAxes], DividedStack] | None = None
    sharding: Tree = None
    on_device: Callable[[Any], Stack] | None = None
    counted: Callable[[float], Stack] | None = None
    initial: Callable[[jax.Array], Tree] | None = None
    author_model: Callable[[Tree], Any] | None = None
    network: Any = None


@dataclass(frozen=True)
class Stack:
    """A model as pure functions on pytrees: an embedding, `num_layers` layers, a head.

    x is the activation between layers, [batch, ...]; all layers keep its shape and dtype. A run
    checks the shapes of the functions against each other; a misfit is a ConfigError.

    Attributes:
        num_layers: Number of layers.
        init_embed_head: (key) -> embed_head: parameters of embedding and head.
        init_layer: (key, l) -> layer: parameters of layer l, with the same shapes for every l;
            drawn with the key, or existing ones, such as pretrained ones. l is traced:
            `jnp.asarray(weights)[l]`, not `weights[l]`.
        embed: (embed_head, inputs) -> x of one microbatch, without mixing examples. inputs: an
            array [batch, ...] or a dict of such arrays.
        layer: (layer, x) -> x: one function for all layers, or a tuple with one for each. A layer
            with a parameter `key` gets a random key for each example, [batch], in training, and
            None otherwise (see `ppctl.dropout`). The key depends on seed, step, layer and example,
            never on the layout. The same holds for embed and head.
        head: (embed_head, x, targets) -> (sum of losses, number of losses): scalars, summed in at
            least float32. The training loss is sum / number over the global batch.
        options: Everything else.
    """

    num_layers: int
    init_embed_head: Callable[[jax.Array], Tree]
    init_layer: Callable[[jax.Array, jax.Array], Tree]
    embed: Callable[[Tree, Tree], jax.Array]
    layer: Layers
    head: Callable[[Tree, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    options: StackOptions = field(default=StackOptions(), compare=False)

    def with_options(self, **changes: Any) -> Stack:
        """Return the same model with these `StackOptions` replaced."""
        return replace(self, options=replace(self.options, **changes))

    @cached_property
    def param_shapes(self) -> Tree:
        """Return the shapes of the parameters that `init` returns."""
        return jax.eval_shape(lambda: init(self, 0))

    def counts(self, params: Tree) -> Tree:
        """Return the number of entries of each parameter, without those that no layer uses.

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
        """Return the form of the model for predictions: see `StackOptions.counted`."""
        return self if self.options.counted is None else self.options.counted(imbalance)

    def in_shards(self, divided: DividedStack) -> Stack:
        """Return the model with the functions of one device, which take the device's shards."""
        return replace(self, embed=divided.embed, layer=divided.layer, head=divided.head)

    def trains(self, part: str) -> Tree:
        """Return `trainable` of "embed_head", or of one layer ("layers")."""
        which = self.options.trainable
        return which[part] if isinstance(which, Mapping) else which

    @property
    def uncast(self) -> frozenset[str]:
        """Return the names of the parameters of a layer that keep their dtype."""
        return frozenset((*self.options.updates, *self.options.keep_dtype))

    @property
    def takes_key(self) -> bool:
        """Return whether a layer, the embedding or the head has a parameter `key`."""
        return any(map(names_key, (self.embed, *self.functions, self.head)))

    @property
    def functions(self) -> tuple[Callable[..., jax.Array], ...]:
        """Return the functions of the layers; one if all are alike."""
        return self.layer if isinstance(self.layer, tuple) else (self.layer,)

    @property
    def outer(self) -> tuple[Callable[..., jax.Array], Callable[..., tuple[jax.Array, Any]]]:
        """Return (embed, head) as in evaluations, without keys."""
        return without_key(self.embed), without_key(self.head)

    @property
    def are_alike(self) -> bool:
        """Return whether all layers are the same function."""
        return not isinstance(self.layer, tuple)

    def without_keys(self) -> Stack:
        """Return the same model with its functions as in evaluations, without keys."""
        if not self.takes_key:
            return self
        functions = tuple(map(self.layer_of, range(self.num_layers)))
        embed, head = self.outer
        layer = functions[0] if self.are_alike else functions
        return replace(self, embed=embed, layer=layer, head=head)

    def layer_of(self, l: int) -> Callable[[Tree, jax.Array], jax.Array]:
        """Return the function (w, x) of layer l as in evaluations, without a key."""
        return without_key(self.layer[l] if isinstance(self.layer, tuple) else self.layer)


def over_ranks(parts: VocabularyParts) -> tuple[Callable, Callable]:
    """Return (embed, head) for one program that runs them on all ranks along axis pp."""

    def embed(embed_head: Tree, inputs: jax.Array) -> jax.Array:
        return parts.embed(embed_head, inputs, jax.lax.axis_index("pp"))

    def head(embed_head: Tree, y: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        part = jax.lax.axis_index("pp")
        sums, kept = parts.log_sums(*jax.lax.stop_gradient((embed_head, y)), part)
        of_all = log_sums_of_parts(jax.lax.all_gather(sums, "pp"))
        return parts.head(embed_head, y, targets, of_all, kept, part)

    return embed, head


def log_sums_of_parts(sums: jax.Array) -> jax.Array:
    """Return the log sums over all parts, [tokens], given those of each part, [parts, tokens]."""
    return jax.nn.logsumexp(sums, axis=0)


def shapes_like(tree: Tree, *leading: int, first: int = 0) -> Tree:
    """Return the shapes and dtypes of arrays, with `leading` in place of the `first` dims.

    >>> shapes_like({"w": jnp.zeros((2, 3))}, 5, first=1)["w"].shape
    (5, 3)
    """
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((*leading, *a.shape[first:]), a.dtype), tree)


def num_examples(inputs: Tree) -> int:
    """Return the number of examples of inputs, an array [examples, ...] or a tree of them."""
    return jax.tree.leaves(inputs)[0].shape[0]


def in_microbatches(batch: Tree, number: int) -> Tree:
    """Return a batch with arrays [number, examples of a microbatch, ...], in the same order."""
    return jax.tree.map(lambda a: a.reshape(number, -1, *a.shape[1:]), batch)


def flat_batch(batch: Tree) -> Tree:
    """Return a batch with arrays [examples, ...]: undo `in_microbatches`."""
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), batch)


def divisor(number: Tree) -> jax.Array:
    """Return the divisor that turns a sum of losses into their mean: their number, or 1 for 0.

    So a batch without targets, such as one of prompts only, has loss 0 and gradient 0. number: the
    number of losses, or with metrics {"number", name: (weighted sum of values, sum of weights)}.
    """
    number = number_of(number)
    return jnp.where(number == 0, 1, number)


def number_of(number: Tree) -> jax.Array:
    """Return the number of losses, given a head's second result, with or without metrics."""
    return number["number"] if isinstance(number, dict) else number


def metric_means(number: Tree) -> dict[str, jax.Array]:
    """Return the mean of each metric, if any, in a head's second result (see `divisor`)."""
    sums = number if isinstance(number, dict) else {}
    return {name: a[0] / divisor(a[1]) for name, a in sums.items() if name != "number"}


def init(stack: Stack, seed: int, layers: Any = None) -> Tree:
    """Return initial parameters {"embed_head", "layers"}; leaves of "layers" are [layers, ...].

    Layer l's parameters depend only on the seed and l, not on the number of layers or the layout,
    unless the model draws all together. layers: the numbers of the layers to draw; None: all.
    """
    numbers = jnp.arange(stack.num_layers) if layers is None else jnp.asarray(layers)
    if stack.options.initial is not None:
        params = stack.options.initial(wrapped(key_of_seed(seed)))
        chosen = params["layers"]
        if layers is not None:
            chosen = jax.tree.map(lambda a: a[numbers], chosen)
        return params | {"layers": chosen}
    first, second = jax.random.split(wrapped(key_of_seed(seed)))
    layer = lambda l: stack.init_layer(jax.random.fold_in(second, l), l)  # noqa: E731
    return {"embed_head": stack.init_embed_head(first), "layers": jax.vmap(layer)(numbers)}
