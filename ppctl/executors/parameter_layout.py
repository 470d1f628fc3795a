"""The layout of parameters: the shards of a rank's arrays, and the staged form of all ranks.

The placement of layers in slots is `layer_placement`. Every device has parameters, gradients,
optimizer state and stash slots of the largest stage. A dim that axes inside a stage (such as tp)
divide is padded with zeros to a multiple of their size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ppctl.executors.layer_placement import Placement
from ppctl.model.fp8_products import gather_rounded
from ppctl.model.parallel import StageAxes
from ppctl.schedule.mesh_axes import DATA_AXES, STAGE_AXES, MeshSizes

Tree = Any
BATCH = P(None, DATA_AXES)  # spec of a batch's arrays [microbatches, examples of each, ...]


def without_axes(specs: Tree, axes: tuple[str, ...]) -> Tree:
    """Return a tree of PartitionSpecs with these axes removed.

    >>> without_axes({"w": P("pp", ("tp", "fsdp"), "tp")}, ("tp",))
    {'w': P('pp', 'fsdp', None)}
    """

    def one(spec: P) -> P:
        dims = ((names,) if isinstance(names, str) else names or () for names in spec)
        kept = (tuple(name for name in names if name not in axes) for names in dims)
        return P(*(names[0] if len(names) == 1 else names or None for names in kept))

    return jax.tree.map(one, specs) if axes else specs


class Shard(NamedTuple):
    """The division of a dim of a parameter (of one layer) by axes inside a stage."""

    dim: int
    num_dims: int
    size: int  # elements of the dim in natural form
    padded: int  # elements with padding, a multiple of num_parts
    axes: tuple[str, ...]  # begins with "pp" for a vocabulary divided over the ranks
    num_parts: int


def parameter_of(path: tuple) -> tuple[str, ...]:
    """Return the path's names from "embed_head" or "layers" on; () for a path without either.

    A parameter and its optimizer state have the same names.
    """
    names = names_of(path)
    first = (i for i, name in enumerate(names) if name in ("embed_head", "layers"))
    return names[next(first, len(names)) :]


def names_of(path: tuple) -> tuple[str, ...]:
    """Return the names on a path, as strings."""
    names = (getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))) for key in path)
    return tuple(map(str, names))


def shards_of(params: Tree, sharding: Tree, axes: StageAxes) -> dict[tuple[str, ...], Shard]:
    """Return the `Shard` of each parameter that axes inside a stage divide, by `parameter_of`.

    params: shapes {"embed_head", "layers"} in natural order. sharding: their PartitionSpecs, of one
    layer. With axes.vocab_parts the ranks divide the sharded leaves of embedding and head, too.
    """
    found = {}
    paths, specs = jax.tree_util.tree_flatten_with_path(params)[0], jax.tree.leaves(sharding)
    for (path, leaf), spec in zip(paths, specs, strict=True):
        over_ranks = axes.vocab_parts > 0 and not is_layer(path)
        names = ("pp",) * over_ranks + sharded_over(spec)
        num_parts = axes.parts(names)
        if sharded_over(spec) and num_parts > 1:
            dim, first = sharded_dim(spec), int(is_layer(path))
            size = leaf.shape[first + dim]
            padded = -(-size // num_parts) * num_parts
            found[parameter_of(path)] = Shard(
                dim, leaf.ndim - first, size, padded, names, num_parts
            )
    return found


def is_layer(path: tuple) -> bool:
    """Return whether a path leads to a leaf of the layers, in parameters or optimizer state."""
    return parameter_of(path)[:1] == ("layers",)


@dataclass(frozen=True)
class RankLayout:
    """The storage of one rank's parameters: divided dims, their padding, PartitionSpecs.

    sizes: of the mesh; "pp" is the number of ranks that store embedding and head together.
    """

    sizes: MeshSizes
    # divided parameters: `shards_of`
    shards: Mapping[tuple[str, ...], Shard] = field(default_factory=dict, hash=False)
    auto: tuple[str, ...] = ()  # axes that XLA partitions the model over, such as tp

    def auto_specs(self, params: Tree) -> Tree:
        """Return the PartitionSpecs of {"embed_head", "layers"} (one layer) for XLA."""

        def spec(path: tuple, leaf: jax.ShapeDtypeStruct) -> P:
            shard = self.shard(path, leaf.shape)
            return P() if shard is None else P(*[None] * shard.dim, shard.axes)

        return jax.tree_util.tree_map_with_path(spec, params)

    def shard(self, path: tuple, shape: tuple[int, ...]) -> Shard | None:
        """Return the `Shard` of a leaf with this shape (of one layer); None if it is not divided.

        Optimizer state of another shape than its parameter, such as row means, is not divided.
        """
        shard = self.shards.get(parameter_of(path))
        if shard is None or shard.num_dims != len(shape):
            return None
        return shard if shape[shard.dim] in (shard.size, shard.padded) else None

    def own_embed_head(self, embed_head: Tree) -> tuple[bool, ...] | None:
        """Return whether ranks divide each leaf of embedding and head; None: no divided leaf."""
        paths = jax.tree_util.tree_flatten_with_path({"embed_head": embed_head})[0]
        shards = [self.shards.get(parameter_of(path)) for path, _ in paths]
        found = tuple(shard is not None and "pp" in shard.axes for shard in shards)
        return found if any(found) else None

    def padded(self, tree: Tree, num_stacked: int) -> Tree:
        """Return a tree with divided dims zero-padded; num_stacked: leading dims of layers."""
        return self._resized(tree, num_stacked, is_padded=True)

    def unpadded(self, tree: Tree, num_stacked: int) -> Tree:
        """Return a tree without the zeros that `padded` adds."""
        return self._resized(tree, num_stacked, is_padded=False)

    def _resized(self, tree: Tree, num_stacked: int, *, is_padded: bool) -> Tree:
        def convert(path: tuple, leaf: jax.Array) -> jax.Array:
            first = num_stacked * is_layer(path)
            shard = self.shard(path, leaf.shape[first:])
            if shard is None or shard.padded == shard.size:
                return leaf
            widths, size = [(0, 0, 0)] * leaf.ndim, shard.padded if is_padded else shard.size
            widths[first + shard.dim] = (0, size - leaf.shape[first + shard.dim], 0)
            return jax.lax.pad(leaf, jnp.zeros((), leaf.dtype), widths)

        return jax.tree_util.tree_map_with_path(convert, tree)

    def over(
        self, shape: tuple[int, ...], axes: tuple[str, ...], shard: Shard | None = None
    ) -> tuple:
        """Return the axis names of each dim: `axes` on the first dim that they divide.

        If they divide no dim, only their last axis is placed. The first dim is best: to gather or
        scatter along a later dim, XLA transposes the array. shard: its axes are added on its dim.
        The dim of a vocabulary divided over the ranks takes no other axis: it is never gathered.
        """
        dim, parts = (-1, 1) if shard is None else (shard.dim, shard.num_parts)
        over_ranks = shard is not None and "pp" in shard.axes
        axes = tuple(axis for axis in axes if not over_ranks or axis != "pp")
        left = [n // parts if d == dim else n for d, n in enumerate(shape)]
        is_free = [d != dim or not over_ranks for d in range(len(shape))]
        names: list[tuple[str, ...]] = [()] * len(shape)
        if shard is not None:
            names[dim] = shard.axes
        for those in (axes, axes[-1:]):
            size = self.sizes.along(those)
            fits = [d for d, n in enumerate(left) if n % size == 0 and is_free[d]]
            if fits and size > 1:
                names[fits[0]] += those
                break
        while names and not names[-1]:
            names.pop()
        return tuple(each or None for each in names)


@dataclass(frozen=True)
class Layout:
    """The natural and staged forms of a stack on a mesh of ranks of equal sizes."""

    mesh: Mesh
    placement: Placement
    of_rank: RankLayout

    def to_staged(self, tree: Tree) -> Tree:
        """Return the staged form of a tree in natural order."""
        return self._converted(self.of_rank.padded(tree, 1), self.placement.staged)

    def to_natural(self, tree: Tree) -> Tree:
        """Return the natural form of a staged tree."""
        return self.of_rank.unpadded(self._converted(tree, self.placement.natural), 1)

    def _converted(self, tree: Tree, of_layers: Callable[[jax.Array], jax.Array]) -> Tree:
        def convert(path: tuple, leaf: jax.Array) -> jax.Array:
            return of_layers(leaf) if is_layer(path) else leaf

        return jax.tree_util.tree_map_with_path(convert, tree)

    def staged_specs(self, tree: Tree) -> Tree:
        """Return a staged tree's PartitionSpecs over pp, fsdp and the axes inside a stage."""

        def spec(path: tuple, leaf: jax.Array) -> P:
            return self.staged_spec(path, leaf.shape)

        return jax.tree_util.tree_map_with_path(spec, tree)

    def staged_spec(
        self, path: tuple, shape: tuple[int, ...], axes: tuple[str, ...] = ("pp", "fsdp")
    ) -> P:
        """Return the spec of a staged leaf; axes: axes that shard embedding and head."""
        rank = self.of_rank
        if is_layer(path):
            of_layer = shape[3:]
            return P(None, "pp", None, *rank.over(of_layer, ("fsdp",), rank.shard(path, of_layer)))
        return P(*rank.over(shape, axes, rank.shard(path, shape)))

    def natural_specs(self, tree: Tree) -> Tree:
        """Return a natural tree's PartitionSpecs; layers are over pp only if pp divides L."""
        rank = self.of_rank

        def spec(path: tuple, leaf: jax.Array) -> P:
            shard = rank.shard(path, leaf.shape[is_layer(path) :])
            if shard is not None and shard.padded > shard.size:
                shard = None
            if is_layer(path):
                over_pp = "pp" if leaf.shape[0] % rank.sizes.pp == 0 else None
                return P(over_pp, *rank.over(leaf.shape[1:], ("fsdp",), shard))
            return P(*rank.over(leaf.shape, ("pp", "fsdp"), shard))

        return jax.tree_util.tree_map_with_path(spec, tree)

    def shardings(self, specs: Tree) -> Tree:
        """Return the NamedSharding of each PartitionSpec on the mesh."""
        return jax.tree.map(partial(NamedSharding, self.mesh), specs)


def with_layers(tree: Tree, layers: np.ndarray) -> Tree:
    """Return a tree in natural order, arrays or shapes, with only these layers."""

    def take(path: tuple, leaf: Any) -> Any:
        if not is_layer(path):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((len(layers), *leaf.shape[1:]), leaf.dtype)
        return leaf[layers]

    return jax.tree_util.tree_map_with_path(take, tree)


def shapes_on_device(params: Tree, shards: Mapping[tuple[str, ...], Shard]) -> Tree:
    """Return the shapes of one device's shards of natural parameters {"embed_head", "layers"}."""

    def convert(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shard = shards.get(parameter_of(path))
        if shard is None:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        shape = list(leaf.shape)
        shape[is_layer(path) + shard.dim] = shard.padded // shard.num_parts
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(convert, params)


def gather_shards(tree: Tree, specs: Tree) -> Tree:
    """Gather leaves over fsdp, or over (pp, fsdp) if both divide a dim; inside shard_map."""

    return jax.tree.map(gather_shard, tree, specs)


def gather_shard(leaf: jax.Array, spec: P, summed_dim: int | None = None) -> jax.Array:
    """Return a leaf gathered as in `gather_shards`; summed_dim: matrices, by `gather_rounded`."""
    dim, axes = _fsdp(spec)
    if dim is None:
        return leaf
    if summed_dim is not None:
        names = spec[leaf.ndim + summed_dim : leaf.ndim + summed_dim + 1]
        return gather_rounded(leaf, axes, dim, summed_dim, sharded_over(names))
    return jax.lax.all_gather(leaf, axes, axis=dim, tiled=True)


def gathered(leaf: jax.Array, spec: P) -> jax.Array:
    """Gather a leaf over all axes of its spec; inside shard_map."""
    for dim, axes in enumerate(spec):
        if axes:
            leaf = jax.lax.all_gather(leaf, axes, axis=dim, tiled=True)
    return leaf


def own_shards(tree: Tree, specs: Tree) -> Tree:
    """Return this device's shards of gathered leaves: undo `gather_shards`, inside shard_map."""

    def shard(leaf: jax.Array, spec: P) -> jax.Array:
        dim, axes = _fsdp(spec)
        if dim is None:
            return leaf
        size = leaf.shape[dim] // jax.lax.axis_size(axes)
        return jax.lax.dynamic_slice_in_dim(leaf, jax.lax.axis_index(axes) * size, size, dim)

    return jax.tree.map(shard, tree, specs)


def layer_specs(staged: Tree, *, are_stacked: bool = False) -> Tree:
    """Return the specs of one layer, or of a chunk's stacked layers, from the staged specs."""
    first = 2 if are_stacked else 3
    return jax.tree.map(lambda spec: P(*spec[first:]), staged)


def scatter_sums(tree: Tree, specs: Tree, replicated: tuple[str, ...]) -> Tree:
    """Sum each leaf over the axes `replicated`; return this device's shard, inside shard_map.

    A leaf is not summed over axes that divide it, such as tp (or pp, for a divided vocabulary): its
    shards are different parameters. It is summed over fsdp, which divides only the storage.
    """

    def reduce(leaf: jax.Array, spec: P) -> jax.Array:
        dim, axes = _fsdp(spec)
        names = tuple(name for name in replicated if name not in sharded_over(spec))
        if dim is not None:
            leaf = jax.lax.psum_scatter(leaf, axes, scatter_dimension=dim, tiled=True)
        return jax.lax.psum(leaf, names)

    return jax.tree.map(reduce, tree, specs)


def sharded_over(spec: P) -> tuple[str, ...]:
    """Return all axes of a spec."""
    each = ((names,) if isinstance(names, str) else names for names in spec if names)
    return tuple(name for names in each for name in names)


def sharded_dim(spec: P) -> int:
    """Return the first dim that a spec divides."""
    return next(dim for dim, names in enumerate(spec) if names)


def _fsdp(spec: P) -> tuple[int | None, tuple[str, ...]]:
    """Return (dim stored over fsdp, axes that store it), or (None, ())."""
    for dim, names in enumerate(spec):
        axes = names if isinstance(names, tuple) else (names,)
        if "fsdp" in axes:
            return dim, tuple(name for name in axes if name not in STAGE_AXES)
    return None, ()
