"""From a tree in staged form on the whole mesh to a tree for each rank on its submesh, and back.

A rank's layers [V, 1, K, ...] are its devices' shards of the staged form, so neither way copies them; nor its part of
a leaf that is divided over the ranks, nor counts, of which every device has its own. Other leaves of embedding and head
go to the ranks that use them by way of all ranks, one at a time: on several processes only programs of the whole mesh
can bring them there. Ranks of other processes have None throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ppctl.executors.auto_axes import without_axes
from ppctl.executors.layout import Layout
from ppctl.executors.mesh import RANK_AXES
from ppctl.executors.mpmd.transfers import from_holder, from_shards, is_mine, local_shards, local_zeros

Tree = Any


class Division:
    """The division of staged trees: parameters, gradients, or a state that mirrors parameters somewhere inside.

    ends: a tree like that of embedding and head (`ends`); holders: for each of its leaves the ranks that hold it.
    """

    def __init__(self, layout: Layout, ends: Tree, holders: Sequence[tuple[int, ...]]):
        mesh, kinds = layout.mesh, (AxisType.Auto,) * len(RANK_AXES)
        self.layout, self.mesh = layout, mesh
        self.submeshes = [Mesh(mesh.devices[:, r], RANK_AXES, axis_types=kinds) for r in range(mesh.shape["pp"])]
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(ends)[0]]
        self.holders = dict(zip(paths, holders, strict=True))

    def _place(self, path: tuple, num_dims: int) -> tuple[str, tuple[int, ...]]:
        """The kind of a leaf (layers | part | ends | other) and which ranks hold it."""
        names = [getattr(key, "key", None) for key in path]
        if "layers" in names:
            return "layers", tuple(range(len(self.submeshes)))
        if "ends" in names:
            shard = self.layout.shard(path, num_dims)
            kind = "part" if shard is not None and "pp" in shard.axes else "ends"
            return kind, self.holders[path[names.index("ends") + 1 :]]
        return "other", tuple(range(len(self.submeshes)))

    def spec(self, path: tuple, shape: tuple[int, ...]) -> P:
        """Return the spec of a leaf, in staged form of this shape, on a rank's submesh."""
        kind, _ = self._place(path, len(shape))
        if kind == "layers":
            return P(None, None, None, *self.layout.over(shape[3:], ("fsdp",), self.layout.shard(path, len(shape) - 3)))
        if kind == "other":
            return P()
        spec = P(*self.layout.over(shape, ("fsdp",), self.layout.shard(path, len(shape))))
        return without_axes(spec, ("pp",)) if kind == "part" else spec

    def shape(self, path: tuple, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a rank's part of a leaf, in staged form of this shape."""
        kind, _ = self._place(path, len(shape))
        if kind == "layers":
            return (shape[0], 1, *shape[2:])
        shard = self.layout.shard(path, len(shape))
        if kind != "part" or shard is None:
            return shape
        return tuple(n // len(self.submeshes) if dim == shard.dim else n for dim, n in enumerate(shape))

    def described(self, tree: Tree, rank: int, above: tuple = ()) -> tuple[Tree, Tree]:
        """Return (shapes, specs) of a rank's part of a staged tree, or None; above: the tree's path."""

        def shape(path: tuple, a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct | None:
            _, holders = self._place(path, a.ndim)
            return jax.ShapeDtypeStruct(self.shape(path, a.shape), a.dtype) if rank in holders else None

        def spec(path: tuple, a: jax.ShapeDtypeStruct) -> P | None:
            return self.spec(path, a.shape) if rank in self._place(path, a.ndim)[1] else None

        shapes, specs = (
            jax.tree_util.tree_map_with_path(lambda path, a, one=one: one((*above, *path), a), tree)
            for one in (shape, spec)
        )
        return shapes, specs

    def split(self, tree: Tree) -> tuple[Tree, ...]:
        """Return the tree of each rank, None where it holds nothing of a leaf. Layers share memory with `tree`."""
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
        by_leaf = [self._split(path, a) for path, a in flat]
        return tuple(jax.tree.unflatten(treedef, leaves) for leaves in zip(*by_leaf, strict=True))

    def _split(self, path: tuple, a: jax.Array) -> list[jax.Array | None]:
        """Return a leaf for each rank."""
        kind, holders = self._place(path, a.ndim)
        spec, shape = self.spec(path, a.shape), self.shape(path, a.shape)
        if kind == "ends":
            a = jax.block_until_ready(jax.device_put(a, NamedSharding(self.mesh, spec)))
        there = local_shards(a)
        return [
            from_shards(shape, NamedSharding(submesh, spec), there) if rank in holders and is_mine(submesh) else None
            for rank, submesh in enumerate(self.submeshes)
        ]

    def join(self, trees: Sequence[Tree], shapes: Tree) -> Tree:
        """The staged tree of these ranks' trees; `shapes` has its shapes and shardings, None for what no rank has.

        Layers share their memory.
        """
        mine = (tree for tree, submesh in zip(trees, self.submeshes, strict=True) if is_mine(submesh))
        leaves = [jax.tree.leaves(tree, is_leaf=lambda a: a is None) for tree in mine]

        def one(i: int, path: tuple, a: jax.ShapeDtypeStruct | None) -> jax.Array | None:
            if a is None:
                return None
            kind, holders = self._place(path, len(a.shape))
            there = {
                device: part for rank in leaves if rank[i] is not None for device, part in local_shards(rank[i]).items()
            }
            if kind != "ends":
                return from_shards(a.shape, a.sharding, there)
            spec = self.spec(path, a.shape)
            part = NamedSharding(self.mesh, spec).shard_shape(a.shape)
            there = local_zeros(self.mesh, part, a.dtype) | there
            return jax.block_until_ready(from_holder(self.mesh, "pp", holders[0], there, spec, a.sharding))

        flat, treedef = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=lambda a: a is None)
        return jax.tree.unflatten(treedef, [one(i, path, a) for i, (path, a) in enumerate(flat)])
