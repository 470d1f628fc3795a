"""Axes over which XLA divides a function of whole arrays; devices along them hold shards.

A program of one device is traced inside a shard_map over all other axes, the manual ones. It sends
along a manual axis from inside `in_manual`, where the axes of XLA are manual too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from ppctl.errors import ConfigError

Tree = Any


def is_spec(a: Any) -> bool:
    return isinstance(a, P)


def tree_specs(tree: Tree) -> list[P]:
    """Return the PartitionSpecs of a tree."""
    return jax.tree.leaves(tree, is_leaf=is_spec)


def without(spec: P, axes: tuple[str, ...]) -> P:
    """Return a spec without some axes.

    >>> without(P("pp", ("tp", "fsdp"), "tp"), ("tp",))
    P('pp', 'fsdp', None)
    """
    return _chosen(spec, lambda name: name not in axes)


def without_axes(specs: Tree, axes: tuple[str, ...]) -> Tree:
    """Return a tree of specs without some axes."""
    return jax.tree.map(lambda spec: without(spec, axes), specs, is_leaf=is_spec) if axes else specs


def only(spec: P, axes: tuple[str, ...]) -> P:
    """Return a spec with only these axes.

    >>> only(P("pp", ("tp", "fsdp"), "tp"), ("tp",))
    P(None, 'tp', 'tp')
    """
    return _chosen(spec, lambda name: name in axes)


def _chosen(spec: P, is_wanted: Callable[[str], bool]) -> P:
    kept = (tuple(filter(is_wanted, names)) for names in _names(spec))
    return P(*(each[0] if len(each) == 1 else each or None for each in kept))


def _names(spec: P) -> list[tuple[str, ...]]:
    """Return the axes of each dim of a spec."""
    return [(each,) if isinstance(each, str) else each or () for each in spec]


def dim_of(spec: P, axis: str = "tp") -> int | None:
    """Return the dim that a spec divides over an axis, or None."""
    return next((dim for dim, names in enumerate(_names(spec)) if axis in names), None)


def shifted(dim: int | None, by: int) -> int | None:
    """Return a dim after `by` new dims in front."""
    return None if dim is None else dim + by


def with_dims(specs: Tree, value: Tree, dims: Sequence[int | None], axis: str, size: int) -> Tree:
    """Return the spec of each leaf, with `axis` in its dim if its size fits and no axis has it.

    specs: a tree, or one spec for all leaves; specs that have the axis stay.
    """
    flat, treedef = jax.tree.flatten(value)
    found = [specs] * len(flat) if is_spec(specs) else tree_specs(specs)

    def one(spec: P, a: jax.ShapeDtypeStruct, dim: int | None) -> P:
        names = [*spec, *[None] * (len(a.shape) - len(spec))]
        if dim is None or dim_of(spec, axis) is not None:
            return spec
        if names[dim] is not None or a.shape[dim] % size:
            return spec
        return P(*names[:dim], axis, *names[dim + 1 :])

    return jax.tree.unflatten(treedef, map(one, found, flat, dims))


def shards_by(specs: Tree, shapes: Tree, axis: str, size: int) -> Tree:
    """Return the shapes of one device's shards over an axis of `size` devices."""

    def one(spec: P, a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dim = dim_of(spec, axis)
        shape = tuple(n // size if d == dim else n for d, n in enumerate(a.shape))
        return jax.ShapeDtypeStruct(shape, a.dtype)

    return jax.tree.map(one, specs, shapes, is_leaf=is_spec)


def spread_specs(sharding: Tree, params: Tree) -> list[P]:
    """Return the spec of each leaf of `params`; one spec, or None, may stand for a subtree.

    ConfigError where the trees differ.
    """
    is_leaf = lambda a: a is None or is_spec(a)  # noqa: E731
    spread = lambda spec, part: jax.tree.map(lambda _: P() if spec is None else spec, part)  # noqa: E731
    try:
        return tree_specs(jax.tree.map(spread, sharding, params, is_leaf=is_leaf))
    except ValueError as error:
        given, expected = (jax.tree.structure(tree, is_leaf=is_leaf) for tree in (sharding, params))
        raise ConfigError(
            f"sharding is no tree of PartitionSpecs like that of the parameters: it is {given}, "
            f"they are {expected}. Give each parameter a PartitionSpec over tp; one, or None, "
            "may stand for all below it."
        ) from error


def check_spec(name: str, shape: tuple[int, ...], spec: Any) -> None:
    """Raise ConfigError if a parameter of this shape cannot have this spec over tp of any size."""
    if not is_spec(spec):
        raise ConfigError(
            f"sharding of {name} is {spec!r}; it must be a jax.sharding.PartitionSpec, such as "
            "P(None, 'tp')."
        )
    if [each for each in spec if each is not None] not in ([], ["tp"]):
        raise ConfigError(
            f"sharding of {name} is {spec}; it may have tp alone, once: ppctl places the other "
            "axes. Use P(None, 'tp') or the like."
        )
    if len(spec) > len(shape):
        raise ConfigError(
            f"sharding of {name} is {spec}, of {len(spec)} dims, but the parameter has the shape "
            f"{shape}."
        )


def in_manual(
    function: Callable[[Tree, Tree], Tree], tree: Tree, specs: Tree, auto: tuple[str, ...]
) -> Tree:
    """Return function(tree, specs) of each device's shards, `auto` made manual around it.

    The results are sharded over `auto` as `tree` is. Otherwise XLA would make arrays whole over its
    own axes before it gathers or scatters them over others (JAX 0.10.2).
    """
    if not auto:
        return function(tree, specs)
    inner = jax.tree.map(lambda spec: only(spec, auto), specs, is_leaf=is_spec)
    options = {"out_specs": inner, "axis_names": set(auto), "check_vma": False}
    return jax.shard_map(lambda tree: function(tree, specs), in_specs=(inner,), **options)(tree)
