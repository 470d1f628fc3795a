"""The programs of one layer: its forward, its backward, and its backward in two.

Layers that are alike have one `LayerPrograms` between them. Where they differ each has its own, and a layer slot of
which only the running program knows which layer it holds has a switch between them, `LayerSwitch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppctl.executors.stage.divided_dims import divided_dims
from ppctl.executors.stage.jaxprs import add_last_outputs, depending_only, flatten, is_literal, run_jaxpr
from ppctl.executors.stage.split import Split, split
from ppctl.model.trainable import trained_part, with_trained
from ppctl.schedule.remat import Remat

Tree = Any
Shape = jax.ShapeDtypeStruct
Layer = Callable[[Tree, jax.Array], jax.Array]
Backward = Literal["redo", "pull", "weight_grad"]  # from the input, from residuals, from what I hands on

_policies = jax.checkpoint_policies
KEEP_PRODUCTS = _policies.save_from_both_policies(
    _policies.dots_with_no_batch_dims_saveable, _policies.save_only_these_names("saved")
)


def zeros_like(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)


def add_trees(total: Tree, update: Tree) -> Tree:
    return jax.tree.map(lambda t, u: t + u.astype(t.dtype).reshape(t.shape), total, update)


class Residuals:
    """The backward of one layer as plain arrays, so that it can wait in a slot between two ticks.

    `jax.vjp` returns a pytree whose leaves are parameters, constants and residuals. Parameters are put back in the
    backward, constants are computed again there (or by the compiler), residuals alone wait. `trainable` parameters
    alone have gradients.
    """

    def __init__(self, layer: Layer, w: Tree, x: jax.ShapeDtypeStruct, trainable: Tree = True):
        self.layer, self.trainable = layer, trainable
        self.program = flatten(jax.make_jaxpr(self._trace)(w, x))  # from parameters and x to y and leaves
        jaxpr = self.program.jaxpr
        constants = depending_only(jaxpr, [False] * len(jaxpr.invars))
        self.is_constant = [is_literal(v) or v in constants for v in jaxpr.outvars[1:]]
        self.is_saved = [s is None and not c for s, c in zip(self.sources, self.is_constant, strict=True)]
        self.shapes = jax.eval_shape(self.save, w, x)[1]

    def _trace(self, w: Tree, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        y, vjp = vjp_of(self.layer, w, x, self.trainable)
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


def vjp_of(layer: Layer, w: Tree, x: jax.Array, trainable: Tree) -> tuple[jax.Array, Callable[[jax.Array], tuple]]:
    """Return (y, function from the gradient of y to those of w's trainable part and of x)."""
    return jax.vjp(lambda trained, x: layer(with_trained(trained, w), x), trained_part(w, trainable), x)


class DividedWeights(NamedTuple):
    """The dim of each leaf of a layer's parameters that XLA divides over so many devices."""

    dims: tuple[int | None, ...]
    number: int


class LayerPrograms:
    """The programs of a layer as functions of arrays only. `w` and `x` give shapes and dtypes.

    divided: None: each device has all of the layer's arrays, as its program knows them. trainable: as of a `Stack`, of
    one layer; gradients of w are None for all else.
    """

    def __init__(
        self,
        function: Layer,
        remat: Remat,
        w: Tree,
        x: Shape,
        divided: DividedWeights | None = None,
        trainable: Tree = True,
    ):
        self.run, self.remat, self._shapes, self.divided, self.trainable = function, remat, (w, x), divided, trainable
        self._flat: dict[Backward, Any] = {}  # (program, shapes of its results)

    @cached_property
    def residuals(self) -> Residuals:
        # forward and backward are different programs, or ticks: there is nothing that a compiler could merge
        kept = self.run
        if self.remat.keeps_residuals:
            kept = jax.checkpoint(self.run, policy=KEEP_PRODUCTS, prevent_cse=False)
        return Residuals(kept, *self._shapes, self.trainable)

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

    @cached_property
    def saved_dims(self) -> list[int | None]:
        """The dim of each residual that XLA divides."""
        return [None] * len(self.saved) if self.divided is None else self._dims_of(self.save, [None], *self._shapes)

    @cached_property
    def pending_dims(self) -> list[int | None]:
        """The dim of each value that `input_grad` hands on that XLA divides."""
        if self.divided is None:
            return [None] * len(self.pending)
        w, x = self._shapes
        return self._dims_of(self.input_grad, [*self.saved_dims, None], w, self.saved, x)

    def _dims_of(self, program: Callable[..., tuple], dims: Sequence[int | None], *args: Any) -> list[int | None]:
        """Return those of the second result of a program of w and other arguments, which have these dims."""
        divided = self.divided
        assert divided is not None, "of layers that XLA divides"
        closed, (_, shapes) = jax.make_jaxpr(program, return_shape=True)(*args)
        _, *found = divided_dims(closed.jaxpr, [*divided.dims, *dims])
        is_even = lambda a, dim: dim is not None and a.shape[dim] % divided.number == 0  # noqa: E731
        return [dim if is_even(a, dim) else None for a, dim in zip(shapes, found, strict=True)]

    def save(self, w: Tree, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Return (the output, the arrays that the backward needs)."""
        return self.residuals.save(w, x)

    def pull(self, w: Tree, saved: list[jax.Array], gy: jax.Array) -> tuple[jax.Array, Tree]:
        """Return the gradients of the input and of w, from the saved arrays."""
        return self.residuals.pull(w, saved, gy)

    def redo(self, w: Tree, x: jax.Array, gy: jax.Array) -> tuple[jax.Array, Tree]:
        """Return the gradients of the input and of w, from the input alone."""
        dw, gx = vjp_of(self.run, w, x, self.trainable)[1](gy)
        return gx, dw

    def input_grad(self, w: Tree, saved: list[jax.Array], gy: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Return (gradient of the input, the arrays that `weight_grad` needs)."""
        return self.split.input_grad(w, saved, gy)

    def weight_grad(self, w: Tree, pending: list[jax.Array]) -> Tree:
        """Return the gradient of w."""
        return self.split.weight_grad(w, pending)

    def add_grads(self, how: Backward, args: tuple, sums: Tree) -> tuple[Any, Tree]:
        """Return (gx, sums with dw added) where gx, dw = grads_of(self, how)(*args)."""
        if how not in self._flat:
            closed, shapes = jax.make_jaxpr(grads_of(self, how), return_shape=True)(*args)
            self._flat[how] = flatten(closed), shapes
        closed, (gx, _) = self._flat[how]
        return add_last_outputs(closed, args, gx, sums)


class SwitchPackings:
    """The packings of the arrays that wait of any layer: those kept for its backward, and those that I hands to W."""

    def __init__(self, layers: Sequence[LayerPrograms]):
        self.layers = layers

    @cached_property
    def saved(self) -> FlatPacking:
        return self._packing([(layer.saved, layer.saved_dims) for layer in self.layers])

    @cached_property
    def pending(self) -> FlatPacking:
        return self._packing([(layer.pending, layer.pending_dims) for layer in self.layers])

    def _packing(self, lists: Sequence[tuple[Sequence[Shape], Sequence[int | None]]]) -> FlatPacking:
        divided = self.layers[0].divided
        return FlatPacking(lists, 1 if divided is None else divided.number)


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
            return y, self.packings.saved.pack(saved, layer.saved_dims)

        return self._switch(save, w, x)

    def pull(self, w: Tree, saved: list[jax.Array], gy: jax.Array) -> tuple[jax.Array, Tree]:
        run = lambda layer, w, saved, gy: layer.pull(w, self._saved(layer, saved), gy)  # noqa: E731
        return self._switch(run, w, saved, gy)

    def input_grad(self, w: Tree, saved: list[jax.Array], gy: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        def input_grad(layer: LayerPrograms, w: Tree, saved: list, gy: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
            gx, pending = layer.input_grad(w, self._saved(layer, saved), gy)
            return gx, self.packings.pending.pack(pending, layer.pending_dims)

        return self._switch(input_grad, w, saved, gy)

    def weight_grad(self, w: Tree, pending: list[jax.Array]) -> Tree:
        unpack = self.packings.pending.unpack
        run = lambda layer, w, pending: layer.weight_grad(w, unpack(pending, layer.pending, layer.pending_dims))  # noqa: E731
        return self._switch(run, w, pending)

    def _saved(self, layer: LayerPrograms, packed: list[jax.Array]) -> list[jax.Array]:
        return self.packings.saved.unpack(packed, layer.saved, layer.saved_dims)

    def _switch(self, run: Callable[..., Any], *args: Any) -> Any:
        """Return run(layer, *args) of the layer that `number` is."""
        place = np.zeros(max(self.place_of) + 1, np.int32)
        place[list(self.place_of)] = list(self.place_of.values())
        return jax.lax.switch(jnp.asarray(place)[self.number], [partial(run, layer) for layer in self.layers], *args)


def grads_of(layer: LayerPrograms | LayerSwitch, how: Backward) -> Callable[..., tuple[Any, Tree]]:
    """Return a backward of a layer as a function to (gradient of the input, gradient of w); of W the first is None."""
    if how == "weight_grad":
        return lambda w, pending: (None, layer.weight_grad(w, pending))
    return layer.redo if how == "redo" else layer.pull


class FlatPacking:
    """Lists of arrays of several kinds of lists as one kind: a flat array for each dtype, as long as the longest.

    lists: of shapes, and of the dim of each array that XLA divides over `number` devices; those arrays are packed as a
    matrix of as many rows, so that each device packs what it has.
    """

    def __init__(self, lists: Sequence[tuple[Sequence[Shape], Sequence[int | None]]], number: int = 1):
        sizes: dict[tuple[str, bool], int] = {}
        for shapes, dims in lists:
            keys = [_kind(a, dim) for a, dim in zip(shapes, dims, strict=True)]
            for key in set(keys):
                size = sum(a.size for a, each in zip(shapes, keys, strict=True) if each == key)
                sizes[key] = max(sizes.get(key, 0), size)
        rows = lambda is_divided: (number,) if is_divided else ()  # noqa: E731
        self.kinds = sorted(sizes)
        self.shapes = [Shape((*rows(d), sizes[t, d] // (number if d else 1)), jnp.dtype(t)) for t, d in self.kinds]
        self.dims = [0 if is_divided else None for _, is_divided in self.kinds]

    def pack(self, arrays: Sequence[jax.Array], dims: Sequence[int | None]) -> list[jax.Array]:
        """Return the arrays one behind the other, then zeros."""
        first = [a if dim is None else jnp.moveaxis(a, dim, 0) for a, dim in zip(arrays, dims, strict=True)]
        of_kind = lambda kind: [a for a, dim in zip(first, dims, strict=True) if _kind(a, dim) == kind]  # noqa: E731
        return [pack_flat(of_kind(kind), to) for kind, to in zip(self.kinds, self.shapes, strict=True)]

    def unpack(
        self, packed: Sequence[jax.Array], shapes: Sequence[Shape], dims: Sequence[int | None]
    ) -> list[jax.Array]:
        """Return arrays of these shapes, as `pack` put them."""
        first = [Shape(dim_first(a.shape, dim), a.dtype) for a, dim in zip(shapes, dims, strict=True)]
        kinds = [_kind(a, dim) for a, dim in zip(shapes, dims, strict=True)]
        parts = {
            kind: iter(unpack_flat([a for a, each in zip(first, kinds, strict=True) if each == kind], of_kind))
            for kind, of_kind in zip(self.kinds, packed, strict=True)
        }
        found = [next(parts[kind]) for kind in kinds]
        return [a if dim is None else jnp.moveaxis(a, 0, dim) for a, dim in zip(found, dims, strict=True)]


def _kind(a: Any, dim: int | None) -> tuple[str, bool]:
    """Return by what arrays are packed apart: the dtype, and whether XLA divides them."""
    return str(a.dtype), dim is not None


def dim_first(shape: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
    """Return a shape with one of its dims before the others.

    >>> dim_first((2, 3, 4), 1), dim_first((2, 3, 4), None)
    ((3, 2, 4), (2, 3, 4))
    """
    return shape if dim is None else (shape[dim], *shape[:dim], *shape[dim + 1 :])


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
