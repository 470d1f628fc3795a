"""The stack protocol: all that the executors know of a model.

A model is `ends` (embedding and head, possibly sharing weights) around `num_layers` layers, whose parameters have the
same shapes. Parameters are `{"ends": tree, "layers": tree}`; every leaf of "layers" has a leading axis of length L in
model order. Layers that differ, such as the parts that a function was cut into, are padded to the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any  # a pytree of arrays
NO_DECAY = ("scale", "bias")  # last names of parameters that no optimizer decays: norms and biases


@dataclass(frozen=True)
class Stack:
    """Pure functions on pytrees. x is the activation between layers, [batch, ...]; its shape never changes.

    init_ends(key) and init_layer(key, l) make the parameters, drawn with the key or given, as pretrained ones are: l is
    traced, so `jnp.asarray(weights)[l]` and not `weights[l]`.
    embed(ends, inputs) -> x; layer(layer, x) -> x; head(ends, x, targets) -> (sum of losses, number of losses).
    `layer` is one function for all layers, or one for each where they differ.
    Losses are summed in at least float32; the training loss is sum / number over the global batch.
    """

    num_layers: int
    init_ends: Callable[[jax.Array], Tree]
    init_layer: Callable[[jax.Array, jax.Array], Tree]
    embed: Callable[[Tree, jax.Array], jax.Array]
    layer: Callable[[Tree, jax.Array], jax.Array] | tuple[Callable[[Tree, jax.Array], jax.Array], ...]
    head: Callable[[Tree, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    initial: Callable[[jax.Array], Tree] | None = None  # all initial parameters of a key at once, where not by layer
    export: Callable[[Tree], Tree] | None = None  # parameters in the form that the model's author knows

    @property
    def are_alike(self) -> bool:
        """Whether all layers are the same function."""
        return not isinstance(self.layer, tuple)

    def layer_of(self, l: int) -> Callable[[Tree, jax.Array], jax.Array]:
        """The function of layer l."""
        return self.layer[l] if isinstance(self.layer, tuple) else self.layer


def init(stack: Stack, seed: int) -> Tree:
    """Initial parameters. Layer l's weights depend on the seed and l only, never on L or on the layout."""
    if stack.initial is not None:
        return stack.initial(jax.random.key(seed))
    ends_key, layers_key = jax.random.split(jax.random.key(seed))
    layer = lambda l: stack.init_layer(jax.random.fold_in(layers_key, l), l)  # noqa: E731
    return {"ends": stack.init_ends(ends_key), "layers": jax.vmap(layer)(jnp.arange(stack.num_layers))}
