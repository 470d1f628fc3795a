"""One stage: its layers forward, its stash, and its layers backward, for each remat setting.

A stage's parameters `w` are a list of layers (unrolled in the program) or one stacked tree (scanned). `fold` hides the
difference; `fold_gathered` also that they are shards, each made whole one layer ahead of its use. `LayerSlots` says
which layers they are, where that matters: slots of padding pass x through, and where layers differ each runs its own
programs.

remat  | the stash of a microbatch                                  | the backward recomputes
none   | all but attention scores and element-wise results          | those
layer  | the input of each layer                                    | one layer at a time
full   | the stage's input                                          | the stage

The backward runs whole (`backward`), or as `input_grad`, which recomputes the same, and later `weight_grad`, which
recomputes nothing: its inputs were handed to it as `pending`, and the stash is free from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.executors.stage.gathered import Gather, fold_gathered
from ppctl.executors.stage.layers import (
    Backward,
    DividedWeights,
    Layer,
    LayerPrograms,
    LayerSwitch,
    SwitchPackings,
    add_trees,
    grads_of,
    zeros_like,
)
from ppctl.model.trainable import trained_part
from ppctl.schedule.remat import Remat

Tree = Any
Cotangent = Callable[[jax.Array | None], tuple[jax.Array, Any]]  # from a stage's output, or None, to (gy, aux)


def fold(body: Callable, carry: Tree, xs: Any, *, reverse: bool = False) -> tuple[Tree, Any]:
    """Return (last carry, per-layer results) of `carry, y = body(carry, x)`; unrolled when xs is a list of trees."""
    if not isinstance(xs, list):
        return jax.lax.scan(body, carry, xs, reverse=reverse)
    ys: list = []
    for x in reversed(xs) if reverse else xs:
        carry, y = body(carry, x)
        ys.append(y)
    return carry, ys[::-1] if reverse else ys


def numbered(w: Any, *others: Any) -> Any:
    """Return xs for `fold`: (layer number, parameters, ...) of each layer."""
    if isinstance(w, list):
        return list(zip(range(len(w)), w, *others, strict=True))
    return (jnp.arange(jax.tree.leaves(w)[0].shape[0]), w, *others)


@dataclass(frozen=True)
class LayerSlots:
    """The layers in the slots of a stage's parameters, where they are not simply layers that are all alike."""

    count: jax.Array | None = None  # so many are layers, the others padding; None: all are layers
    numbers: range | jax.Array | None = None  # the layer of the model that each is; None: layers are alike
    among: tuple[tuple[int, ...], ...] = ()  # of traced numbers: for each slot the layers that it may hold
    is_one_of: bool = False  # of several stages whose arrays wait in the same places, so that all wait packed alike

    def at(self, k: Any) -> tuple[Any, tuple[int, ...]]:
        """(the layer in slot k, those that it may be for all that is known now)."""
        assert self.numbers is not None, "layers differ"
        among = self.may_be(k if isinstance(k, int) else None)
        if isinstance(self.numbers, range):
            return (self.numbers[k] if isinstance(k, int) else jnp.asarray(tuple(self.numbers))[k]), among
        return self.numbers[k], among

    def may_be(self, k: int | None) -> tuple[int, ...]:
        """Return the layers that slot k may hold; None: any slot."""
        among = tuple((number,) for number in self.numbers) if isinstance(self.numbers, range) else self.among
        return tuple(sorted(set().union(*among))) if k is None else among[k]


def where_layer(slots: LayerSlots | None, k: Any, run: Callable, otherwise: Callable, *args: Any) -> Any:
    """Return run(*args) for slots that hold layers, else otherwise(*args)."""
    if slots is None or slots.count is None:
        return run(*args)
    return jax.lax.cond(k < slots.count, run, otherwise, *args)


class Stage:
    """The forward and backward of a stage as functions of arrays only. `w0` and `x` give shapes and dtypes.

    layers: the function that all layers are, or those of the model's layers in order; then every method needs to be
    given the `slots` that it has. None: layers that are all alike. gather: from a layer's shards, of which `w` then is
    made, to the layer; None: `w` is of whole layers. Gradients are whole. divided: where XLA divides a layer's
    parameters. trainable: which of them have gradients, as of a `Stack`; those of all others are None. in_order: a
    layer is recomputed (remat=layer) when the backward of the layer behind it is done. It needs nothing of that one,
    so that XLA for GPUs runs the forwards of all layers first, and what they keep is there at the same time.
    """

    def __init__(
        self,
        layers: Layer | Sequence[Layer],
        remat: Remat,
        w0: Tree,
        x: jax.ShapeDtypeStruct,
        gather: Gather | None = None,
        divided: DividedWeights | None = None,
        trainable: Tree = True,
        in_order: bool = False,
    ):
        functions = (layers,) if callable(layers) else layers
        self.remat, self.are_alike, self.w0, self.x, self.gather = remat, callable(layers), w0, x, gather
        self.trainable, self.in_order = trainable, in_order and remat.keeps_layer_inputs
        programs = {id(each): LayerPrograms(each, remat, w0, x, divided, trainable) for each in functions}
        self.layers = [programs[id(function)] for function in functions]
        self.packings = SwitchPackings(self.layers)

    def layer(self, slots: LayerSlots | None, k: Any) -> LayerPrograms | LayerSwitch:
        """Return the programs of slot k."""
        if self.are_alike:
            return self.layers[0]
        assert slots is not None, "layers differ"
        number, among = slots.at(k)
        if self._are_one(among) and not slots.is_one_of:
            return self.layers[among[0]]
        return LayerSwitch(self.layers, number, among, self.packings)

    def _fold(
        self, body: Callable, carry: Tree, w: Any, *others: Any, reverse: bool = False, first: Tree = None
    ) -> tuple[Tree, Any, Tree]:
        """Return `fold` over (layer number, parameters, ...) of each layer, and the last one if it was gathered.

        first: the first one, where it is gathered already.
        """
        if self.gather is None:
            return *fold(body, carry, numbered(w, *others), reverse=reverse), None
        return fold_gathered(body, carry, w, others, self.gather, reverse=reverse, first=first)

    @property
    def keeps_input(self) -> bool:
        """True where the stash is the stage's input, so that it can stay in the slot where it arrived."""
        return self.remat.keeps_input_only

    def stash_shapes(self, w: Any, slots: LayerSlots | None = None) -> Tree:
        """Shapes of the stash of a microbatch; w may be shapes. slots: None: of any layers, where layers differ."""
        if self.remat.keeps_residuals:
            return self._of_layers(w, slots, "saved")
        return self._of_layers(w, slots, "x") if self.remat.keeps_layer_inputs else self.x

    def pending_shapes(self, w: Any, slots: LayerSlots | None = None) -> Any:
        """Return the shapes of the arrays that `input_grad` hands on."""
        return self._of_layers(w, slots, "pending")

    def _of_layers(self, w: Any, slots: LayerSlots | None, what: str) -> Any:
        """Return shapes of one thing of each layer, as `fold` gives them: listed, or stacked."""
        if isinstance(w, list):
            return [self._of_layer(slots, k, what) for k in range(len(w))]
        count = len(jax.tree.leaves(w)[0])
        stacked = lambda a: jax.ShapeDtypeStruct((count, *a.shape), a.dtype)  # noqa: E731
        return jax.tree.map(stacked, self._of_layer(slots, None, what))

    def _of_layer(self, slots: LayerSlots | None, k: int | None, what: str) -> Any:
        """Return shapes of one thing of the layer in slot k, or of any layer."""
        if what == "x":
            return self.x
        if self.are_alike:
            return getattr(self.layers[0], what)
        among = range(len(self.layers)) if slots is None or slots.is_one_of else slots.may_be(k)
        return getattr(self.layers[among[0]], what) if self._are_one(among) else getattr(self.packings, what).shapes

    def _are_one(self, among: Sequence[int]) -> bool:
        """Return whether these layers have the same programs."""
        return all(self.layers[l] is self.layers[among[0]] for l in among)

    def _no_grads(self, w: Tree) -> Tree:
        """Return gradients of zero of a layer."""
        return zeros_like(trained_part(w, self.trainable))

    def forward(self, w: Any, slots: LayerSlots | None, x: jax.Array) -> tuple[jax.Array, Tree]:
        """Return the stage's output and its stash."""
        if self.remat.keeps_residuals:
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

        y is the stage's output where the backward recomputes all of it (remat=full), else None. sums: of gradients of
        w, in the form of w, to which they are added; then these are the second result.
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
        """Return (gradient of the input, pending, aux) where gy, aux = cotangent(y), with y as in `backward`.

        kept: where arrays like pending are kept; then keep(kept, pending), of each layer, is the second result.
        """
        y, read, last = self._save(w, slots, stash) if self.remat.keeps_input_only else (None, stash, None)
        gy, aux = cotangent(y)
        in_order = self.in_order and isinstance(w, list)  # a scan is

        def body(gy: jax.Array, item: tuple) -> tuple[jax.Array, Any]:
            k, layer_w, layer_read, *layer_kept = item
            layer = self.layer(slots, k)

            def run(w: Tree, read: Any, gy: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
                saved = layer.save(w, read)[1] if self.remat.keeps_layer_inputs else read
                return layer.input_grad(w, saved, gy)

            skip = lambda w, read, gy: (gy, zeros_like(layer.pending))  # noqa: E731
            if in_order:
                layer_read, gy = jax.lax.optimization_barrier((layer_read, gy))
            gx, pending = where_layer(slots, k, run, skip, layer_w, layer_read, gy)
            found = gx, keep(layer_kept[0], pending) if layer_kept else pending
            return jax.lax.optimization_barrier(found) if in_order else found

        in_turn = self._in_turn(w, kept)
        gx, pending, _ = self._fold(body, gy, w, read, *in_turn, reverse=True, first=last)
        return gx, pending if kept is None or in_turn else keep(kept, pending), aux

    def weight_grad(self, w: Any, slots: LayerSlots | None, pending: Any, sums: Any = None) -> Any:
        """Return the gradients of w, from the arrays that `input_grad` handed on; sums: as of `backward`."""

        def body(_: None, item: tuple) -> tuple[None, Tree]:
            k, layer_w, layer_pending, *total = item
            skip = lambda w, pending: (None, self._no_grads(w))  # noqa: E731
            return self._added(slots, k, "weight_grad", skip, (layer_w, layer_pending), *total)

        others = pending, *self._in_turn(w, sums)
        if self.gather is None or self._weight_grad_reads(slots):
            dw = self._fold(body, None, w, *others)[1]
        else:
            unread = lambda carry, item: body(carry, (item[0], zeros_like(self.w0), *item[2:]))  # noqa: E731
            dw = fold(unread, None, numbered(w, *others))[1]
        return self._all_added(w, sums, dw)

    def _weight_grad_reads(self, slots: LayerSlots | None) -> bool:
        """Return whether W reads parameters of any layer that the slots may hold."""
        may_be = (0,) if self.are_alike or slots is None else slots.may_be(None)
        return any(self.layers[number].split.reads_w for number in may_be)

    def _save(self, w: Any, slots: LayerSlots | None, x: jax.Array) -> tuple[jax.Array, Any, Tree]:
        """Return the stage's output, its residuals, and the last layer if it was gathered."""

        def body(x: jax.Array, item: tuple) -> tuple[jax.Array, list]:
            k, layer_w = item
            layer = self.layer(slots, k)
            return where_layer(slots, k, layer.save, lambda w, x: (x, zeros_like(layer.saved)), layer_w, x)

        return self._fold(body, x, w)

    def _pull(
        self, w: Any, slots: LayerSlots | None, kept: Any, gy: jax.Array, sums: Any, last: Tree = None
    ) -> tuple[jax.Array, Any]:
        """Return the gradients of the stage's input and of w, or the sums with the latter added.

        kept: residuals, or with remat=layer the input of each layer. last: the last layer, where it is gathered.
        """
        how: Backward = "redo" if self.remat.keeps_layer_inputs else "pull"
        in_order = self.in_order and isinstance(w, list)  # a scan is

        def body(gy: jax.Array, item: tuple) -> tuple[jax.Array, Tree]:
            k, layer_w, layer_kept, *total = item
            skip = lambda w, kept, gy: (gy, self._no_grads(w))  # noqa: E731
            if in_order:
                layer_kept, gy = jax.lax.optimization_barrier((layer_kept, gy))
            found = self._added(slots, k, how, skip, (layer_w, layer_kept, gy), *total)
            return jax.lax.optimization_barrier(found) if in_order else found

        gx, dw, _ = self._fold(body, gy, w, kept, *self._in_turn(w, sums), reverse=True, first=last)
        return gx, self._all_added(w, sums, dw)

    def _added(
        self, slots: LayerSlots | None, k: Any, how: Backward, skip: Callable, args: tuple, total: Tree = None
    ) -> tuple[Any, Tree]:
        """Return (gx, dw) of slot k, or (gx, total with dw added)."""
        layer = self.layer(slots, k)
        if total is not None and isinstance(layer, LayerPrograms) and (slots is None or slots.count is None):
            return layer.add_grads(how, args, total)
        gx, dw = where_layer(slots, k, grads_of(layer, how), skip, *args)
        return gx, dw if total is None else add_trees(total, dw)

    def _in_turn(self, w: Any, held: Any) -> tuple[Any, ...]:
        """Return sums or what else is held, if any, where each layer's is written when it is made: if unrolled."""
        return (held,) if held is not None and isinstance(w, list) else ()

    def _all_added(self, w: Any, sums: Any, dw: Any) -> Any:
        """Return the gradients of all layers, added if there are sums."""
        return dw if sums is None or self._in_turn(w, sums) else add_trees(sums, dw)
