"""One stage: its layers forward, what it keeps, and its layers backward, for each remat setting.

A stage's parameters `w` are a list of layers (unrolled in the program) or one stacked tree (scanned). `fold` hides the
difference. A layer whose number is `count` or more is padding and passes x through.

remat  | the stash of a microbatch                                  | the backward recomputes
none   | all but attention scores and element-wise results          | those
layer  | the input of each layer                                    | one layer at a time
full   | the stage's input                                          | the stage

The backward runs whole (`backward`), or as `input_grad`, which recomputes the same, and later `weight_grad`, which
recomputes nothing: what it needs was handed to it as `pending`, and the stash is free from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.runtime.jaxprs import depending_only, flatten, is_literal, run
from ppctl.runtime.split import Split, split

Tree = Any
Layer = Callable[[Tree, jax.Array], jax.Array]

_policies = jax.checkpoint_policies
KEEP_PRODUCTS = _policies.save_from_both_policies(
    _policies.dots_with_no_batch_dims_saveable, _policies.save_only_these_names("saved")
)


def fold(body: Callable, carry: Tree, xs: Any, *, reverse: bool = False) -> tuple[Tree, Any]:
    """(last carry, per-layer results) of `carry, y = body(carry, x)`; unrolled when xs is a list of trees."""
    if not isinstance(xs, list):
        return jax.lax.scan(body, carry, xs, reverse=reverse)
    ys: list = []
    for x in reversed(xs) if reverse else xs:
        carry, y = body(carry, x)
        ys.append(y)
    return carry, ys[::-1] if reverse else ys


def numbered(w: Any, *others: Any) -> Any:
    """xs for `fold`: (layer number, parameters, ...) of each layer."""
    if isinstance(w, list):
        return list(zip(range(len(w)), w, *others, strict=True))
    return (jnp.arange(jax.tree.leaves(w)[0].shape[0]), w, *others)


def where_layer(count: jax.Array | None, k: Any, run: Callable, otherwise: Callable, *args: Any) -> Any:
    """run(*args) for layers below `count`, else otherwise(*args). None: there is no padding."""
    return run(*args) if count is None else jax.lax.cond(k < count, run, otherwise, *args)


class Residuals:
    """The backward of one layer as plain arrays, so that it can wait in a slot between two ticks.

    `jax.vjp` returns a pytree whose leaves are parameters, constants and residuals. Parameters are put back in the
    backward, constants are computed again there (or by the compiler), residuals alone wait.
    """

    def __init__(self, layer: Layer, w: Tree, x: jax.ShapeDtypeStruct):
        self.layer = layer
        self.program = flatten(jax.make_jaxpr(self._trace)(w, x))  # from parameters and x to y and leaves
        jaxpr = self.program.jaxpr
        constants = depending_only(jaxpr, [False] * len(jaxpr.invars))
        self.is_constant = [is_literal(v) or v in constants for v in jaxpr.outvars[1:]]
        self.is_saved = [s is None and not c for s, c in zip(self.sources, self.is_constant, strict=True)]
        self.shapes = jax.eval_shape(self.save, w, x)[1]

    def _trace(self, w: Tree, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        y, vjp = jax.vjp(self.layer, w, x)
        leaves, self.treedef = jax.tree.flatten(vjp)
        index_of = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(w))}
        self.sources = [index_of.get(id(leaf)) for leaf in leaves]  # which parameter a leaf is
        return y, leaves

    def save(self, w: Tree, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """The layer's output and its residuals."""
        y, *leaves = run(self.program, [*jax.tree.leaves(w), x], [True, *self.is_saved])
        return y, [leaf for leaf, saved in zip(leaves, self.is_saved, strict=True) if saved]

    def pull(self, w: Tree, saved: list[jax.Array], gy: jax.Array) -> tuple[jax.Array, Tree]:
        """Gradients of the layer's input and parameters, from saved residuals."""
        w_leaves, rest = jax.tree.leaves(w), iter(saved)
        _, *leaves = run(self.program, [None] * (len(w_leaves) + 1), [False, *self.is_constant])
        for i, (source, is_saved) in enumerate(zip(self.sources, self.is_saved, strict=True)):
            if source is not None:
                leaves[i] = w_leaves[source]
            elif is_saved:
                leaves[i] = next(rest)
        dw, gx = jax.tree.unflatten(self.treedef, leaves)(gy)
        return gx, dw

    def empty(self, w: Tree, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """What `save` returns for padding."""
        return x, zeros_like(self.shapes)


def zeros_like(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)


class Stage:
    """The forward and backward of a stage as functions of arrays only. `w0` and `x` give shapes and dtypes."""

    def __init__(self, layer: Layer, remat: str, w0: Tree, x: jax.ShapeDtypeStruct):
        self.layer, self.remat = layer, remat
        # forward and backward are different programs, or ticks: there is nothing that a compiler could merge
        kept = jax.checkpoint(layer, policy=KEEP_PRODUCTS, prevent_cse=False) if remat == "none" else layer
        self.residuals = Residuals(kept, w0, x)
        self._shapes = w0, x

    @cached_property
    def split(self) -> Split:
        """The two halves of a layer's backward. ConfigError where it has none."""
        w0, x = self._shapes
        return split(self.residuals.pull, w0, self.residuals.shapes, x)

    @property
    def keeps_input(self) -> bool:
        """Whether the stash is the stage's input, so that it can stay in the slot where it arrived."""
        return self.remat == "full"

    def stash_shapes(self, w: Any, count: Any = None) -> Tree:
        """Shapes of the stash of a microbatch; w may be shapes."""
        return jax.eval_shape(lambda w, x: self.forward(w, count, x)[1], w, self._shapes[1])

    def pending_shapes(self, w: Any, count: Any = None) -> Any:
        """Shapes of what `input_grad` hands on."""

        def hand_on(w: Any, stash: Tree, gy: jax.Array) -> Any:
            return self.input_grad(w, count, stash, lambda y: (gy, None))[1]

        return jax.eval_shape(hand_on, w, self.stash_shapes(w, count), self._shapes[1])

    def forward(self, w: Any, count: Any, x: jax.Array) -> tuple[jax.Array, Tree]:
        """The stage's output and its stash."""
        if self.remat == "none":
            return self._save(w, count, x)

        def body(x: jax.Array, item: tuple) -> tuple[jax.Array, jax.Array | None]:
            k, layer_w = item
            y = where_layer(count, k, self.layer, lambda w, x: x, layer_w, x)
            return y, x if self.remat == "layer" else None

        y, inputs = fold(body, x, numbered(w))
        return y, inputs if self.remat == "layer" else x

    def backward(self, w: Any, count: Any, stash: Tree, cotangent: Callable) -> tuple[jax.Array, Any, Any]:
        """(gradient of the input, gradients of w, aux) where gy, aux = cotangent(y).

        y is the stage's output where the backward recomputes all of it (remat=full), else None.
        """
        if self.remat == "full":
            y, saved = self._save(w, count, stash)
            gy, aux = cotangent(y)
            gx, dw = self._pull(w, count, saved, gy)
            return gx, dw, aux
        gy, aux = cotangent(None)
        if self.remat == "none":
            gx, dw = self._pull(w, count, stash, gy)
            return gx, dw, aux

        def redo(w: Tree, x: jax.Array, gy: jax.Array) -> tuple[jax.Array, Tree]:
            dw, gx = jax.vjp(self.layer, w, x)[1](gy)
            return gx, dw

        def body(gy: jax.Array, item: tuple) -> tuple[jax.Array, Tree]:
            k, layer_w, x = item
            return where_layer(count, k, redo, lambda w, x, gy: (gy, zeros_like(w)), layer_w, x, gy)

        gx, dw = fold(body, gy, numbered(w, stash), reverse=True)
        return gx, dw, aux

    def input_grad(self, w: Any, count: Any, stash: Tree, cotangent: Callable) -> tuple[jax.Array, Any, Any]:
        """(gradient of the input, pending, aux) where gy, aux = cotangent(y), with y as in `backward`."""
        y, kept = self._save(w, count, stash) if self.remat == "full" else (None, stash)
        gy, aux = cotangent(y)

        def run(w: Tree, kept: Any, gy: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
            saved = self.residuals.save(w, kept)[1] if self.remat == "layer" else kept
            return self.split.input_grad(w, saved, gy)

        def body(gy: jax.Array, item: tuple) -> tuple[jax.Array, list[jax.Array]]:
            k, layer_w, layer_kept = item
            skip = lambda w, kept, gy: (gy, zeros_like(self.split.pending))  # noqa: E731
            return where_layer(count, k, run, skip, layer_w, layer_kept, gy)

        gx, pending = fold(body, gy, numbered(w, kept), reverse=True)
        return gx, pending, aux

    def weight_grad(self, w: Any, count: Any, pending: Any) -> Any:
        """Gradients of w, from what `input_grad` handed on."""

        def body(_: None, item: tuple) -> tuple[None, Tree]:
            k, layer_w, layer_pending = item
            skip = lambda w, pending: zeros_like(w)  # noqa: E731
            return None, where_layer(count, k, self.split.weight_grad, skip, layer_w, layer_pending)

        return fold(body, None, numbered(w, pending))[1]

    def _save(self, w: Any, count: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        def body(x: jax.Array, item: tuple) -> tuple[jax.Array, list]:
            k, layer_w = item
            return where_layer(count, k, self.residuals.save, self.residuals.empty, layer_w, x)

        return fold(body, x, numbered(w))

    def _pull(self, w: Any, count: Any, saved: Any, gy: jax.Array) -> tuple[jax.Array, Any]:
        def body(gy: jax.Array, item: tuple) -> tuple[jax.Array, Tree]:
            k, layer_w, layer_saved = item
            skip = lambda w, saved, gy: (gy, zeros_like(w))  # noqa: E731
            return where_layer(count, k, self.residuals.pull, skip, layer_w, layer_saved, gy)

        return fold(body, gy, numbered(w, saved), reverse=True)
