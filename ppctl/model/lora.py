"""Low-rank adapters next to the linear maps of a block: x W + alpha/rank * (x A) B.

Only A and B are trained. A begins as PEFT's, uniform in +-1/sqrt(inputs), B at zero, so that a
model begins as it is without adapters. Embedding and head have none. Source: LoRA (Hu et al. 2021).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.errors import ConfigError

Tree = Any
A, B = "lora_a", "lora_b"  # last names of the parameters
PROJECTIONS = {  # target: modules of a block
    "q": ("attention", "query"),
    "k": ("attention", "key"),
    "v": ("attention", "value"),
    "o": ("attention", "out"),
    "gate": ("mlp", "gate"),
    "up": ("mlp", "up"),
    "down": ("mlp", "down"),
}
ADAPTERS_KEY = 0x10A  # keeps other draws as without adapters


@dataclass(frozen=True)
class Lora:
    """Adapters of a transformer's blocks.

    rank: numbers between A and B. alpha: the adapters' part is multiplied by alpha/rank. targets:
    the adapted linear maps, of q, k, v, o, gate, up, down; None: all of the blocks. dropout: rate
    of dropped entries of an adapter's input, in training. ConfigError for another name or rate.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        unknown = [name for name in self.targets or () if name not in PROJECTIONS]
        if unknown:
            raise ConfigError(
                f"{unknown[0]} in lora_targets is no linear map of a block. They are "
                f"{', '.join(PROJECTIONS)}."
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout} of adapters is no rate: 0 <= rate < 1.")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def check_present(self, layer: Tree) -> None:
        """Raise ConfigError if this layer lacks a target."""
        for name in self.targets or ():
            first, second = PROJECTIONS[name]
            if second not in layer.get(first, {}):
                lack = f"MLP has no {second} matrix, as its activation is not gated"
                if first not in layer:
                    lack = "layers have experts, which take no adapters, in place of an MLP"
                raise ConfigError(f"{name} in lora_targets: the model's {lack}. Leave it out.")

    def adapts(self, module: str) -> bool:
        """Return whether the linear map of this name in a block has an adapter."""
        return self.targets is None or any(PROJECTIONS[name][1] == module for name in self.targets)


def adapted_part(
    params: Mapping[str, jax.Array], x_MD: jax.Array, scale: float, columns: Callable
) -> jax.Array:
    """Return the adapter's part of a linear map; columns: from B to its requested columns.

    Forwards keep results of products without a batch dim (remat=none). This result is as large as
    the linear map's and cheap to remake from x @ A, so it gets a batch dim.
    """
    low, b = x_MD @ params[A] * scale, columns(params[B])
    return jax.lax.dot_general(low[None], b[None], (((2,), (1,)), ((0,), (0,))))[0]


def with_adapters(layer: Tree, lora: Lora, key: jax.Array) -> Tree:
    """Return the parameters of a layer with initial adapters."""
    lora.check_present(layer)
    key, layer = jax.random.fold_in(key, ADAPTERS_KEY), dict(layer)
    for number, (first, second) in enumerate(PROJECTIONS.values()):
        if second not in layer.get(first, {}) or not lora.adapts(second):
            continue
        linear, key_of = layer[first][second], jax.random.fold_in(key, number)
        num_in, num_out = linear["kernel"].shape
        dtype, bound = linear["kernel"].dtype, 1 / math.sqrt(num_in)
        a = jax.random.uniform(key_of, (num_in, lora.rank), dtype, -bound, bound)
        linear = linear | {A: a, B: jnp.zeros((lora.rank, num_out), dtype)}
        layer[first] = layer[first] | {second: linear}
    return layer


def are_adapters(layer: Tree) -> Tree:
    """Return for each parameter of a layer whether it is an adapter's."""
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
    """Return a model's parameters with those of `base`, the same model without adapters."""
    if not isinstance(params, Mapping):
        return base
    pick = lambda name, part: with_base(part, base[name]) if name in base else part  # noqa: E731
    return {name: pick(name, part) for name, part in params.items()}


def merged(params: Tree, scale: float) -> Tree:
    """Return the parameters without adapters: each W + scale * A B, rounded once."""
    if not isinstance(params, Mapping):
        return params
    found = {name: merged(part, scale) for name, part in params.items() if name not in (A, B)}
    if A in params:
        product = jnp.matmul(params[A], params[B], precision=jax.lax.Precision.HIGHEST)
        found["kernel"] = found["kernel"] + scale * product
    return found
