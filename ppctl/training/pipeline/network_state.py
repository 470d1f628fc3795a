"""The state of an optimizer that runs on the author's tree of a network, and its stored form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import optax

from ppctl.executors.stage.layer_programs import FlatPacking
from ppctl.executors.stage.traced_network import MULTIPLE, TracedNetwork
from ppctl.training.pipeline.update_formulas import Place, places_in

Tree = Any
Shape = jax.ShapeDtypeStruct
Leaves = dict[int, Any]  # number -> parameter, or leaf of optax's state


@dataclass(frozen=True)
class NetworkState:
    """The state of an optimizer of a network: as optax has it for the author's tree, and stored.

    The stored state is {"shared": {slot: number}, "embed_head": {parameter: {group: {slot:
    array}}}, "layers": arrays [..., n], one per dtype: the packed leaves of optax's state of each
    layer}. A slot is the name of a leaf of optax's state without its parameter, such as "0/mu".
    """

    optimizer: optax.GradientTransformation
    network: TracedNetwork = field(compare=False)

    # the author's tree

    @property
    def trained(self) -> list[int]:
        """The numbers of the trained parameters."""
        return [i for i, flag in enumerate(self.network.is_trained) if flag]

    @cached_property
    def shapes(self) -> Tree:
        """The shapes of the author's trained parameters, None for frozen ones."""
        net = self.network
        return self.tree({i: Shape(net.shapes[i], net.dtype) for i in self.trained})

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
        number = len(self.network.shapes)
        return jax.tree.unflatten(self.network.treedef, [leaves.get(i) for i in range(number)])

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
        members: dict[int | None, dict[int, Shape]] = {None: {}}
        members |= {l: {} for l in range(self.network.num_layers)}
        for j, (place, a) in enumerate(zip(self.places, jax.tree.leaves(self.state), strict=True)):
            if place.owner is not None:
                members[self.network.places[place.owner]][j] = a
        return members

    @cached_property
    def _packing(self) -> FlatPacking:
        """The packing of a layer's state, padded to lengths that can be sharded."""
        layers = range(self.network.num_layers)
        longest = FlatPacking([[*self._members[l].values()] for l in layers]).shapes
        lengths = (-(-a.size // MULTIPLE) * MULTIPLE for a in longest)
        shapes = zip(lengths, longest, strict=True)
        return FlatPacking([[Shape((length,), a.dtype) for length, a in shapes]])

    def pack(self, l: int, state: Leaves) -> list[jax.Array]:
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
        return self.network.names[i], self.network.group(i)

    def stored(self, state: Leaves, layers: Tree) -> Tree:
        """Return the stored state, None for missing leaves of embedding and head."""
        embed_head: Tree = {}
        for j in self._members[None]:
            owner, slot = self.places[j].owner, self.places[j].slot
            assert owner is not None, "a leaf of a parameter"
            name, group = self.name(owner)
            embed_head.setdefault(name, {group: {}})[group][slot] = state.get(j)
        return {"shared": self.shared(state), "embed_head": embed_head, "layers": layers}

    def shared(self, state: Leaves) -> dict[str, jax.Array]:
        return {p.slot: state[j] for j, p in enumerate(self.places) if p.owner is None}


def _at(tree: Tree, index: tuple) -> Tree:
    """Return one layer of stacked layers."""
    return jax.tree.map(lambda a: a[index], tree)
