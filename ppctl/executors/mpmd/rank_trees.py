"""Split a staged tree of a group of ranks into a tree for each rank on its mesh, and join them.

Neither direction copies layers, parts of a divided vocabulary, or leaves such as step counts: the
shards of the staged form are on their rank's devices. Undivided leaves of embedding and head are
sent to all ranks, one leaf at a time: with several processes only programs of the group's mesh
can move them. Leaves of ranks on other processes are None.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ppctl.executors.device_mesh import is_mine
from ppctl.executors.mpmd.transfers import (
    each_its_own,
    from_holder,
    from_shards,
    local_shards,
    local_zeros,
)
from ppctl.executors.parameter_layout import Layout, is_layer, parameter_of, without_axes
from ppctl.executors.rank_meshes import RankMeshes

Tree = Any


class Division:
    """The division of a group's staged trees by rank.

    layout: of the group, whose index r along pp is the r-th rank of the group. used: whether each
    of these ranks holds each leaf of embed_head.
    """

    def __init__(self, layout: Layout, embed_head: Tree, used: Sequence[tuple[bool, ...]]):
        self.layout, self.mesh = layout, layout.mesh
        self.submeshes = RankMeshes.of(layout.mesh).by_rank
        flat = jax.tree_util.tree_leaves_with_path({"embed_head": embed_head})
        self.holders = {
            parameter_of(path): tuple(r for r, uses in enumerate(used) if uses[i])
            for i, (path, _) in enumerate(flat)
        }

    def _place(self, path: tuple, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """Return (kind of a leaf: layers | part | embed_head | other, the ranks that hold it)."""
        names, every = parameter_of(path), tuple(range(len(self.submeshes)))
        if is_layer(path):
            return "layers", every
        above = (self.holders.get(names[:n]) for n in range(len(names), 0, -1))
        holders = next((ranks for ranks in above if ranks is not None), None)
        if holders is None:
            return "other", every
        shard = self.layout.of_rank.shard(path, shape)
        return "part" if shard is not None and "pp" in shard.axes else "embed_head", holders

    def spec(self, path: tuple, shape: tuple[int, ...]) -> P:
        """Return the spec of a staged leaf of this shape on a rank's submesh."""
        if self._place(path, shape)[0] == "other":
            return P()
        return without_axes(self.layout.staged_spec(path, shape, ("fsdp",)), ("pp",))

    def shape(self, path: tuple, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a rank's part of a staged leaf of this shape."""
        kind, _ = self._place(path, shape)
        if kind == "layers":
            return (shape[0], 1, *shape[2:])
        shard = self.layout.of_rank.shard(path, shape)
        if kind != "part" or shard is None:
            return shape
        parts = len(self.submeshes)
        return tuple(n // parts if dim == shard.dim else n for dim, n in enumerate(shape))

    def described(self, tree: Tree, rank: int) -> tuple[Tree, Tree]:
        """Return (shapes, specs) of a rank's part of a staged tree, None for leaves not held."""
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
        shapes, specs = [], []
        for path, a in flat:
            is_held = rank in self._place(path, a.shape)[1]
            part = jax.ShapeDtypeStruct(self.shape(path, a.shape), a.dtype)
            shapes.append(part if is_held else None)
            specs.append(self.spec(path, a.shape) if is_held else None)
        return jax.tree.unflatten(treedef, shapes), jax.tree.unflatten(treedef, specs)

    def held(self, shapes: Tree) -> Tree:
        """Return the shapes of a natural tree, None for leaves that no rank of the group holds."""

        def one(path: tuple, a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct | None:
            return a if self._place(path, a.shape)[1] else None

        return jax.tree_util.tree_map_with_path(one, shapes)

    def split(self, tree: Tree) -> tuple[Tree, ...]:
        """Return the tree of each rank, None for leaves not held; layers are not copied."""
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
        by_leaf = [self._split(path, a) for path, a in flat]
        return tuple(jax.tree.unflatten(treedef, leaves) for leaves in zip(*by_leaf, strict=True))

    def _split(self, path: tuple, a: jax.Array) -> list[jax.Array | None]:
        """Return a leaf on each rank, None on ranks that do not hold it."""
        kind, holders = self._place(path, a.shape)
        spec, shape = self.spec(path, a.shape), self.shape(path, a.shape)
        if not holders:
            return [None] * len(self.submeshes)
        if kind == "embed_head":
            a = jax.block_until_ready(jax.device_put(a, NamedSharding(self.mesh, spec)))
        there = local_shards(a)
        found = []
        for rank, submesh in enumerate(self.submeshes):
            is_held, sharding = rank in holders and is_mine(submesh), NamedSharding(submesh, spec)
            found.append(from_shards(shape, sharding, there) if is_held else None)
        return found

    def join(self, trees: Sequence[Tree], shapes: Tree) -> Tree:
        """Return the staged tree of these shapes from the ranks' trees; layers are not copied.

        None for leaves that no rank of the group holds."""
        pairs, is_leaf = zip(trees, self.submeshes, strict=True), lambda a: a is None
        leaves = [jax.tree.leaves(tree, is_leaf) for tree, submesh in pairs if is_mine(submesh)]

        def one(i: int, path: tuple, a: jax.ShapeDtypeStruct | None) -> jax.Array | None:
            if a is None:
                return None
            kind, holders = self._place(path, a.shape)
            if not holders:
                return None
            # 1. the shards of this process
            there: dict[Any, jax.Array] = {}
            for rank in leaves:
                there |= {} if rank[i] is None else local_shards(rank[i])
            if kind != "embed_head":
                return from_shards(a.shape, a.sharding, there)
            # 2. an undivided leaf of embedding or head, spread from a rank that holds it
            spec = self.spec(path, a.shape)
            part = NamedSharding(self.mesh, spec).shard_shape(a.shape)
            there = local_zeros(self.mesh, part, a.dtype) | there
            leaf = from_holder(self.mesh, "pp", holders[0], there, spec, a.sharding)
            return jax.block_until_ready(leaf)

        flat, treedef = jax.tree_util.tree_flatten_with_path(shapes, is_leaf)
        return jax.tree.unflatten(treedef, [one(i, path, a) for i, (path, a) in enumerate(flat)])


# arrays of groups of ranks, and of all devices


class Held(NamedTuple):
    """The shape, dtype and sharding of an array on some of the devices."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of a device's part."""
        return self.sharding.shard_shape(self.shape)

    def places(self, mesh: Mesh) -> tuple[np.ndarray, np.ndarray]:
        """Return the start of each device's part [devices, dims], and whether it is the first copy.

        mesh: all devices, in their order.
        """
        numbers = {device: i for i, device in enumerate(mesh.devices.flat)}
        starts = np.zeros((mesh.size, len(self.shape)), np.int32)
        is_first, seen = np.zeros(mesh.size, bool), set[tuple[int, ...]]()
        for device, index in self.sharding.devices_indices_map(self.shape).items():
            start = tuple(each.start or 0 for each in index)
            starts[numbers[device]], is_first[numbers[device]] = start, start not in seen
            seen.add(start)
        return starts, is_first


def held(a: Any) -> Held:
    """Return the traits of an array, or of its sharded shape."""
    return Held(a.shape, a.dtype, a.sharding)


def carried(
    mesh: Mesh, sources: Sequence[Any], to: Any, rows: tuple[tuple[int, int], ...] | None
) -> Any:
    """Return an array of the shape and sharding `to`, by a program of all devices (`mesh`).

    sources: arrays on some of the devices; of other processes' devices, their sharded shapes, as is
    the result. rows: the (source, its row) of each row of the result; None: the whole first source.
    A device holds a whole row at a time, besides its parts.
    """
    given = []
    for a in sources:
        here = local_shards(a) if isinstance(a, jax.Array) else {}
        given.append(each_its_own(mesh, local_zeros(mesh, held(a).part, a.dtype) | here))
    move = _carry(mesh, tuple(map(held, sources)), held(to), rows)
    found = local_shards(jax.block_until_ready(move(*given)))
    is_here = bool(to.sharding.addressable_devices)
    return from_shards(to.shape, to.sharding, found) if is_here else to


@cache
def _carry(
    mesh: Mesh, sources: tuple[Held, ...], to: Held, rows: tuple[tuple[int, int], ...] | None
) -> Callable[..., jax.Array]:
    # an array without rows has one: itself
    is_whole, names = rows is None, mesh.axis_names
    origin = np.array(rows or [(0, 0)] * is_whole, np.int32).reshape(-1, 2)
    lead = ((0, 0), (is_whole, 0))
    there = np.pad(to.places(mesh)[0], lead)
    places = [each.places(mesh) for each in sources]
    of_sources = [(np.pad(starts, lead), is_first) for starts, is_first in places]
    (_, *of_row), (number, *part) = ((1,) * is_whole + shape for shape in (to.shape, to.part))

    def row(i: jax.Array, parts: Sequence[jax.Array]) -> jax.Array:
        me, (source, at) = jax.lax.axis_index(names), jnp.asarray(origin)[i]
        total = jnp.zeros(of_row, to.dtype)
        for s, (a, (starts, is_first)) in enumerate(zip(parts, of_sources, strict=True)):
            if not len(a):
                continue
            start, *place = jnp.asarray(starts)[me]
            is_here = jnp.asarray(is_first)[me] & (source == s) & (at >= start)
            is_here &= at < start + len(a)
            piece = a[jnp.clip(at - start, 0, len(a) - 1)]
            piece = jnp.where(is_here, piece, jnp.zeros_like(piece))
            total += jax.lax.dynamic_update_slice(jnp.zeros_like(total), piece, place)
        return jax.lax.psum(total, names)

    def run(*local: jax.Array) -> jax.Array:
        parts = [a[None] if is_whole else a for a in local]
        start, *place = jnp.asarray(there)[jax.lax.axis_index(names)]

        def body(i: jax.Array, found: jax.Array) -> jax.Array:
            cut = jax.lax.dynamic_slice(row(i, parts), place, part)
            is_here, at = (i >= start) & (i < start + number), jnp.clip(i - start, 0, number - 1)
            return found.at[at].set(jnp.where(is_here, cut, found[at]))

        blank = jnp.zeros((number, *part), to.dtype)
        found = jax.lax.fori_loop(0, len(origin), body, blank) if number else blank
        return found[0] if is_whole else found

    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
