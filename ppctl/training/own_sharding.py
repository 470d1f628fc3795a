"""PartitionSpecs over tp of a model's own, as its author gives them: spread over all parameters, and checked."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from ppctl.errors import ConfigError
from ppctl.executors.auto_axes import check_spec, dim_of, spread_specs
from ppctl.executors.layout import is_layer
from ppctl.executors.stage.traced_network import PIECES

Tree = Any


def checked_specs(params: Tree, sharding: Tree, tp: int, *, is_padded: bool) -> Tree:
    """Return the PartitionSpec of each parameter {"ends", "layers"}, of one layer.

    params: shapes, natural; sharding: their specs, in which one, or None, may stand for a whole subtree; is_padded:
    whether sizes that tp does not divide are padded.

    Raises:
        ConfigError: The trees differ, or a spec has another axis, too many dims, or one that tp does not divide.
    """
    specs = spread_specs(sharding, params)
    for (path, leaf), spec in zip(jax.tree_util.tree_flatten_with_path(params)[0], specs, strict=True):
        name, shape = jax.tree_util.keystr(path, simple=True, separator="."), leaf.shape[is_layer(path) :]
        check_spec(name, shape, spec)
        if not is_padded:
            _check_size(name, shape, spec, tp)
    if all(dim_of(spec) is None for spec in specs):
        raise ConfigError(
            f"sharding divides no parameter over tp, so that the devices of mesh.tp={tp} would all do the same work. "
            'Give weights a PartitionSpec with "tp", or use mesh.tp=1.'
        )
    return jax.tree.unflatten(jax.tree.structure(params), specs)


def _check_size(name: str, shape: tuple[int, ...], spec: P, tp: int) -> None:
    """Raise ConfigError where tp does not divide the dim that a spec has it divide."""
    dim = dim_of(spec)
    if dim is None or shape[dim] % tp == 0:
        return
    size = shape[dim]
    fitting = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0 and n <= 2 * tp)
    remedy = f"is not a multiple of mesh.tp={tp} ({size} % {tp} = {size % tp}). Use mesh.tp={fitting}, or other sizes."
    if PIECES in name.split("."):
        raise ConfigError(
            f"{size}, the greatest common divisor of the dims that the Network's sharding divides in layers, {remedy}"
        )
    raise ConfigError(f"sharding of {name} is {spec}, but its size there, {size} of {shape}, {remedy}")
