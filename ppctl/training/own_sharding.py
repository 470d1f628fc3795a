"""PartitionSpecs over tp of a model's own, as its author gives them: spread over all parameters, and checked."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from ppctl.errors import ConfigError
from ppctl.executors.auto_axes import is_spec
from ppctl.executors.layout import is_layer

Tree = Any


def checked_specs(params: Tree, sharding: Tree, tp: int, *, is_padded: bool) -> Tree:
    """Return the PartitionSpec of each parameter {"ends", "layers"}, of one layer.

    params: shapes, natural; sharding: their specs, in which one spec, or None, may stand for a whole subtree; is_padded:
    whether sizes that tp does not divide are padded.

    Raises:
        ConfigError: The trees differ, or a spec has another axis, too many dims, or one that tp does not divide.
    """
    is_leaf = lambda a: a is None or is_spec(a)  # noqa: E731
    try:
        specs = jax.tree.map(
            lambda spec, part: jax.tree.map(lambda _: P() if spec is None else spec, part),
            sharding,
            params,
            is_leaf=is_leaf,
        )
    except ValueError as error:
        given, expected = (jax.tree.structure(tree, is_leaf=is_leaf) for tree in (sharding, params))
        raise ConfigError(
            f"sharding is no tree of PartitionSpecs like that of the parameters: it is {given}, they are {expected}. "
            "Give each parameter a PartitionSpec over tp; one, or None, may stand for all below it."
        ) from error
    flat = jax.tree.leaves(specs, is_leaf=is_spec)
    for (path, leaf), spec in zip(jax.tree_util.tree_flatten_with_path(params)[0], flat, strict=True):
        _check(path, leaf.shape[is_layer(path) :], spec, tp, is_padded)
    if not any("tp" in spec for spec in flat):
        raise ConfigError(
            f"sharding divides no parameter over tp, so that the devices of mesh.tp={tp} would all do the same work. "
            'Give weights a PartitionSpec with "tp", or use mesh.tp=1.'
        )
    return specs


def _check(path: tuple, shape: tuple[int, ...], spec: Any, tp: int, is_padded: bool) -> None:
    """Raise ConfigError where a parameter of this shape cannot have this spec."""
    name = f"sharding of {jax.tree_util.keystr(path, simple=True, separator='.')}"
    if not is_spec(spec):
        raise ConfigError(f"{name} is {spec!r}; it must be a jax.sharding.PartitionSpec, such as P(None, 'tp').")
    names = [name for name in spec if name is not None]
    if names and names != ["tp"]:
        raise ConfigError(
            f"{name} is {spec}; it may have tp alone, once: ppctl places the other axes. Use P(None, 'tp') or the like."
        )
    if len(spec) > len(shape):
        raise ConfigError(f"{name} is {spec}, of {len(spec)} dims, but the parameter has the shape {shape}.")
    size = shape[tuple(spec).index("tp")] if names else 0
    if size % tp and not is_padded:
        fitting = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0 and n <= 2 * tp)
        raise ConfigError(
            f"{name} is {spec}, but its size there, {size} of {shape}, is not a multiple of mesh.tp={tp} "
            f"({size} % {tp} = {size % tp}). Use mesh.tp={fitting}, or another size."
        )
