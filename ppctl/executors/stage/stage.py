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
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.executors.stage.layer_gather import Gather, fold_gathered
from ppctl.executors.stage.layer_programs import (
    Backward,
    Layer,
    LayerPrograms,
    add_trees,
    grads_of,
    zeros_like,
)
from ppctl.executors.stage.slot_programs import LayerSlots, SlotPrograms, where_layer
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


def in_turn(w: Any, held: Any) -> tuple[Any, ...]:
    """Return `held` as an argument tuple of `Stage._fold`, which gives each layer its entry.

    (): layers are scanned, or held is None.
    """
    return (held,) if held is not None and isinstance(w, list) else ()


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
        self.remat, self.w0, self.gather, self.trainable = remat, w0, gather, trainable
        self.programs = SlotPrograms(layers, remat, w0, x, trainable)
        self.in_order = in_order and remat.keeps_layer_inputs

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

    def _no_grads(self, w: Tree) -> Tree:
        """Return zeros shaped like a layer's gradients."""
        return zeros_like(trained_part(w, self.trainable))

    def forward(self, w: Any, slots: LayerSlots | None, x: jax.Array) -> tuple[jax.Array, Tree]:
        """Return the stage's output and its stash."""
        if not self.remat.recomputes:
            return self._save(w, slots, x)[:2]

        def body(x: jax.Array, item: tuple) -> tuple[jax.Array, jax.Array | None]:
            k, layer_w = item
            y = where_layer(slots, k, self.programs.at(slots, k).run, lambda w, x: x, layer_w, x)
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
            layer = self.programs.at(slots, k)

            def run(w: Tree, read: Any, gy: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
                saved = layer.save(w, read)[1] if self.remat.keeps_layer_inputs else read
                return layer.input_grad(w, saved, gy)

            skip = lambda w, read, gy: (gy, zeros_like(layer.pending))  # noqa: E731
            layer_read, gy = barrier((layer_read, gy))
            gx, pending = where_layer(slots, k, run, skip, layer_w, layer_read, gy)
            return barrier((gx, keep(layer_kept[0], pending) if layer_kept else pending))

        turns = in_turn(w, kept)
        gx, pending, _ = self._fold(body, gy, w, read, *turns, reverse=True, first=last)
        return gx, pending if kept is None or turns else keep(kept, pending), aux

    def weight_grad(self, w: Any, slots: LayerSlots | None, pending: Any, sums: Any = None) -> Any:
        """Return the gradients of w, from `pending`; sums: as in `backward`."""

        def body(_: None, item: tuple) -> tuple[None, Tree]:
            k, layer_w, layer_pending, *total = item
            skip = lambda w, pending: (None, self._no_grads(w))  # noqa: E731
            return self._added(slots, k, "weight_grad", skip, (layer_w, layer_pending), *total)

        others = pending, *in_turn(w, sums)
        numbers = (0,) if self.programs.are_alike or slots is None else slots.may_be(None)
        if self.gather is None or any(
            self.programs.layers[number].split.reads_w for number in numbers
        ):
            dw = self._fold(body, None, w, *others)[1]
        else:
            unread = lambda carry, item: body(carry, (item[0], zeros_like(self.w0), *item[2:]))  # noqa: E731
            dw = fold(unread, None, numbered(w, *others))[1]
        return self._all_added(w, sums, dw)

    def _save(self, w: Any, slots: LayerSlots | None, x: jax.Array) -> tuple[jax.Array, Any, Tree]:
        """Return (the stage's output, its residuals, the last layer if it was gathered)."""

        def body(x: jax.Array, item: tuple) -> tuple[jax.Array, list]:
            k, layer_w = item
            layer = self.programs.at(slots, k)
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

        gx, dw, _ = self._fold(body, gy, w, kept, *in_turn(w, sums), reverse=True, first=last)
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
        layer = self.programs.at(slots, k)
        can_pad = slots is not None and slots.may_pad(k)
        if total is not None and isinstance(layer, LayerPrograms) and not can_pad:
            return layer.add_grads(how, args, total)
        gx, dw = where_layer(slots, k, grads_of(layer, how), skip, *args)
        return gx, dw if total is None else add_trees(total, dw)

    def _all_added(self, w: Any, sums: Any, dw: Any) -> Any:
        """Return dw with `sums` added, unless unrolled layers have already added their entries."""
        return dw if sums is None or in_turn(w, sums) else add_trees(sums, dw)
