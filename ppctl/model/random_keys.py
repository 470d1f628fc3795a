"""Random keys of examples, layers and tokens, and dropout drawn with them.

A key is a function of seed, step, example of the global batch, layer and position of a token, never
of the layout: a recomputed forward draws the same again. Keys are Threefry's, whatever JAX's
default is. Source: dropout, Srivastava et al. 2014.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppctl.errors import ConfigError
from ppctl.model.parallel import folded_keys, token_keys

Tree = Any
KIND, SIZE = "threefry2x32", 2  # of keys, and the uint32 of one
SEED, KEYS = "seed_key", "keys"  # in a batch: the key of a seed, those of examples in a step
DRAWS = 0x9E3779B9  # keeps keys of a step from those of initial parameters


@lru_cache(1024)
def names_key(function: Callable) -> bool:
    """Return whether a function has a parameter `key`."""
    return "key" in signature(function).parameters


@lru_cache(1024)  # programs are kept by the identity of functions
def without_key(layer: Callable) -> Callable:
    """Return a layer as it is in evaluations: with None for its key, if it names one."""
    return (lambda w, x: layer(w, x, key=None)) if names_key(layer) else layer


def key_of_seed(seed: int) -> np.ndarray:
    """Return the key of a seed as data, uint32 [2].

    >>> key_of_seed(2**32 + 5).tolist()
    [1, 5]
    """
    return np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


def wrapped(data: Any) -> jax.Array:
    """Return keys from their data, uint32 [..., 2]."""
    return jax.random.wrap_key_data(data, impl=KIND)


def example_keys(seed_key: jax.Array, step: jax.Array, first: Any, number: int) -> jax.Array:
    """Return the keys, as data [number, 2], of a step's examples from `first` of the batch on."""
    of_step = jax.random.fold_in(jax.random.fold_in(wrapped(seed_key), DRAWS), step)
    return jax.random.key_data(folded_keys(of_step, first + jnp.arange(number)))


def with_example_keys(batch: Mapping[str, Any], step: jax.Array) -> dict[str, Any]:
    """Return a global batch with the keys of its examples in place of the key of the seed."""
    rest = {name: part for name, part in batch.items() if name != SEED}
    if SEED not in batch:
        return rest
    number = len(jax.tree.leaves(batch["inputs"])[0])
    return rest | {KEYS: example_keys(batch[SEED], step, 0, number)}


def layer_keys(keys: jax.Array, layers: jax.Array) -> jax.Array:
    """Return [..., examples, 2], the keys of layers by number [...], from those of examples."""
    return jax.random.key_data(folded_keys(wrapped(keys), layers[..., None]))


def dropout(key: jax.Array | None, x: jax.Array, rate: float, *, draw: int = 0) -> jax.Array:
    """Return x with each entry 0 with probability `rate`, and divided by 1 - rate otherwise.

    key: of a layer, a key for each example [examples], or for each token [examples, tokens] from
    `ppctl.parallel.token_keys`, where devices divide a sequence; None, as in evaluations: x. draw:
    the number of a draw among those of a layer. ConfigError for a rate outside of 0 <= rate < 1.
    """
    if not 0 <= rate < 1:
        raise ConfigError(f"dropout has rate={rate}, and rates are 0 <= rate < 1.")
    if key is None or rate == 0:
        return x
    if key.ndim == 1 and x.ndim > 2:
        key = token_keys(key, x.shape[1])
    return dropped(x, kept_entries(key, x.shape[key.ndim :], rate, draw), rate)


def kept_entries(keys: jax.Array, shape: tuple[int, ...], rate: float, draw: int) -> jax.Array:
    """Return whether entries are kept, bool [*keys.shape, *shape]; draw: its number of a layer."""
    flat = folded_keys(keys, draw).reshape(-1)
    bits = jax.vmap(lambda key: jax.random.bits(key, shape, jnp.uint32))(flat)
    return bits.reshape(*keys.shape, *shape) >= jnp.uint32(round(rate * 2**32))


def dropped(x: jax.Array, is_kept: jax.Array, rate: float) -> jax.Array:
    """Return x / (1 - rate) where it is kept, else 0."""
    return jnp.where(is_kept, x / (1 - rate), 0)
