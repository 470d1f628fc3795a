"""The programs of one layer: its forward, its backward, and its backward in two.

Layers that are alike have one `LayerPrograms` between them. Where they differ each has its own, and a layer slot of
which only the running program knows which layer it holds has a switch between them, `LayerSwitch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppctl.executors.stage.jaxprs import depending_only, flatten, is_literal, run_jaxpr
from ppctl.executors.stage.split import Split, split
from ppctl.schedule.remat import Remat

Tree = Any
Shape = jax.ShapeDtypeStruct
Layer = Callable[[Tree, jax.Array], jax.Array]

_policies = jax.checkpoint_policies
KEEP_PRODUCTS = _policies.save_from_both_policies(
    _policies.dots_with_no_batch_dims_saveable, _policies.save_only_these_names("saved")
)


def zeros_like(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)


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
        """Return the layer's output and its residuals."""
        y, *leaves = run_jaxpr(self.program, [*jax.tree.leaves(w), x], [True, *self.is_saved])
        return y, [leaf for leaf, saved in zip(leaves, self.is_saved, strict=True) if saved]

    def pull(self, w: Tree, saved: list[jax.Array], gy: jax.Array) -> tuple[jax.Array, Tree]:
        """Return the gradients of the layer's input and parameters, from saved residuals."""
        w_leaves, rest = jax.tree.leaves(w), iter(saved)
        _, *leaves = run_jaxpr(self.program, [None] * (len(w_leaves) + 1), [False, *self.is_constant])
        for i, (source, is_saved) in enumerate(zip(self.sources, self.is_saved, strict=True)):
            if source is not None:
                leaves[i] = w_leaves[source]
            elif is_saved:
                leaves[i] = next(rest)
        dw, gx = jax.tree.unflatten(self.treedef, leaves)(gy)
        return gx, dw

    def empty(self, w: Tree, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Return the same as `save` for padding."""
        return x, zeros_like(self.shapes)


class LayerPrograms:
    """The programs of a layer as functions of arrays only. `w` and `x` give shapes and dtypes."""

    def __init__(self, function: Layer, remat: Remat, w: Tree, x: Shape):
        self.run, self.remat, self._shapes = function, remat, (w, x)

    @cached_property
    def residuals(self) -> Residuals:
        # forward and backward are different programs, or ticks: there is nothing that a compiler could merge
        kept = self.run
        if self.remat.keeps_residuals:
            kept = jax.checkpoint(self.run, policy=KEEP_PRODUCTS, prevent_cse=False)
        return Residuals(kept, *self._shapes)

    @cached_property
    def split(self) -> Split:
        """The two halves of the backward. ConfigError where it cannot be split."""
        w, x = self._shapes
        return split(self.residuals.pull, w, self.residuals.shapes, x)

    @property
    def saved(self) -> list[Shape]:
        """Shapes of the residuals that `save` keeps."""
        return self.residuals.shapes

    @property
    def pending(self) -> list[Shape]:
        """Shapes of the values that `input_grad` hands to `weight_grad`."""
        return self.split.pending

    def save(self, w: Tree, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Return (the output, the arrays that the backward needs)."""
        return self.residuals.save(w, x)

    def pull(self, w: Tree, saved: list[jax.Array], gy: jax.Array) -> tuple[jax.Array, Tree]:
        """Return the gradients of the input and of w, from the saved arrays."""
        return self.residuals.pull(w, saved, gy)

    def redo(self, w: Tree, x: jax.Array, gy: jax.Array) -> tuple[jax.Array, Tree]:
        """Return the gradients of the input and of w, from the input alone."""
        dw, gx = jax.vjp(self.run, w, x)[1](gy)
        return gx, dw

    def input_grad(self, w: Tree, saved: list[jax.Array], gy: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Return (gradient of the input, the arrays that `weight_grad` needs)."""
        return self.split.input_grad(w, saved, gy)

    def weight_grad(self, w: Tree, pending: list[jax.Array]) -> Tree:
        """Return the gradient of w."""
        return self.split.weight_grad(w, pending)


class SwitchPackings:
    """The packings of the arrays that wait of any layer: those kept for its backward, and those that I hands to W."""

    def __init__(self, layers: Sequence[LayerPrograms]):
        self.layers = layers

    @cached_property
    def saved(self) -> FlatPacking:
        return FlatPacking([layer.saved for layer in self.layers])

    @cached_property
    def pending(self) -> FlatPacking:
        return FlatPacking([layer.pending for layer in self.layers])


class LayerSwitch:
    """`LayerPrograms` of layer `number`, which is traced and one of `among`; arrays wait packed as all layers' are.

    Every branch is in the program, one for each function that layers are. `saved` and `pending` are packed: a device
    keeps the largest layer's for each.
    """

    def __init__(self, layers: Sequence[LayerPrograms], number: Any, among: Sequence[int], packings: SwitchPackings):
        self.layers = list(dict.fromkeys(layers[l] for l in among))
        self.place_of = {l: self.layers.index(layers[l]) for l in among}
        self.number, self.packings = number, packings

    @property
    def saved(self) -> list[Shape]:
        return self.packings.saved.shapes

    @property
    def pending(self) -> list[Shape]:
        return self.packings.pending.shapes

    def run(self, w: Tree, x: jax.Array) -> jax.Array:
        return self._switch(lambda layer, w, x: layer.run(w, x), w, x)

    def redo(self, w: Tree, x: jax.Array, gy: jax.Array) -> tuple[jax.Array, Tree]:
        return self._switch(lambda layer, w, x, gy: layer.redo(w, x, gy), w, x, gy)

    def save(self, w: Tree, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        def save(layer: LayerPrograms, w: Tree, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
            y, saved = layer.save(w, x)
            return y, self.packings.saved.pack(saved)

        return self._switch(save, w, x)

    def pull(self, w: Tree, saved: list[jax.Array], gy: jax.Array) -> tuple[jax.Array, Tree]:
        unpack = self.packings.saved.unpack
        return self._switch(lambda layer, w, saved, gy: layer.pull(w, unpack(saved, layer.saved), gy), w, saved, gy)

    def input_grad(self, w: Tree, saved: list[jax.Array], gy: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        def input_grad(layer: LayerPrograms, w: Tree, saved: list, gy: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
            gx, pending = layer.input_grad(w, self.packings.saved.unpack(saved, layer.saved), gy)
            return gx, self.packings.pending.pack(pending)

        return self._switch(input_grad, w, saved, gy)

    def weight_grad(self, w: Tree, pending: list[jax.Array]) -> Tree:
        unpack = self.packings.pending.unpack
        run = lambda layer, w, pending: layer.weight_grad(w, unpack(pending, layer.pending))  # noqa: E731
        return self._switch(run, w, pending)

    def _switch(self, run: Callable[..., Any], *args: Any) -> Any:
        """Return run(layer, *args) of the layer that `number` is."""
        place = np.zeros(max(self.place_of) + 1, np.int32)
        place[list(self.place_of)] = list(self.place_of.values())
        return jax.lax.switch(jnp.asarray(place)[self.number], [partial(run, layer) for layer in self.layers], *args)


class FlatPacking:
    """Lists of arrays of several kinds of lists as one kind: a flat array for each dtype, as long as the longest."""

    def __init__(self, lists: Sequence[Sequence[Shape]]):
        sizes: dict[Any, int] = {}
        for shapes in lists:
            for dtype in {shape.dtype for shape in shapes}:
                sizes[dtype] = max(sizes.get(dtype, 0), sum(a.size for a in shapes if a.dtype == dtype))
        self.shapes = [Shape((sizes[dtype],), dtype) for dtype in sorted(sizes, key=str)]

    def pack(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the arrays one behind the other, then zeros."""
        return [pack_flat([a for a in arrays if a.dtype == to.dtype], to) for to in self.shapes]

    def unpack(self, packed: Sequence[jax.Array], shapes: Sequence[Shape]) -> list[jax.Array]:
        """Return arrays of these shapes, as `pack` put them."""
        of_dtype = {a.dtype: iter(unpack_flat([s for s in shapes if s.dtype == a.dtype], a)) for a in packed}
        return [next(of_dtype[shape.dtype]) for shape in shapes]


def pack_flat(arrays: Sequence[jax.Array], to: Shape) -> jax.Array:
    """Return arrays one behind the other along the last axis of `to`, then zeros; the axes before it are shared."""
    *shared, size = to.shape
    parts = [a.reshape(*shared, -1).astype(to.dtype) for a in arrays]
    rest = size - sum(part.shape[-1] for part in parts)
    parts += [jnp.zeros((*shared, rest), to.dtype)] if rest else []
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def unpack_flat(shapes: Sequence[Shape], packed: jax.Array) -> list[jax.Array]:
    """Return the arrays that `pack_flat` put behind each other, in the dtype of `packed`."""
    num_shared = packed.size // packed.shape[-1] if packed.size else 1
    sizes = [shape.size // num_shared for shape in shapes]
    rest = packed.shape[-1] - sum(sizes)
    parts = jax.lax.split(packed, (*sizes, rest), axis=packed.ndim - 1) if rest or len(sizes) > 1 else [packed]
    return [part.reshape(shape.shape) for part, shape in zip(parts, shapes, strict=False)]
