"""A model's PartitionSpecs over tp, as its author gives them: spread and checked."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from ppctl.errors import ConfigError
from ppctl.executors.parameter_layout import is_layer, is_spec, tree_specs

Tree = Any


def checked_specs(params: Tree, sharding: Tree, tp: int, *, is_padded: bool) -> Tree:
    """Return the PartitionSpec of each parameter {"embed_head", "layers"}, of one layer.

    params: shapes, natural; sharding: their specs, in which one, or None, may stand for a whole
    subtree; is_padded: whether sizes that tp does not divide are padded. ConfigError if the trees
    differ, or a spec has another axis, too many dims, or a dim that tp does not divide.
    """
    specs = _spread(sharding, params)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, leaf), spec in zip(leaves, specs, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        shape = leaf.shape[is_layer(path) :]
        _check_spec(name, shape, spec)
        if not is_padded:
            _check_size(name, shape, spec, tp)
    if not any("tp" in spec for spec in specs):
        why = (
            f"sharding divides no parameter over tp: all devices of mesh.tp={tp} would do the same"
        )
        raise ConfigError(f'{why}. Give weights a PartitionSpec with "tp", or use mesh.tp=1.')
    return jax.tree.unflatten(jax.tree.structure(params), specs)


def _check_size(name: str, shape: tuple[int, ...], spec: P, tp: int) -> None:
    """Raise ConfigError if tp does not divide the dim of a spec."""
    size = shape[tuple(spec).index("tp")] if "tp" in spec else 0
    if size % tp == 0:
        return
    fitting = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0 and n <= 2 * tp)
    equation = f"is not a multiple of mesh.tp={tp} ({size} % {tp} = {size % tp})"
    raise ConfigError(
        f"sharding of {name} is {spec}, but its size there, {size} of {shape}, {equation}. "
        f"Use mesh.tp={fitting}, or other sizes."
    )


def _spread(sharding: Tree, params: Tree) -> list[P]:
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


def _check_spec(name: str, shape: tuple[int, ...], spec: Any) -> None:
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
