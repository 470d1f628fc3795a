"""Run an optax optimizer on the parameters of a network, named as in its `init`.

A layer of a network is stored packed: one array for each group of its parameters, "kernel" (with
weight decay) or "bias", trained or frozen. An elementwise optimizer with one formula for all
parameters of a group updates these arrays (`LayerOptimizer`). Other optimizers run on the author's
tree: each rank unpacks its layers, updates them and packs the results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import PartitionSpec as P

from ppctl.executors.parameter_layout import Layout, gather_shards, own_shards
from ppctl.executors.stage.layer_programs import FlatPacking
from ppctl.executors.stage.network_parameters import MULTIPLE, NetworkParameters
from ppctl.model.layer_reports import Updates
from ppctl.model.trainable_parameters import is_none
from ppctl.training.pipeline import layer_optimizers as by_layer
from ppctl.training.pipeline.update_formulas import Place, places_in, update_formulas

Tree = Any
Slots = np.ndarray | None  # the layer in each slot [V, P, K], -1 for padding
Shape = jax.ShapeDtypeStruct
Leaves = dict[int, Any]  # number -> parameter, or leaf of optax's state


def network_optimizer(
    optimizer: optax.GradientTransformation,
    network: NetworkParameters,
    params: Tree,
    layout: Layout,
    ema: float | None = None,
) -> NetworkOptimizer | by_layer.LayerOptimizer:
    """Return the optimizer of a network's trained parameters; params: shapes in natural order."""
    by_name = NetworkOptimizer(optimizer, network, layout, ema=ema)
    formulas = update_formulas(optimizer, by_name.form.shapes)
    if not all(formula.is_elementwise for formula in formulas):
        return by_name
    try:
        on_packed = by_layer.LayerOptimizer(optimizer, params, layout, ema=ema)
        stored = update_formulas(optimizer, on_packed.one_layer)
    except Exception:  # such as a mask that fits only the author's tree
        return by_name
    # compare the formula of each parameter with that of the array that packs it
    numbers = jax.tree.unflatten(jax.tree.structure(on_packed.one_layer), range(len(stored)))
    arrays = network.embed_head_leaves(numbers["embed_head"])
    for l in range(network.num_layers):
        arrays |= network.vectors_of(l, numbers["layers"])
    pairs = ((formulas[n], stored[arrays[i]]) for n, i in enumerate(by_name.form.trained))
    return on_packed if all(a == b for a, b in pairs) else by_name


@dataclass(frozen=True)
class NetworkOptimizer:
    """An optimizer of a network, with the methods of `LayerOptimizer`. form: its state."""

    optimizer: optax.GradientTransformation
    network: NetworkParameters = field(compare=False)
    layout: Layout
    is_elementwise = False
    updates: Updates = field(default_factory=dict)
    ema: float | None = None

    def __post_init__(self) -> None:
        by_layer.check_optimizer(self.optimizer, self.form.shapes, update_formulas)

    @cached_property
    def form(self) -> NetworkState:
        return NetworkState(self.optimizer, self.network)

    @property
    def guards_finite(self) -> bool:
        return by_layer.has_rule(self.optimizer, self.form.shapes)

    @property
    def skips_nonfinite(self) -> bool:
        return by_layer.skips(self.optimizer, self.form.shapes)

    # init and update

    def init(self, params: Tree) -> Tree:
        """Return the initial state, in natural order."""
        layers = range(self.network.num_layers)
        leaves = self.form.params(params, {l: (l,) for l in layers})
        state = dict(enumerate(jax.tree.leaves(self.optimizer.init(self.form.tree(leaves)))))
        packed = [self.form.pack(l, state) for l in layers]
        return self.form.stored(state, jax.tree.map(lambda *a: jnp.stack(a), *packed))

    def update(
        self, grads: Tree, state: Tree, params: Tree, *, norm: Array, layer_in_slot: Slots = None
    ) -> tuple[Tree, Tree]:
        """Return (updates, next state), staged."""
        grads = by_layer.poisoned(grads, norm) if self.skips_nonfinite else grads
        # 1. embedding and head; for one rank (mpmd) also its layers
        numbers = np.full((1, 1, 1), -1) if layer_in_slot is None else layer_in_slot
        updates, found = self._updated(numbers, grads, state, params, norm)
        shared, layers = self.form.shared(found), (grads["layers"], state["layers"])
        # 2. the layers
        if layer_in_slot is not None:
            layers = self._packed(numbers, updates, found)
        elif jax.tree.leaves(grads["layers"]):
            *layers, shared = self._of_ranks(grads, state, params, norm)
        # 3. the stored form
        names = self.network.leaves.names
        places = (self.form.name(names.index(name)) for name in grads["embed_head"])
        named = {names[i]: leaf for i, leaf in updates.items()}
        outer = {name: {group: named.get(name)} for name, group in places}
        state = self.form.stored(found, layers[1]) | {"shared": shared}
        return {"embed_head": outer, "layers": layers[0]}, state

    def _of_ranks(self, grads: Tree, state: Tree, params: Tree, norm: Array) -> tuple:
        """Return (updates of layers, their state, shared numbers); each rank updates its layers."""
        # 1. the staged layers and their specs
        trees = {"grads": grads, "state": state, "params": params}
        given = {name: tree["layers"] for name, tree in trees.items()}
        specs = self.layout.staged_specs({"layers": given})["layers"]
        out_specs = specs["grads"], specs["state"], P()
        slots = self.layout.placement.layer_in_slot

        # 2. the update of one rank, on whole arrays
        def of_rank(rank: int, given: Tree, shared: Tree, norm: Array) -> tuple:
            trees = {name: {"embed_head": {}, "layers": a} for name, a in given.items()}
            trees["state"] |= {"shared": shared}
            numbers = slots[:, rank : rank + 1]
            updates, found = self._updated(numbers, **trees, norm=norm)
            return *self._packed(numbers, updates, found), self.form.shared(found)

        # 3. each device runs the update of its rank, and keeps its shard of the results
        def local(given: Tree, shared: Tree, norm: Array) -> tuple:
            branches = [partial(of_rank, rank) for rank in range(slots.shape[1])]
            whole = gather_shards(given, specs)
            *found, shared = jax.lax.switch(jax.lax.axis_index("pp"), branches, whole, shared, norm)
            return *own_shards(tuple(found), out_specs[:2]), shared

        over, in_specs = partial(jax.shard_map, mesh=self.layout.mesh), (specs, P(), P())
        run = over(local, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return run(given, state["shared"], norm)

    def _updated(
        self, numbers: np.ndarray, grads: Tree, state: Tree, params: Tree, norm: Array
    ) -> tuple[Leaves, Leaves]:
        """Return (updates, next state) by leaf, of embedding, head and the layers in `numbers`.

        The optimizer gets the whole tree, with zeros for other parameters. numbers: the layer in
        each slot, -1 for padding.
        """
        indices = {int(l): index for index, l in np.ndenumerate(numbers) if l >= 0}
        g, p = self.form.params(grads, indices), self.form.params(params, indices)
        s = self.form.unpacked(state, indices)
        params_zeros = by_layer.zeros_of(self.form.shapes)
        zeros = dict(enumerate(jax.tree.leaves(params_zeros, is_leaf=is_none)))
        leaves, treedef = jax.tree.flatten(by_layer.zeros_of(self.form.state))
        given = jax.tree.unflatten(treedef, [s.get(j, zero) for j, zero in enumerate(leaves)])
        update = optax.with_extra_args_support(self.optimizer).update
        tree = self.form.tree
        updates, after = update(tree(zeros | g), given, tree(zeros | p), norm=norm)
        of_all, next_state = jax.tree.leaves(updates, is_leaf=is_none), jax.tree.leaves(after)
        return {i: of_all[i] for i in g}, {j: next_state[j] for j in s}

    def _packed(self, numbers: np.ndarray, updates: Leaves, state: Leaves) -> tuple[Tree, Tree]:
        """Return packed (updates of layers, their state) of a rank, [V, 1, K, ...]."""
        slots, packed = numbers.ravel().tolist(), self.network.packed_layer
        held = [l for l in slots if l >= 0]
        layers = {l: (packed(l, updates), self.form.pack(l, state)) for l in held}
        padding = jax.tree.map(jnp.zeros_like, layers[held[0]])
        in_order = [layers.get(l, padding) for l in slots]
        return jax.tree.map(lambda *a: jnp.stack(a).reshape(*numbers.shape, *a[0].shape), *in_order)


@dataclass(frozen=True)
class NetworkState:
    """The state of an optimizer of a network: as optax has it for the author's tree, and stored.

    The stored state is {"shared": {slot: number}, "embed_head": {parameter: {group: {slot:
    array}}}, "layers": arrays [..., n], one per dtype: the packed leaves of optax's state of each
    layer}. A slot is the name of a leaf of optax's state without its parameter, such as "0/mu".
    """

    optimizer: optax.GradientTransformation
    network: NetworkParameters = field(compare=False)

    # the author's tree

    @property
    def trained(self) -> list[int]:
        """The numbers of the trained parameters."""
        return [i for i, flag in enumerate(self.network.leaves.is_trained) if flag]

    @cached_property
    def shapes(self) -> Tree:
        """The shapes of the author's trained parameters, None for frozen ones."""
        net = self.network
        return self.tree({i: Shape(net.leaves.shapes[i], net.dtype) for i in self.trained})

    @cached_property
    def state(self) -> Tree:
        """The shapes of optax's state for the author's tree."""
        return jax.eval_shape(self.optimizer.init, self.shapes)

    @cached_property
    def places(self) -> list[Place]:
        """The place of each leaf of optax's state.

        `owner` is the index of the leaf's parameter among all parameters, frozen ones included.
        """
        places = places_in(self.state, self.shapes)
        return [p if p.owner is None else p._replace(owner=self.trained[p.owner]) for p in places]

    def tree(self, leaves: Leaves) -> Tree:
        treedef, numbers = self.network.leaves.treedef, range(len(self.network.leaves.shapes))
        return jax.tree.unflatten(treedef, [leaves.get(i) for i in numbers])

    def params(self, tree: Tree, indices: Mapping[int, tuple]) -> Leaves:
        """Return the parameters of embedding, head and layers; indices: layer -> array index."""
        leaves = self.network.embed_head_leaves(tree["embed_head"])
        for l, index in indices.items():
            leaves |= self.network.leaves_of(l, _at(tree["layers"], index))
        return leaves

    # the stored form

    @cached_property
    def _members(self) -> dict[int | None, dict[int, Shape]]:
        """The leaves of optax's state by layer; key None: those of embedding and head."""
        layers = None, *range(self.network.num_layers)
        members: dict[int | None, dict[int, Shape]] = {l: {} for l in layers}
        for j, (place, a) in enumerate(zip(self.places, jax.tree.leaves(self.state), strict=True)):
            if place.owner is not None:
                members[self.network.places[place.owner]][j] = a
        return members

    @cached_property
    def _packing(self) -> FlatPacking:
        """The packing of a layer's state, padded to lengths that can be sharded."""
        layers = range(self.network.num_layers)
        longest = FlatPacking([[*self._members[l].values()] for l in layers]).shapes
        padded = [Shape((-(-a.size // MULTIPLE) * MULTIPLE,), a.dtype) for a in longest]
        return FlatPacking([padded])

    def pack(self, l: int, state: Leaves) -> list[Array]:
        leaves = (state[j].astype(a.dtype) for j, a in self._members[l].items())
        return self._packing.pack([*leaves])

    def unpacked(self, stored: Tree, indices: Mapping[int, tuple]) -> Leaves:
        """Return leaves of optax's state: the shared ones, and those of embedding, head and layers.

        indices: the layers to unpack, as in `_params`.
        """
        state = {}
        for j, place in enumerate(self.places):
            if place.owner is None:
                state[j] = stored["shared"][place.slot]
            elif j in self._members[None]:
                name, group = self.name(place.owner)
                state[j] = stored["embed_head"].get(name, {}).get(group, {}).get(place.slot)
        for l, index in indices.items():
            packed, members = _at(stored["layers"], index), self._members[l]
            state |= zip(members, self._packing.unpack(packed, [*members.values()]), strict=True)
        return {j: leaf for j, leaf in state.items() if leaf is not None}

    def name(self, i: int) -> tuple[str, str]:
        """Return the two keys of an embedding or head parameter in the stored tree."""
        return self.network.leaves.names[i], self.network.group(i)

    def stored(self, state: Leaves, layers: Tree) -> Tree:
        """Return the stored state, None for missing leaves of embedding and head."""
        embed_head: Tree = {}
        for j in self._members[None]:
            owner, slot = self.places[j].owner, self.places[j].slot
            assert owner is not None, "a leaf of a parameter"
            name, group = self.name(owner)
            embed_head.setdefault(name, {group: {}})[group][slot] = state.get(j)
        return {"shared": self.shared(state), "embed_head": embed_head, "layers": layers}

    def shared(self, state: Leaves) -> dict[str, Array]:
        return {p.slot: state[j] for j, p in enumerate(self.places) if p.owner is None}


def _at(tree: Tree, index: tuple) -> Tree:
    """Return one layer of stacked layers."""
    return jax.tree.map(lambda a: a[index], tree)
