"""Optimizers on the parameters of a network by the names of its `init`, not as layers are packed.

A layer of a network is stored as one array for each group of its parameters. An elementwise
optimizer with one formula for all parameters of a group updates these arrays (`LayerOptimizer`).
Others are run on the author's tree: each rank unpacks its layers, updates and packs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from ppctl.executors.parameter_layout import Layout, gather_shards, own_shards
from ppctl.executors.stage.layer_programs import pack_flat, unpack_flat
from ppctl.executors.stage.traced_network import MULTIPLE, TracedNetwork
from ppctl.model.layer_reports import Updates
from ppctl.training.pipeline.layer_optimizers import (
    LayerOptimizer,
    check_optimizer,
    has_rule,
    poisoned,
    zeros_of,
)
from ppctl.training.pipeline.update_formulas import Place, places_in, update_formulas

Tree = Any
Shape = jax.ShapeDtypeStruct
Leaves = dict[int, Any]  # by the number of the parameter
Members = dict[str, dict[int, Shape]]  # shapes in a slot of the state, by dtype and parameter


def network_optimizer(
    optimizer: optax.GradientTransformation, network: TracedNetwork, params: Tree, layout: Layout
) -> NetworkOptimizer | LayerOptimizer:
    """Return the optimizer of a network's trained parameters; params: shapes in natural order."""
    by_name = NetworkOptimizer(optimizer, network, layout)
    formulas = update_formulas(optimizer, by_name.shapes)
    if not all(formula.is_elementwise for formula in formulas):
        return by_name
    try:
        on_packed = LayerOptimizer(optimizer, params, layout)
        stored = update_formulas(optimizer, on_packed.one_layer)
    except Exception:  # a mask that knows only the author's tree
        return by_name
    # the formula of each parameter's array, by the numbers of the parameters
    trained = [i for i, flag in enumerate(network.is_trained) if flag]
    numbers = jax.tree.unflatten(jax.tree.structure(on_packed.one_layer), range(len(stored)))
    arrays = network.embed_head_leaves(numbers["embed_head"])
    for l in range(network.num_layers):
        arrays |= network.vectors_of(l, numbers["layers"])
    pairs = ((formulas[n], stored[arrays[i]]) for n, i in enumerate(trained))
    return on_packed if all(a == b for a, b in pairs) else by_name


class Update(NamedTuple):
    """The updates of some parameters, and their state by slot; `shared` numbers of the state."""

    updates: Leaves
    slots: dict[str, Leaves]
    shared: dict[str, jax.Array]


@dataclass(frozen=True)
class NetworkOptimizer:
    """An optimizer of a network, with the arguments of `LayerOptimizer`.

    The state is {"shared": {name: number}, "slots": {name: {"embed_head", "layers"}}}, with a slot
    for each tree like the parameters in optax's state. Layers are packed as parameters are, by
    dtype.
    """

    optimizer: optax.GradientTransformation
    network: TracedNetwork = field(compare=False)
    layout: Layout
    is_elementwise = False
    updates: Updates = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_optimizer(self.optimizer, self.shapes, update_formulas)

    @cached_property
    def shapes(self) -> Tree:
        """The shapes of the author's trained parameters, None for frozen ones."""
        net = self.network
        trained = {i: s for i, s in enumerate(net.shapes) if net.is_trained[i]}
        return self._tree({i: Shape(shape, net.dtype) for i, shape in trained.items()})

    @cached_property
    def places(self) -> list[Place]:
        """The place of each leaf of optax's state; owners are numbers of all parameters."""
        trained = [i for i, flag in enumerate(self.network.is_trained) if flag]
        places = places_in(jax.eval_shape(self.optimizer.init, self.shapes), self.shapes)
        return [p if p.owner is None else p._replace(owner=trained[p.owner]) for p in places]

    @cached_property
    def members(self) -> dict[str, Members]:
        """The shapes in each slot."""
        found: dict[str, Members] = {}
        state = jax.eval_shape(self.optimizer.init, self.shapes)
        for place, a in zip(self.places, jax.tree.leaves(state), strict=True):
            if place.owner is not None:
                found.setdefault(place.slot, {}).setdefault(a.dtype.name, {})[place.owner] = a
        return found

    @property
    def guards_finite(self) -> bool:
        return has_rule(self.optimizer, self.shapes)

    def init(self, params: Tree) -> Tree:
        """Return the initial state, in natural order."""
        leaves = self._leaves(params, {l: (l,) for l in range(self.network.num_layers)})
        found = self._taken_apart(self.optimizer.init(self._tree(leaves)), leaves)
        layers = [self._packed_state(l, found) for l in range(self.network.num_layers)]
        return self._state(found, jax.tree.map(lambda *a: jnp.stack(a), *layers))

    def update(
        self,
        grads: Tree,
        state: Tree,
        params: Tree,
        *,
        norm: jax.Array,
        layer_in_slot: np.ndarray | None = None,
    ) -> tuple[Tree, Tree]:
        """Return (updates, next state), staged."""
        grads = poisoned(self.optimizer, self.shapes, grads, norm)
        # 1. embedding and head; of one rank, also its layers
        numbers = np.full((1, 1, 1), -1) if layer_in_slot is None else layer_in_slot
        found = self._updated(numbers, grads, state, params, norm)
        updates, layers = grads["layers"], {n: slot["layers"] for n, slot in state["slots"].items()}
        # 2. the layers
        if layer_in_slot is not None:
            updates, layers = self._packed(numbers, found)
        elif jax.tree.leaves(grads["layers"]):
            updates, layers, shared = self._of_ranks(grads, state, params, norm)
            found = found._replace(shared=shared)
        outer = self._packed_outer(found.updates, grads["embed_head"])
        return {"embed_head": outer, "layers": updates}, self._state(found, layers)

    def _of_ranks(self, grads: Tree, state: Tree, params: Tree, norm: jax.Array) -> tuple:
        """Return (updates of layers, their state by slot, shared numbers): each rank does its own.

        A rank gathers its layers over fsdp, and keeps its shard of the results.
        """
        stored = {name: slot["layers"] for name, slot in state["slots"].items()}
        given = {"grads": grads["layers"], "state": stored, "params": params["layers"]}
        specs = self.layout.staged_specs({"layers": given})["layers"]
        out_specs = specs["grads"], specs["state"], P()
        slots = self.layout.layer_in_slot

        def of_rank(rank: int, given: Tree, shared: Tree, norm: jax.Array) -> tuple:
            trees = {
                name: {"embed_head": {}, "layers": given[name]} for name in ("grads", "params")
            }
            layers = {name: {"embed_head": {}, "layers": a} for name, a in given["state"].items()}
            numbers = slots[:, rank : rank + 1]
            whole = {"shared": shared, "slots": layers}
            found = self._updated(numbers, trees["grads"], whole, trees["params"], norm)
            return *self._packed(numbers, found), found.shared

        def local(given: Tree, shared: Tree, norm: jax.Array) -> tuple:
            branches = [partial(of_rank, rank) for rank in range(slots.shape[1])]
            whole = gather_shards(given, specs)
            *found, shared = jax.lax.switch(jax.lax.axis_index("pp"), branches, whole, shared, norm)
            return *own_shards(tuple(found), out_specs[:2]), shared

        run = jax.shard_map(
            local,
            mesh=self.layout.mesh,
            in_specs=(specs, P(), P()),
            out_specs=out_specs,
            check_vma=False,
        )
        return run(given, state["shared"], norm)

    # on the author's tree

    def _updated(
        self, numbers: np.ndarray, grads: Tree, state: Tree, params: Tree, norm: jax.Array
    ) -> Update:
        """Return the update of embedding and head in these trees, and of the layers by number.

        The optimizer is given the whole tree, with zeros in the place of other parameters.
        """
        indices = {int(l): index for index, l in np.ndenumerate(numbers) if l >= 0}
        # 1. the author's tree and optax's state
        g, p = self._leaves(grads, indices), self._leaves(params, indices)
        slots = {name: self._slot(name, slot, indices) for name, slot in state["slots"].items()}
        template = jax.eval_shape(self.optimizer.init, self.shapes)
        leaves = [
            state["shared"][place.slot]
            if place.owner is None
            else slots[place.slot].get(place.owner, jnp.zeros(a.shape, a.dtype))
            for place, a in zip(self.places, jax.tree.leaves(template), strict=True)
        ]
        given = jax.tree.unflatten(jax.tree.structure(template), leaves)
        # 2. the update
        zeros = dict(enumerate(jax.tree.leaves(zeros_of(self.shapes), is_leaf=lambda a: a is None)))
        whole = lambda leaves: self._tree(zeros | leaves)  # noqa: E731
        update = optax.with_extra_args_support(self.optimizer).update
        updates, after = update(whole(g), given, whole(p), norm=norm)
        # 3. of the leaves that were given
        of_leaves = jax.tree.leaves(updates, is_leaf=lambda a: a is None)
        found = self._taken_apart(after, g)
        return found._replace(updates={i: of_leaves[i] for i in g})

    def _tree(self, leaves: Leaves) -> Tree:
        number = len(self.network.shapes)
        return jax.tree.unflatten(self.network.treedef, [leaves.get(i) for i in range(number)])

    def _leaves(self, tree: Tree, indices: Mapping[int, tuple]) -> Leaves:
        """Return the leaves of embedding and head, and of layers at their indices in arrays."""
        leaves = self.network.embed_head_leaves(tree["embed_head"])
        for l, index in indices.items():
            layer = jax.tree.map(lambda a, index=index: a[index], tree["layers"])
            leaves |= self.network.leaves_of(l, layer)
        return leaves

    def _slot(self, name: str, slot: Tree, indices: Mapping[int, tuple]) -> Leaves:
        """Return the leaves of a slot, as `_leaves` does."""
        leaves = self.network.embed_head_leaves(slot["embed_head"])
        for l, index in indices.items():
            for dtype, shapes in self._of_layer(name, l).items():
                packed = slot["layers"][self.network.tag][dtype][index]
                leaves |= zip(shapes, unpack_flat([*shapes.values()], packed), strict=True)
        return leaves

    def _taken_apart(self, state: Tree, given: Leaves) -> Update:
        """Return optax's state by slot, of the given parameters."""
        slots: dict[str, Leaves] = {name: {} for name in self.members}
        shared = {}
        for place, leaf in zip(self.places, jax.tree.leaves(state), strict=True):
            if place.owner is None:
                shared[place.slot] = leaf
            elif place.owner in given:
                slots[place.slot][place.owner] = leaf
        return Update({}, slots, shared)

    # as it is stored

    def _of_layer(self, name: str, l: int) -> Members:
        """Return the shapes in a slot of layer l, by dtype."""
        places = self.network.places
        pairs = self.members[name].items()
        return {
            dtype: {i: a for i, a in shapes.items() if places[i] == l} for dtype, shapes in pairs
        }

    def _length(self, name: str, dtype: str) -> int:
        """Return the padded length of a slot's vector of a layer."""
        layers = range(self.network.num_layers)
        sizes = (sum(a.size for a in self._of_layer(name, l)[dtype].values()) for l in layers)
        return -(-max(1, *sizes) // MULTIPLE) * MULTIPLE

    def _packed_state(self, l: int, found: Update) -> Tree:
        """Return the state of layer l by slot, packed."""

        def packed(name: str, dtype: str, shapes: dict[int, Shape]) -> jax.Array:
            to = Shape((self._length(name, dtype),), jnp.dtype(dtype))
            return pack_flat([found.slots[name][i] for i in shapes], to)

        return {
            name: {
                self.network.tag: {
                    dtype: packed(name, dtype, shapes)
                    for dtype, shapes in self._of_layer(name, l).items()
                }
            }
            for name in self.members
        }

    def _packed(self, numbers: np.ndarray, found: Update) -> tuple[Tree, Tree]:
        """Return (updates of layers, their state by slot) of a rank, [V, 1, K, ...]."""
        layers = {
            int(l): (self.network.packed_layer(int(l), found.updates), self._packed_state(l, found))
            for l in numbers.ravel()
            if l >= 0
        }
        padding = jax.tree.map(jnp.zeros_like, next(iter(layers.values())))
        in_order = [layers.get(int(l), padding) for l in numbers.ravel()]
        stack = lambda *a: jnp.stack(a).reshape(*numbers.shape, *a[0].shape)  # noqa: E731
        return jax.tree.map(stack, *in_order)

    def _packed_outer(self, leaves: Leaves, like: Tree) -> Tree:
        """Return leaves of embedding and head as a stack has them, None where missing in `like`."""
        net = self.network
        return {
            name: {net.group(net.names.index(name)): leaves.get(net.names.index(name))}
            for name in like
        }

    def _state(self, found: Update, layers: Mapping[str, Tree]) -> Tree:
        """Return the stored state."""

        def outer(name: str) -> Tree:
            held = {i for shapes in self.members[name].values() for i in shapes}
            names = [self.network.names[i] for i in self.network.outer if i in held]
            return self._packed_outer(found.slots[name], dict.fromkeys(names))

        slots = {n: {"embed_head": outer(n), "layers": layers[n]} for n in self.members}
        return {"shared": found.shared, "slots": slots}
