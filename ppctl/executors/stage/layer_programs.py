"""The programs of one layer: its forward, its backward, and its split backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ppctl.executors.stage.jaxpr_tools import (
    add_last_outputs,
    depending_only,
    flatten,
    is_literal,
    run_jaxpr,
)
from ppctl.executors.stage.split_backward import Split, split
from ppctl.model.trainable_parameters import trained_part, with_trained
from ppctl.schedule.remat import Remat

Tree = Any
Shape = jax.ShapeDtypeStruct
Layer = Callable[[Tree, jax.Array], jax.Array]
Backward = Literal["redo", "pull", "weight_grad"]  # from input, residuals, pending values

_policies = jax.checkpoint_policies
KEEP_PRODUCTS = _policies.save_from_both_policies(
    _policies.dots_with_no_batch_dims_saveable, _policies.save_only_these_names("saved")
)


def zeros_like(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)


def add_trees(total: Tree, update: Tree) -> Tree:
    return jax.tree.map(lambda t, u: t + jnp.asarray(u, t.dtype), total, update)


def vjp_of(
    layer: Layer, w: Tree, x: jax.Array, trainable: Tree
) -> tuple[jax.Array, Callable[[jax.Array], tuple]]:
    """Return (y, function from the gradient of y to the gradients of w's trainable part and x)."""
    run = lambda trained, x: layer(with_trained(trained, w), x)  # noqa: E731
    return jax.vjp(run, trained_part(w, trainable), x)


class LayerPrograms:
    """The programs of a layer as functions of arrays only. `w` and `x` give shapes and dtypes.

    `jax.vjp` returns a pytree whose leaves are parameters, constants and residuals. Only residuals
    are saved: the backward gets parameters as an argument, and computes constants again.
    trainable: as in `StackOptions`, for one layer; gradients of frozen parameters are None.
    """

    def __init__(self, function: Layer, remat: Remat, w: Tree, x: Shape, trainable: Tree = True):
        self.run, self.remat, self._shapes, self.trainable = function, remat, (w, x), trainable
        self._flat: dict[Backward, Any] = {}  # (flat program, shapes of results) by backward

    @cached_property
    def _forward(self) -> tuple[core.ClosedJaxpr, Any, list[tuple[int | None, bool]]]:
        """(program (w, x) -> (y, leaves of the vjp), the vjp's treedef, a pair for each leaf).

        A pair is (index of the leaf's parameter or None, whether the leaf is constant).
        """
        found = {}
        keep = self.run
        if not self.remat.recomputes:
            # no barrier against CSE: forward and backward are in different programs or ticks
            keep = jax.checkpoint(self.run, policy=KEEP_PRODUCTS, prevent_cse=False)

        def trace(w: Tree, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
            y, vjp = vjp_of(keep, w, x, self.trainable)
            leaves, found["treedef"] = jax.tree.flatten(vjp)
            index_of = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(w))}
            found["sources"] = [index_of.get(id(leaf)) for leaf in leaves]
            return y, leaves

        program = flatten(jax.make_jaxpr(trace)(*self._shapes))
        jaxpr = program.jaxpr
        constants = depending_only(jaxpr, [False] * len(jaxpr.invars))
        are_constant = [is_literal(v) or v in constants for v in jaxpr.outvars[1:]]
        return program, found["treedef"], [*zip(found["sources"], are_constant, strict=True)]

    @cached_property
    def saved(self) -> list[Shape]:
        """Shapes of the residuals that `save` returns."""
        return jax.eval_shape(self.save, *self._shapes)[1]

    def save(self, w: Tree, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Return the layer's output and its residuals."""
        program, _, leaves = self._forward
        are_saved = [source is None and not is_constant for source, is_constant in leaves]
        y, *values = run_jaxpr(program, [*jax.tree.leaves(w), x], [True, *are_saved])
        return y, [value for value, saved in zip(values, are_saved, strict=True) if saved]

    def pull(self, w: Tree, saved: list[jax.Array], gy: jax.Array) -> tuple[jax.Array, Tree]:
        """Return the gradients of the layer's input and parameters, from saved residuals."""
        (program, treedef, leaves), w_leaves, rest = self._forward, jax.tree.leaves(w), iter(saved)
        unread = [None] * (len(w_leaves) + 1)
        _, *values = run_jaxpr(program, unread, [False, *(constant for _, constant in leaves)])
        for i, (source, is_constant) in enumerate(leaves):
            if source is not None:
                values[i] = w_leaves[source]
            elif not is_constant:
                values[i] = next(rest)
        dw, gx = jax.tree.unflatten(treedef, values)(gy)
        return gx, dw

    def redo(self, w: Tree, x: jax.Array, gy: jax.Array) -> tuple[jax.Array, Tree]:
        """Return the gradients of the input and of w, from only the input."""
        dw, gx = vjp_of(self.run, w, x, self.trainable)[1](gy)
        return gx, dw

    @cached_property
    def split(self) -> Split:
        """The two halves of the backward. Raises ConfigError if it cannot be split."""
        w, x = self._shapes
        return split(self.pull, w, self.saved, x)

    @property
    def pending(self) -> list[Shape]:
        """Shapes of the values that go from `input_grad` to `weight_grad`."""
        return self.split.pending

    def input_grad(self, w: Tree, saved: Tree, gy: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        return self.split.input_grad(w, saved, gy)

    def weight_grad(self, w: Tree, pending: list[jax.Array]) -> Tree:
        return self.split.weight_grad(w, pending)

    def add_grads(self, how: Backward, args: tuple, sums: Tree) -> tuple[Any, Tree]:
        """Return (gx, sums with dw added) where gx, dw = grads_of(self, how)(*args)."""
        if how not in self._flat:
            closed, shapes = jax.make_jaxpr(grads_of(self, how), return_shape=True)(*args)
            self._flat[how] = flatten(closed), shapes
        closed, (gx, _) = self._flat[how]
        return add_last_outputs(closed, args, gx, sums)


class LayerSwitch:
    """The methods of `LayerPrograms` for a traced layer `number`, with a branch for each function.

    among: the layers that `number` may be. Saved and pending arrays are packed (`FlatPacking`),
    because a device's slots have the largest layer's size.
    """

    def __init__(
        self,
        layers: Sequence[LayerPrograms],
        number: Any,
        among: Sequence[int],
        packing: Callable[[str], FlatPacking],
    ):
        self.layers = list(dict.fromkeys(layers[l] for l in among))
        self.place_of = {l: self.layers.index(layers[l]) for l in among}
        self.number, self.packing = number, packing
        # the methods of `LayerPrograms`
        self.run, self.redo = partial(self._switch, "run"), partial(self._switch, "redo")
        self.save, self.pull = partial(self._switch, "save"), partial(self._switch, "pull")
        self.input_grad = partial(self._switch, "input_grad")
        self.weight_grad = partial(self._switch, "weight_grad")

    @property
    def saved(self) -> list[Shape]:
        return self.packing("saved").shapes

    @property
    def pending(self) -> list[Shape]:
        return self.packing("pending").shapes

    def _switch(self, method: str, *args: Any) -> Any:
        """Return a method's result for layer `number`."""
        place = np.zeros(max(self.place_of) + 1, np.int32)
        place[list(self.place_of)] = list(self.place_of.values())
        branches = [partial(self._packed, layer, method) for layer in self.layers]
        return jax.lax.switch(jnp.asarray(place)[self.number], branches, *args)

    def _packed(self, layer: LayerPrograms, method: str, w: Tree, *args: Any) -> Any:
        """Return the result of a layer's method, with packed saved or pending arrays."""
        # 1. unpack the arguments
        if method in ("pull", "input_grad"):
            args = self.packing("saved").unpack(args[0], layer.saved), *args[1:]
        elif method == "weight_grad":
            args = (self.packing("pending").unpack(args[0], layer.pending),)
        result = getattr(layer, method)(w, *args)
        # 2. pack the result
        if method not in ("save", "input_grad"):
            return result
        packing = self.packing("saved" if method == "save" else "pending")
        return result[0], packing.pack(result[1])


def grads_of(layer: LayerPrograms | LayerSwitch, how: Backward) -> Callable[..., tuple[Any, Tree]]:
    """Return a layer's backward, which returns (gradient of the input or None, gradient of w)."""
    if how == "weight_grad":
        return lambda w, pending: (None, layer.weight_grad(w, pending))
    return layer.redo if how == "redo" else layer.pull


class FlatPacking:
    """Packs one of several lists of arrays into flat arrays, one per dtype, that fit any list."""

    def __init__(self, lists: Sequence[Sequence[Shape]]):
        sizes: dict[str, int] = {}
        for shapes in lists:
            for dtype in {str(a.dtype) for a in shapes}:
                size = sum(a.size for a in shapes if str(a.dtype) == dtype)
                sizes[dtype] = max(sizes.get(dtype, 0), size)
        self.shapes = [Shape((sizes[dtype],), jnp.dtype(dtype)) for dtype in sorted(sizes)]

    def pack(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the flat arrays: for each dtype the arrays concatenated, then zeros."""
        return [pack_flat([a for a in arrays if a.dtype == to.dtype], to) for to in self.shapes]

    def unpack(self, packed: Sequence[jax.Array], shapes: Sequence[Shape]) -> list[jax.Array]:
        """Return arrays of these shapes, from a result of `pack`."""
        of = lambda a: [shape for shape in shapes if shape.dtype == a.dtype]  # noqa: E731
        parts = {a.dtype: iter(unpack_flat(of(a), a)) for a in packed}
        return [next(parts[a.dtype]) for a in shapes]


def pack_flat(arrays: Sequence[jax.Array], to: Shape) -> jax.Array:
    """Return arrays reshaped to [*to.shape[:-1], -1] and concatenated, then zeros up to `to`."""
    *shared, size = to.shape
    parts = [jnp.asarray(a, to.dtype).reshape(*shared, -1) for a in arrays]
    rest = size - sum(part.shape[-1] for part in parts)
    parts += [jnp.zeros((*shared, rest), to.dtype)] if rest else []
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def unpack_flat(shapes: Sequence[Shape], packed: jax.Array) -> list[jax.Array]:
    """Return the arrays that `pack_flat` concatenated, in the dtype of `packed`."""
    num_shared = packed.size // packed.shape[-1] if packed.size else 1
    sizes = [shape.size // num_shared for shape in shapes]
    rest, parts = packed.shape[-1] - sum(sizes), [packed]
    if rest or len(sizes) > 1:
        parts = jax.lax.split(packed, (*sizes, rest), axis=packed.ndim - 1)
    return [part.reshape(shape.shape) for part, shape in zip(parts, shapes, strict=False)]
