"""The outer layers of a model on one device, embedding and head: values, gradients, parameters.

A rank holds only the leaves of embed_head that its stages use, or its part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppctl.executors.stage.jaxpr_tools import add_last_outputs, flatten
from ppctl.model.layer_inputs import LayerInputs
from ppctl.model.parallel import StageAxes
from ppctl.model.stack import Stack, VocabularyParts
from ppctl.model.trainable_parameters import is_none, trained_flags, trained_part, with_trained

Tree = Any


def computed(shapes: Tree, dtype: Any) -> Tree:
    """Return shapes of parameters in the compute dtype."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype), shapes)


def traced(function: Callable[[], Any], axes: StageAxes) -> Any:
    """Return function(), traced with the axes inside a stage: layers may use collectives."""
    found: list[Any] = []
    jax.make_jaxpr(lambda: found.append(function()), axis_env=list(axes.sizes))()
    return found[0]


def keep(embed_head: Tree, used: tuple[bool, ...]) -> Tree:
    """Return `embed_head` with None for unused leaves."""
    leaves, treedef = jax.tree.flatten(embed_head, is_leaf=is_none)
    kept = [leaf if use else None for leaf, use in zip(leaves, used, strict=True)]
    return jax.tree.unflatten(treedef, kept)


@dataclass(frozen=True, eq=False)
class OuterLayers:
    """The functions of embedding and head; the fields are those of `Model`.

    They take a rank's leaves of embed_head, None for unused ones, extended by `LayerInputs.outer`.
    """

    stack: Stack
    embed_head: Tree
    microbatch: Tree
    x: jax.ShapeDtypeStruct
    computed: Tree  # shapes of embed_head in the compute dtype
    dtype: Any
    axes: StageAxes
    inputs: LayerInputs
    own_embed_head: tuple[bool, ...] | None
    parts: VocabularyParts | None

    @cached_property
    def uses(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """(flags of the leaves that the embedding uses, flags of those that the head uses).

        A leaf that neither uses counts as the head's.
        """
        leaves, treedef = jax.tree.flatten(self.computed)

        def used(function: Any, *args: Any) -> list[bool]:
            def call(leaves: list, args: tuple) -> Tree:
                return function(jax.tree.unflatten(treedef, leaves), *args)

            jaxpr = jax.make_jaxpr(call, axis_env=list(self.axes.sizes))(leaves, args).jaxpr
            read = {id(v) for equation in jaxpr.eqns for v in equation.invars}
            read |= {id(v) for v in jaxpr.outvars}
            return [id(v) in read for v in jaxpr.invars[: len(leaves)]]

        embed, head = self.stack.outer
        by_embedding = used(embed, self.microbatch["inputs"])
        by_head = used(head, self.x, self.microbatch["targets"])
        by_head = [a or not b for a, b in zip(by_head, by_embedding, strict=True)]
        return tuple(by_embedding), tuple(by_head)

    @property
    def shared(self) -> tuple[bool, ...]:
        """Flags of the trained leaves that embedding and head share.

        With a divided vocabulary these are the undivided leaves, which every rank uses.
        """
        is_trained = trained_flags(self.embed_head, self.stack.trains("embed_head"))
        if self.own_embed_head is not None:
            own = self.own_embed_head
            return tuple(a and not b for a, b in zip(is_trained, own, strict=True))
        return tuple(a and b and c for a, b, c in zip(*self.uses, is_trained, strict=True))

    def used_by(self, is_first: bool, is_last: bool) -> tuple[bool, ...]:
        """Return flags of the leaves that a rank with the first or last stage uses.

        With a divided vocabulary every rank uses all leaves.
        """
        if self.own_embed_head is not None:
            return (True,) * len(self.own_embed_head)
        return tuple((is_first and a) or (is_last and b) for a, b in zip(*self.uses, strict=True))

    @cached_property
    def losses(self) -> Tree:
        """Shapes of (sum of losses, number of losses)."""
        args = self.computed, self.x, self.microbatch["targets"]
        return traced(lambda: jax.eval_shape(self.stack.outer[1], *args), self.axes)

    @property
    def _trains(self) -> Tree:
        return self.inputs.trainable(self.stack)["embed_head"]

    def trained(self, embed_head: Tree) -> Tree:
        """Return a tree like `embed_head` with None for frozen parameters."""
        return trained_part(embed_head, self._trains)

    def extended(self, embed_head: Tree, place: Any, number: Any) -> Tree:
        """Return `embed_head` with the inputs of embedding and head: see `LayerInputs.extended`."""
        return self.inputs.outer.extended(embed_head, place, number)

    def with_keys(self, embed_head: Tree, keys: jax.Array | None) -> Tree:
        """Return `embed_head` with the keys of a microbatch's examples; None: an evaluation."""
        return self.inputs.outer.with_keys(embed_head, keys)

    def _filled(self, embed_head: Tree) -> Tree:
        """Return `embed_head` with zeros for unused leaves."""
        leaves, treedef = jax.tree.flatten(self.embed_head)
        found = jax.tree.leaves(self.inputs.outer.separate(embed_head)[0], is_leaf=is_none)
        zeros = (jnp.zeros(a.shape, self.dtype) for a in leaves)
        filled = [z if a is None else a for z, a in zip(zeros, found, strict=True)]
        return self.inputs.outer.replaced(embed_head, jax.tree.unflatten(treedef, filled))

    def embed(self, embed_head: Tree, inputs: Tree, part: jax.Array | None = None) -> jax.Array:
        """Return the embedding, or with the number of a vocabulary part that part's summand."""
        if part is not None and self.parts is not None:
            return self.parts.embed(embed_head, inputs, part)
        return self.inputs.outer_functions(self.stack)[0](self._filled(embed_head), inputs)

    def head(self, embed_head: Tree, y: jax.Array, targets: Tree, *known: Any) -> tuple:
        """Return (sum of losses, their number).

        known: the last arguments of `VocabularyParts.head`, if the vocabulary is divided.
        """
        if known and self.parts is not None:
            return self.parts.head(embed_head, y, targets, *known)
        return self.inputs.outer_functions(self.stack)[1](self._filled(embed_head), y, targets)

    def add_embedding(
        self, embed_head: Tree, inputs: Tree, gx: jax.Array, total: Tree, part: Any = None
    ) -> Tree:
        """Return `total` plus the embedding's gradient; gx: gradient of the embedding's result."""
        embed = partial(self.embed, part=part)
        return add_embedding_grad(embed, embed_head, inputs, gx, total, self._trains)

    def add_head(
        self, embed_head: Tree, y: jax.Array, targets: Tree, total: Tree, *known: Any
    ) -> tuple[jax.Array, Tree, Any]:
        """Return (gradient of y, `total` with the head's gradient, (sum of losses, number))."""

        def head(embed_head: Tree, y: jax.Array, targets: Tree) -> tuple:
            return self.head(embed_head, y, targets, *known)

        gy, total, *losses = add_head_grads(head, embed_head, y, targets, total, self._trains)
        return gy, total, tuple(losses)


def add_embedding_grad(
    embed: Callable[[Tree, jax.Array], jax.Array],
    embed_head: Tree,
    inputs: jax.Array,
    gx: jax.Array,
    total: Tree,
    trainable: Tree = True,
) -> Tree:
    """Return `total` plus the gradient of embed_head; gx is the gradient of embed's result."""
    if not jax.tree.leaves(total):
        return total

    def grad(embed_head: Tree, inputs: jax.Array, gx: jax.Array) -> tuple[tuple, Tree]:
        def run(trained: Tree) -> jax.Array:
            return embed(with_trained(trained, embed_head), inputs)

        return (), jax.vjp(run, trained_part(embed_head, trainable))[1](gx)[0]

    return _added_last(grad, (embed_head, inputs, gx), total)[1]


def add_head_grads(
    head: Callable[[Tree, jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
    embed_head: Tree,
    y: jax.Array,
    targets: jax.Array,
    total: Tree,
    trainable: Tree = True,
) -> tuple[jax.Array, Tree, jax.Array, jax.Array]:
    """Return (gradient of y, `total` with embed_head's gradient, sum of losses, their number).

    Gradients are added by `add_outputs`, where possible without an array of `total`'s size.
    """

    def grads(embed_head: Tree, y: jax.Array, targets: jax.Array) -> tuple[Any, Tree]:
        def run(trained: Tree, y: jax.Array) -> tuple:
            return head(with_trained(trained, embed_head), y, targets)

        loss, pull, number = jax.vjp(run, trained_part(embed_head, trainable), y, has_aux=True)
        one = np.ones((), jnp.result_type(loss))  # NumPy makes a constant; loss may be a number
        embed_head_grad, y_grad = pull(one)
        return (y_grad, loss, number), embed_head_grad

    (y_grad, loss, number), total = _added_last(grads, (embed_head, y, targets), total)
    return y_grad, total, loss, number


def _added_last(function: Callable[..., tuple[Tree, Tree]], args: tuple, total: Tree) -> tuple:
    """Return (first result of function(*args), `total` with the second result added)."""
    closed, (own, _) = jax.make_jaxpr(function, return_shape=True)(*args)
    return add_last_outputs(flatten(closed), args, own, total)
