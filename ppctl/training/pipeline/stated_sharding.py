"""A model's PartitionSpecs over tp, as its author gives them: spread and checked."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from ppctl.errors import ConfigError
from ppctl.executors.auto_axes import check_spec, dim_of, spread_specs
from ppctl.executors.parameter_layout import is_layer
from ppctl.executors.stage.traced_network import PIECES

Tree = Any


def checked_specs(params: Tree, sharding: Tree, tp: int, *, is_padded: bool) -> Tree:
    """Return the PartitionSpec of each parameter {"embed_head", "layers"}, of one layer.

    params: shapes, natural; sharding: their specs, in which one, or None, may stand for a whole
    subtree; is_padded: whether sizes that tp does not divide are padded. ConfigError if the trees
    differ, or a spec has another axis, too many dims, or a dim that tp does not divide.
    """
    specs = spread_specs(sharding, params)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, leaf), spec in zip(leaves, specs, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        shape = leaf.shape[is_layer(path) :]
        check_spec(name, shape, spec)
        if not is_padded:
            _check_size(name, shape, spec, tp)
    if all(dim_of(spec) is None for spec in specs):
        why = (
            f"sharding divides no parameter over tp: all devices of mesh.tp={tp} would do the same"
        )
        raise ConfigError(f'{why}. Give weights a PartitionSpec with "tp", or use mesh.tp=1.')
    return jax.tree.unflatten(jax.tree.structure(params), specs)


def _check_size(name: str, shape: tuple[int, ...], spec: P, tp: int) -> None:
    """Raise ConfigError if tp does not divide the dim of a spec."""
    dim = dim_of(spec)
    if dim is None or shape[dim] % tp == 0:
        return
    size = shape[dim]
    fitting = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0 and n <= 2 * tp)
    equation = f"is not a multiple of mesh.tp={tp} ({size} % {tp} = {size % tp})"
    what = f"sharding of {name} is {spec}, but its size there, {size} of {shape},"
    if PIECES in name.split("."):
        divisor = "the greatest common divisor of the dims that the Network's sharding divides"
        what = f"{size}, {divisor} in layers,"
    raise ConfigError(f"{what} {equation}. Use mesh.tp={fitting}, or other sizes.")
