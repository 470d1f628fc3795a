"""One stage: its forward, stash and backward for each remat setting.

A stage's parameters `w` are a list of layers (unrolled in the program) or one stacked tree
(scanned). `LayerSlots` states the layer in each slot if it matters: padding passes x through, and
layers that differ run different programs.

remat  | the stash of a microbatch                                  | the backward recomputes
none   | all but attention scores and element-wise results          | these scores and results
layer  | the input of each layer                                    | one layer at a time
full   | the stage's input                                          | the stage

The backward runs whole (`backward`) or split. `input_grad` recomputes as much as `backward`, and
the stash is then free. Later `weight_grad` uses the `pending` values and recomputes nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.executors.stage.layer_gather import Gather, fold_gathered
from ppctl.executors.stage.layer_programs import (
    Backward,
    FlatPacking,
    Layer,
    LayerPrograms,
    LayerSwitch,
    add_trees,
    grads_of,
    zeros_like,
)
from ppctl.model.trainable_parameters import trained_part
from ppctl.schedule.remat import Remat

Tree = Any


def fold(body: Callable, carry: Tree, xs: Any, *, reverse: bool = False) -> tuple[Tree, Any]:
    """Return (last carry, per-layer results) of carry, y = body(carry, x); unrolled for a list."""
    if not isinstance(xs, list):
        return jax.lax.scan(body, carry, xs, reverse=reverse)
    ys: list = []
    for x in reversed(xs) if reverse else xs:
        carry, y = body(carry, x)
        ys.append(y)
    return carry, ys[::-1] if reverse else ys


def numbered(w: Any, *others: Any) -> Any:
    """Return xs for `fold`: (layer number, parameters, *others) of each layer."""
    if isinstance(w, list):
        return list(zip(range(len(w)), w, *others, strict=True))
    return (jnp.arange(jax.tree.leaves(w)[0].shape[0]), w, *others)


@dataclass(frozen=True)
class LayerSlots:
    """The layer in each parameter slot of a stage; needed if slots are padded or layers differ."""

    count: jax.Array | None = None  # number of layers; later slots are padding; None: no padding
    numbers: range | jax.Array | None = None  # layer number of each slot; None: layers are alike
    among: tuple[tuple[int, ...], ...] = ()  # layers that each slot may hold, if numbers are traced
    is_one_of: bool = False  # whether chunks share stash slots, so that all stashes are packed
    least: int = 0  # first slots, which hold a layer on every rank

    def may_pad(self, k: Any) -> bool:
        """Return whether slot k is padding on some rank; True if k is traced and unknown."""
        return self.count is not None and not (isinstance(k, int) and k < self.least)

    def at(self, k: Any) -> tuple[Any, tuple[int, ...]]:
        """Return (the layer in slot k, the layers that it may be if it is traced)."""
        assert self.numbers is not None, "layers differ"
        if isinstance(k, int):
            return self.numbers[k], self.may_be(k)
        return jnp.asarray(self.numbers)[k], self.may_be(None)

    def may_be(self, k: int | None) -> tuple[int, ...]:
        """Return the layers that slot k may hold; None: any slot."""
        among = self.among or tuple((number,) for number in self.numbers or ())
        return tuple(sorted(set().union(*among))) if k is None else among[k]


def where_layer(
    slots: LayerSlots | None, k: Any, run: Callable, otherwise: Callable, *args: Any
) -> Any:
    """Return run(*args) if slot k holds a layer, else otherwise(*args)."""
    if slots is None or not slots.may_pad(k):
        return run(*args)
    return jax.lax.cond(k < slots.count, run, otherwise, *args)


class Stage:
    """The forward and backward of a stage as functions of arrays.

    w0, x: shapes and dtypes of a layer's parameters and its input.

    layers: one function for all layers, or a function for each layer of the model in order; then
    every method needs `slots` (None: equal layers without padding). gather: makes a layer from its
    shards, which `w` then holds; gradients are of whole layers. trainable: flags of parameters; the
    gradients of frozen ones are None.

    in_order: recompute a layer (remat=layer) only after the backward of the next layer. Otherwise
    XLA for GPUs runs all forwards first and holds the residuals of all layers at a time.
    """

    def __init__(
        self,
        layers: Layer | Sequence[Layer],
        remat: Remat,
        w0: Tree,
        x: jax.ShapeDtypeStruct,
        gather: Gather | None = None,
        trainable: Tree = True,
        in_order: bool = False,
    ):
        functions = (layers,) if callable(layers) else layers
        self.remat, self.w0, self.x, self.gather = remat, w0, x, gather
        self.are_alike, self.trainable = callable(layers), trainable
        self.in_order = in_order and remat.keeps_layer_inputs
        programs = {id(each): LayerPrograms(each, remat, w0, x, trainable) for each in functions}
        self.layers = [programs[id(function)] for function in functions]
        # one packing for the "saved" or "pending" arrays of any layer
        packed = lambda what: FlatPacking([getattr(layer, what) for layer in self.layers])  # noqa: E731
        self.packing = cache(packed)

    def layer(self, slots: LayerSlots | None, k: Any) -> LayerPrograms | LayerSwitch:
        """Return the programs of slot k."""
        if self.are_alike:
            return self.layers[0]
        assert slots is not None, "layers differ"
        number, among = slots.at(k)
        if self._are_one(among) and not slots.is_one_of:
            return self.layers[among[0]]
        return LayerSwitch(self.layers, number, among, self.packing)

    def _fold(
        self,
        body: Callable,
        carry: Tree,
        w: Any,
        *others: Any,
        reverse: bool = False,
        first: Tree = None,
    ) -> tuple[Tree, Any, Tree]:
        """Return (last carry, per-layer results, last layer gathered or None) of the body.

        carry, y = body(carry, (layer number, parameters, *others)). first: see `fold_gathered`.
        """
        if self.gather is None:
            return *fold(body, carry, numbered(w, *others), reverse=reverse), None
        return fold_gathered(body, carry, w, others, self.gather, reverse=reverse, first=first)

    @property
    def keeps_input(self) -> bool:
        """Whether the stash is the stage's input, which stays in the slot where it arrived."""
        return self.remat.keeps_input_only

    def stash_shapes(self, w: Any, slots: LayerSlots | None = None) -> Tree:
        """Return the shapes of a microbatch's stash; slots=None: large enough for any layers."""
        if not self.remat.recomputes:
            return self._of_layers(w, slots, "saved")
        return self._of_layers(w, slots, "x") if self.remat.keeps_layer_inputs else self.x

    def pending_shapes(self, w: Any, slots: LayerSlots | None = None) -> Any:
        """Return the shapes of the values from `input_grad` to `weight_grad`."""
        return self._of_layers(w, slots, "pending")

    def _of_layers(self, w: Any, slots: LayerSlots | None, what: str) -> Any:
        """Return each layer's shapes of `what` ("saved", "pending" or "x"), a list or stacked."""
        if isinstance(w, list):
            return [self._of_layer(slots, k, what) for k in range(len(w))]
        count = len(jax.tree.leaves(w)[0])
        stacked = lambda a: jax.ShapeDtypeStruct((count, *a.shape), a.dtype)  # noqa: E731
        return jax.tree.map(stacked, self._of_layer(slots, None, what))

    def _of_layer(self, slots: LayerSlots | None, k: int | None, what: str) -> Any:
        """Return the shapes of `what` for the layer in slot k; k=None: for any layer."""
        if what == "x":
            return self.x
        if self.are_alike:
            return getattr(self.layers[0], what)
        among = range(len(self.layers)) if slots is None or slots.is_one_of else slots.may_be(k)
        if self._are_one(among):
            return getattr(self.layers[among[0]], what)
        return self.packing(what).shapes

    def _are_one(self, among: Sequence[int]) -> bool:
        """Return whether these layers have the same programs."""
        return all(self.layers[l] is self.layers[among[0]] for l in among)

    def _no_grads(self, w: Tree) -> Tree:
        """Return zeros shaped like a layer's gradients."""
        return zeros_like(trained_part(w, self.trainable))

    def forward(self, w: Any, slots: LayerSlots | None, x: jax.Array) -> tuple[jax.Array, Tree]:
        """Return the stage's output and its stash."""
        if not self.remat.recomputes:
            return self._save(w, slots, x)[:2]

        def body(x: jax.Array, item: tuple) -> tuple[jax.Array, jax.Array | None]:
            k, layer_w = item
            y = where_layer(slots, k, self.layer(slots, k).run, lambda w, x: x, layer_w, x)
            return y, x if self.remat.keeps_layer_inputs else None

        y, inputs, _ = self._fold(body, x, w)
        return y, inputs if self.remat.keeps_layer_inputs else x

    def backward(
        self, w: Any, slots: LayerSlots | None, stash: Tree, cotangent: Callable, sums: Any = None
    ) -> tuple[jax.Array, Any, Any]:
        """Return (gradient of the input, gradients of w, aux) where gy, aux = cotangent(y).

        y is the stage's output if the backward recomputes all of it (remat=full), else None.
        sums: sums of gradients, in the form of w; the second result then includes them.
        """
        if self.remat.keeps_input_only:
            y, saved, last = self._save(w, slots, stash)
            gy, aux = cotangent(y)
            return *self._pull(w, slots, saved, gy, sums, last), aux
        gy, aux = cotangent(None)
        return *self._pull(w, slots, stash, gy, sums), aux

    def input_grad(
        self,
        w: Any,
        slots: LayerSlots | None,
        stash: Tree,
        cotangent: Callable,
        kept: Any = None,
        keep: Callable[[Tree, Tree], Tree] = lambda _, pending: pending,
    ) -> tuple[jax.Array, Any, Any]:
        """Return (gradient of the input, pending, aux); cotangent: as in `backward`.

        kept: slots of pending values; the second result is then keep(kept, pending), applied to
        each layer if w is a list.
        """
        # 1. the cotangent, from a recomputed output with remat=full
        y, read, last = None, stash, None
        if self.remat.keeps_input_only:
            y, read, last = self._save(w, slots, stash)
        gy, aux = cotangent(y)
        barrier = self._barrier(w)

        # 2. the layers from the last to the first
        def body(gy: jax.Array, item: tuple) -> tuple[jax.Array, Any]:
            k, layer_w, layer_read, *layer_kept = item
            layer = self.layer(slots, k)

            def run(w: Tree, read: Any, gy: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
                saved = layer.save(w, read)[1] if self.remat.keeps_layer_inputs else read
                return layer.input_grad(w, saved, gy)

            skip = lambda w, read, gy: (gy, zeros_like(layer.pending))  # noqa: E731
            layer_read, gy = barrier((layer_read, gy))
            gx, pending = where_layer(slots, k, run, skip, layer_w, layer_read, gy)
            return barrier((gx, keep(layer_kept[0], pending) if layer_kept else pending))

        in_turn = self._in_turn(w, kept)
        gx, pending, _ = self._fold(body, gy, w, read, *in_turn, reverse=True, first=last)
        return gx, pending if kept is None or in_turn else keep(kept, pending), aux

    def weight_grad(self, w: Any, slots: LayerSlots | None, pending: Any, sums: Any = None) -> Any:
        """Return the gradients of w, from `pending`; sums: as in `backward`."""

        def body(_: None, item: tuple) -> tuple[None, Tree]:
            k, layer_w, layer_pending, *total = item
            skip = lambda w, pending: (None, self._no_grads(w))  # noqa: E731
            return self._added(slots, k, "weight_grad", skip, (layer_w, layer_pending), *total)

        others = pending, *self._in_turn(w, sums)
        numbers = (0,) if self.are_alike or slots is None else slots.may_be(None)
        if self.gather is None or any(self.layers[number].split.reads_w for number in numbers):
            dw = self._fold(body, None, w, *others)[1]
        else:
            unread = lambda carry, item: body(carry, (item[0], zeros_like(self.w0), *item[2:]))  # noqa: E731
            dw = fold(unread, None, numbered(w, *others))[1]
        return self._all_added(w, sums, dw)

    def _save(self, w: Any, slots: LayerSlots | None, x: jax.Array) -> tuple[jax.Array, Any, Tree]:
        """Return (the stage's output, its residuals, the last layer if it was gathered)."""

        def body(x: jax.Array, item: tuple) -> tuple[jax.Array, list]:
            k, layer_w = item
            layer = self.layer(slots, k)
            skip = lambda w, x: (x, zeros_like(layer.saved))  # noqa: E731
            return where_layer(slots, k, layer.save, skip, layer_w, x)

        return self._fold(body, x, w)

    def _pull(
        self,
        w: Any,
        slots: LayerSlots | None,
        kept: Any,
        gy: jax.Array,
        sums: Any,
        last: Tree = None,
    ) -> tuple[jax.Array, Any]:
        """Return the gradients of the input and of w, from residuals or (remat=layer) inputs."""
        how: Backward = "redo" if self.remat.keeps_layer_inputs else "pull"
        barrier = self._barrier(w)

        def body(gy: jax.Array, item: tuple) -> tuple[jax.Array, Tree]:
            k, layer_w, layer_kept, *total = item
            skip = lambda w, kept, gy: (gy, self._no_grads(w))  # noqa: E731
            layer_kept, gy = barrier((layer_kept, gy))
            return barrier(self._added(slots, k, how, skip, (layer_w, layer_kept, gy), *total))

        gx, dw, _ = self._fold(body, gy, w, kept, *self._in_turn(w, sums), reverse=True, first=last)
        return gx, self._all_added(w, sums, dw)

    def _barrier(self, w: Any) -> Callable[[Any], Any]:
        """Return a barrier that keeps the backward of unrolled layers in order, or the identity."""
        is_needed = self.in_order and isinstance(w, list)
        return jax.lax.optimization_barrier if is_needed else lambda values: values

    def _added(
        self,
        slots: LayerSlots | None,
        k: Any,
        how: Backward,
        skip: Callable,
        args: tuple,
        total: Tree = None,
    ) -> tuple[Any, Tree]:
        """Return (gx, dw) of the layer in slot k, or with `total` (gx, total with dw added)."""
        layer = self.layer(slots, k)
        can_pad = slots is not None and slots.may_pad(k)
        if total is not None and isinstance(layer, LayerPrograms) and not can_pad:
            return layer.add_grads(how, args, total)
        gx, dw = where_layer(slots, k, grads_of(layer, how), skip, *args)
        return gx, dw if total is None else add_trees(total, dw)

    def _in_turn(self, w: Any, held: Any) -> tuple[Any, ...]:
        """Return `held` as an argument tuple of `_fold`, which gives each unrolled layer its entry.

        (): layers are scanned, or held is None.
        """
        return (held,) if held is not None and isinstance(w, list) else ()

    def _all_added(self, w: Any, sums: Any, dw: Any) -> Any:
        """Return dw with `sums` added, unless unrolled layers have already added their entries."""
        return dw if sums is None or self._in_turn(w, sums) else add_trees(sums, dw)
