"""Low-rank adapters next to the linear maps of a block: x W + alpha/rank * (x A) B.

Only A and B are trained. A begins uniform in +-1/sqrt(inputs), as in PEFT, and B at zero, so that
new adapters do not change the model. Embedding and head have no adapters. Source: LoRA (Hu et al.
2021).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.config.groups.transformer_sizes import TARGETS, LinearMap
from ppctl.errors import ConfigError

Tree = Any
A, B = "lora_a", "lora_b"  # last names of the parameters in their paths
ADAPTERS_KEY = 0x10A  # number folded into a layer's key, so that adapters do not change other draws


@dataclass(frozen=True)
class Lora:
    """Adapters of a transformer's blocks.

    Attributes:
        rank: Width between A and B.
        alpha: The adapter's part is multiplied by alpha/rank.
        targets: The adapted linear maps, from q, k, v, o, gate, up, down; None: all of a block.
        dropout: Rate of dropped entries of an adapter's input in training, 0 <= rate < 1.

    Raises:
        ConfigError: An attribute is invalid.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        unknown = [name for name in self.targets or () if name not in TARGETS]
        if unknown:
            raise ConfigError(
                f"{unknown[0]} in lora_targets is not a linear map of a block. Choose from "
                f"{', '.join(TARGETS)}."
            )
        if not (isinstance(self.rank, Integral) and self.rank >= 1):
            raise ConfigError(f"rank={self.rank} of adapters is not a whole number above 0.")
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"alpha={self.alpha} of adapters is not a finite number above 0.")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout} of adapters is invalid. Use 0 <= rate < 1.")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def adapted(self, maps: Iterable[LinearMap]) -> dict[str, LinearMap]:
        """Return the maps with an adapter, by target. ConfigError if a target is missing."""
        found = {each.target: each for each in maps if each.target is not None}
        for name in self.targets or ():
            if name not in found:
                lack = f"MLP has no {name} matrix, as its activation is not gated"
                if "up" not in found:
                    lack = "layers have experts in place of an MLP, and experts take no adapters"
                raise ConfigError(f"{name} in lora_targets: the model's {lack}. Leave it out.")
        return {name: found[name] for name in self.targets or found}


def adapted_part(
    params: Mapping[str, jax.Array], x_MD: jax.Array, scale: float, columns: Callable
) -> jax.Array:
    """Return the adapter's part of a linear map's output. columns: see `LinearMaps`.

    With remat=none, forwards keep the results of products without a batch dim. This result is as
    large as the linear map's and cheap to recompute from x @ A. The product with B therefore gets a
    batch dim of 1, so that it is not kept.
    """
    low, b = x_MD @ params[A] * scale, columns(params[B])
    return jax.lax.dot_general(low[None], b[None], (((2,), (1,)), ((0,), (0,))))[0]


def with_adapters(layer: Tree, lora: Lora, maps: Iterable[LinearMap], key: jax.Array) -> Tree:
    """Return a layer's parameters with initial adapters added to its target linear maps."""
    key, layer = jax.random.fold_in(key, ADAPTERS_KEY), dict(layer)
    for target, each in lora.adapted(maps).items():
        part, name = each.path.split("/")
        linear, key_of = layer[part][name], jax.random.fold_in(key, TARGETS.index(target))
        dtype, bound = linear["kernel"].dtype, 1 / math.sqrt(each.num_in)
        a = jax.random.uniform(key_of, (each.num_in, lora.rank), dtype, -bound, bound)
        linear = linear | {A: a, B: jnp.zeros((lora.rank, each.num_out), dtype)}
        layer[part] = layer[part] | {name: linear}
    return layer


def are_adapters(layer: Tree) -> Tree:
    """Return a flag for each parameter of a layer: whether it belongs to an adapter."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in (A, B), layer)


# parameters of a model, by their names


def adapted_modules(
    params: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, parameters) of each linear map with an adapter."""
    if A in params:
        yield path, params
    for name, part in params.items():
        if isinstance(part, Mapping):
            yield from adapted_modules(part, (*path, name))


def without_adapters(params: Tree) -> Tree:
    """Return a model's parameters without adapters."""
    if not isinstance(params, Mapping):
        return params
    return {name: without_adapters(part) for name, part in params.items() if name not in (A, B)}


def with_base(params: Tree, base: Tree) -> Tree:
    """Return the adapters of `params`, with all other parameters from `base`."""
    if not isinstance(params, Mapping):
        return base
    pick = lambda name, part: with_base(part, base[name]) if name in base else part  # noqa: E731
    return {name: pick(name, part) for name, part in params.items()}


def merged(params: Tree, scale: float) -> Tree:
    """Return the parameters with adapters merged: W + scale * A B, rounded once."""
    if not isinstance(params, Mapping):
        return params
    found = {name: merged(part, scale) for name, part in params.items() if name not in (A, B)}
    if A in params:
        product = jnp.matmul(params[A], params[B], precision=jax.lax.Precision.HIGHEST)
        found["kernel"] = found["kernel"] + scale * product
    return found
