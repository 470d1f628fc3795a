"""The programs of the layers in a stage's slots, and the shapes of their values.

Slots may be padded, and layers may differ: `LayerSlots` states the layer in each slot then.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.executors.stage.layer_programs import FlatPacking, Layer, LayerPrograms, LayerSwitch
from ppctl.schedule.remat import Remat

Tree = Any


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


class SlotPrograms:
    """The programs of the layer in each slot; the arguments are those of `Stage`."""

    def __init__(
        self,
        layers: Layer | Sequence[Layer],
        remat: Remat,
        w0: Tree,
        x: jax.ShapeDtypeStruct,
        trainable: Tree,
    ):
        functions = (layers,) if callable(layers) else layers
        self.remat, self.x, self.are_alike = remat, x, callable(layers)
        programs = {id(each): LayerPrograms(each, remat, w0, x, trainable) for each in functions}
        self.layers = [programs[id(function)] for function in functions]
        self.packing = cache(self._packing)

    def _packing(self, what: str) -> FlatPacking:
        """Return one packing for the "saved" or "pending" arrays of any layer."""
        return FlatPacking([getattr(layer, what) for layer in self.layers])

    def at(self, slots: LayerSlots | None, k: Any) -> LayerPrograms | LayerSwitch:
        """Return the programs of slot k."""
        if self.are_alike:
            return self.layers[0]
        assert slots is not None, "layers differ"
        number, among = slots.at(k)
        if self._are_one(among) and not slots.is_one_of:
            return self.layers[among[0]]
        return LayerSwitch(self.layers, number, among, self.packing)

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
