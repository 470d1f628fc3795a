"""Bytes of trees of arrays or shapes, whole and on one device."""

from __future__ import annotations

from math import prod
from typing import Any

import jax

Tree = Any


def tree_bytes(tree: Tree) -> int:
    """Return the bytes of a tree of arrays or shapes, whole."""
    return sum(prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def shard_bytes(tree: Tree) -> int:
    """Return the bytes of a tree of sharded arrays or shapes on one device."""
    each = ((a, a.sharding.shard_shape(a.shape)) for a in jax.tree.leaves(tree))
    return sum(prod(shape) * a.dtype.itemsize for a, shape in each)


def shard_shapes(tree: Tree) -> Tree:
    """Return the shapes of one device's share of a tree of sharded arrays or shapes."""
    one = lambda a: jax.ShapeDtypeStruct(a.sharding.shard_shape(a.shape), a.dtype)  # noqa: E731
    return jax.tree.map(one, tree)
