"""The states of executor=mpmd: a tree for each rank, on its mesh, and natural order.

Ranks of equal sizes form a group. A group draws its layers, and reads and writes its rows of
natural order, by programs on the devices of its ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from ppctl.executors.model_shapes import Model
from ppctl.executors.mpmd.rank_trees import Division, carried
from ppctl.executors.parameter_layout import Layout, is_layer
from ppctl.executors.rank_meshes import RankGroup, RankMeshes
from ppctl.model.trainable_parameters import trained_part
from ppctl.training.pipeline.engines.train_states import States

Tree = Any
STATE = ("params", "optimizer", "step")  # keys of a rank's state


class GroupModel(NamedTuple):
    """The model on ranks of equal sizes."""

    ranks: tuple[int, ...]
    layout: Layout  # devices, layers and shards of these ranks, which are 0, 1, ... in it
    model: Model  # the model as one of their devices sees it


class RankStates:
    """States as a tuple with one tree per rank; None in place of arrays of other processes' ranks.

    states: the whole model's, whose natural order is that of checkpoints.
    """

    def __init__(self, states: States, groups: Sequence[GroupModel]):
        self.states, self.groups = states, groups
        meshes = tuple(RankGroup(group.layout.mesh, group.ranks) for group in groups)
        self.meshes = RankMeshes(meshes, states.layout.mesh)
        self.trainable = groups[0].model.stack.options.trainable
        self.of_groups = tuple(
            states if group.layout is states.layout else replace(states, layout=group.layout)
            for group in groups
        )
        rank_of = states.layout.placement.rank_of
        self.divisions = tuple(
            Division(
                group.layout,
                group.model.embed_head,
                [group.model.outer.used_by(r == rank_of[0], r == rank_of[-1]) for r in group.ranks],
            )
            for group in groups
        )
        self._to_natural: dict[tuple[Layout, str], Callable[[Tree], Tree]] = {}

    def new(self, seed: int | None) -> Tree:
        """Return the initial state: each group draws its layers."""
        return self._split([of.new(seed) if mine else None for of, mine in self._groups_here])

    def from_natural(self, state: Tree) -> Tree:
        """Return the ranks' state from a state in natural order."""
        if len(self.groups) == 1:
            return self._split([self.states.to_staged(state)])
        found = []
        for of, mine in self._groups_here:

            def rows(path: tuple, to: jax.ShapeDtypeStruct, a: jax.Array, of: States = of) -> Any:
                layers = of.layout.placement.layers.tolist()
                from_whole = tuple((0, l) for l in layers) if is_layer(path) else None
                return carried(self.meshes.storage, [a], to, from_whole)

            tree = jax.tree_util.tree_map_with_path(rows, of.natural, state)
            found.append(jax.block_until_ready(of.to_staged(tree)) if mine else None)
        return self._split(found)

    @property
    def _groups_here(self) -> list[tuple[States, bool]]:
        """The states of each group, and whether this process has a device of it."""
        return [
            (of, any(self.meshes.is_mine[r] for r in group.ranks))
            for of, group in zip(self.of_groups, self.groups, strict=True)
        ]

    def to_natural(self, trees: Sequence[Tree], part: str = "state") -> Tree:
        """Return the natural form of the ranks' trees; part: state | params | gradients."""

        def pick(state: Tree) -> Tree:
            if part == "gradients":
                return trained_part(state["params"], self.trainable)
            return state["params"] if part == "params" else state

        found, groups = [], zip(self.groups, self.divisions, self._groups_here, strict=True)
        for (ranks, layout, _), division, (states, mine) in groups:
            if not mine:
                found.append(division.held(pick(states.natural)))
                continue
            staged = division.join([trees[r] for r in ranks], pick(states.staged))
            if (layout, part) not in self._to_natural:
                out = jax.tree.map(_sharding, pick(states.natural), staged)
                self._to_natural[layout, part] = jax.jit(layout.to_natural, out_shardings=out)
            found.append(self._to_natural[layout, part](staged))
        return found[0] if len(found) == 1 else self._merged(found, pick(self.states.natural))

    def _split(self, staged: Sequence[Tree]) -> Tree:
        """Return the tree of each rank from the groups' staged trees; None: of other processes."""
        of_rank: dict[int, Tree] = {}
        for group, division, tree in zip(self.groups, self.divisions, staged, strict=True):
            if tree is None:
                of_rank |= {
                    r: jax.tree.map(lambda _: None, self.described(r)[0]) for r in group.ranks
                }
            else:
                split = division.split(jax.block_until_ready(tree))
                of_rank |= zip(group.ranks, split, strict=True)
        return tuple(of_rank[r] for r in sorted(of_rank))

    def _merged(self, parts: Sequence[Tree], shapes: Tree) -> Tree:
        """Return the whole tree in natural order from those of several groups."""
        held = [of.layout.placement.layers.tolist() for of in self.of_groups]
        places = {l: (g, row) for g, layers in enumerate(held) for row, l in enumerate(layers)}
        rows = tuple(places[l] for l in sorted(places))

        def merge(path: tuple, to: jax.ShapeDtypeStruct, *leaves: Any) -> jax.Array:
            sources = [leaf for leaf in leaves if leaf is not None]
            return carried(self.meshes.storage, sources, to, rows if is_layer(path) else None)

        return jax.tree_util.tree_map_with_path(merge, shapes, *jax.block_until_ready(parts))

    def described(self, rank: int) -> tuple[Tree, Tree]:
        """Return (shapes, specs) of a rank's {"params", "optimizer", "step"}."""
        g = self.meshes.group_of[rank]
        place, staged = self.groups[g].ranks.index(rank), self.of_groups[g].staged
        return self.divisions[g].described(staged, place)


def _sharding(shape: jax.ShapeDtypeStruct, leaf: jax.Array | None) -> Any:
    """Return the sharding of a natural leaf; None if no rank of the group holds it."""
    return None if leaf is None else shape.sharding
