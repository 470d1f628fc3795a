"""Random keys of examples, layers and tokens, and dropout drawn with them.

A key depends on the seed, the step, the example's index in the global batch, the layer and the
token's position, never on the layout. So every layout, and a recomputed forward, draws the same
numbers. Keys are always Threefry's, not JAX's default. Source: dropout, Srivastava et al. 2014.
"""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from inspect import signature
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppctl.errors import ConfigError
from ppctl.model.parallel import folded_keys, token_keys

Tree = Any
Draw = Callable[..., jax.Array]  # (initializer, *shape) -> array
KIND, SIZE = "threefry2x32", 2  # implementation of keys, and number of uint32 a key
SEED, KEYS = "seed_key", "keys"  # entries of a batch: the seed's key, or the keys of its examples
DRAWS = 0x9E3779B9  # number that makes keys of steps differ from those of initial parameters


@lru_cache(1024)
def names_key(function: Callable) -> bool:
    """Return whether a function has a parameter `key`."""
    return "key" in signature(function).parameters


@lru_cache(1024)  # same function object each time, as compiled programs are cached by it
def without_key(function: Callable) -> Callable:
    """Return a layer, embedding or head as in evaluations, with key=None if it takes a key."""
    return (lambda *args: function(*args, key=None)) if names_key(function) else function


def key_of_seed(seed: int) -> np.ndarray:
    """Return the key of a seed as data, uint32 [2].

    >>> key_of_seed(2**32 + 5).tolist()
    [1, 5]
    """
    return np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


def wrapped(data: Any) -> jax.Array:
    """Return keys from their data, uint32 [..., 2]."""
    return jax.random.wrap_key_data(data, impl=KIND)


def drawing(key: jax.Array, dtype: jnp.dtype) -> Draw:
    """Return a function that draws parameters, each with a new key folded from `key`."""
    keys = (jax.random.fold_in(key, number) for number in count())
    return lambda initializer, *shape: initializer(next(keys), shape, dtype)


def example_keys(seed_key: jax.Array, step: jax.Array, numbers: jax.Array) -> jax.Array:
    """Return the key data [..., 2] of a batch's examples with these numbers, [...], in a step."""
    of_step = jax.random.fold_in(jax.random.fold_in(wrapped(seed_key), DRAWS), step)
    return jax.random.key_data(folded_keys(of_step, numbers))


def with_example_keys(
    batch: Mapping[str, Any], step: jax.Array, num_dims: int = 1
) -> dict[str, Any]:
    """Return a global batch with its seed key, if any, replaced by the keys of its examples.

    num_dims: the dims of examples in its arrays: 2 for arrays [microbatches, examples, ...].
    """
    rest = {name: part for name, part in batch.items() if name != SEED}
    if SEED not in batch:
        return rest
    shape = jax.tree.leaves(batch["inputs"])[0].shape[:num_dims]
    numbers = jnp.arange(math.prod(shape)).reshape(shape)
    return rest | {KEYS: example_keys(batch[SEED], step, numbers)}


def layer_keys(keys: jax.Array, layers: jax.Array) -> jax.Array:
    """Return the key data [..., examples, 2] of layers; layers: their indices in the model, [...].

    keys: key data of the examples, [examples, 2].
    """
    return jax.random.key_data(folded_keys(wrapped(keys), layers[..., None]))


def dropout(key: jax.Array | None, x: jax.Array, rate: float, *, draw: int = 0) -> jax.Array:
    """Return x with each entry set to 0 with probability `rate`, else divided by 1 - rate.

    Args:
        key: A layer's key for each example, [examples]. If devices divide a sequence: a key for
            each token, [examples, tokens], from `ppctl.parallel.token_keys`. None, as in
            evaluations: x is returned unchanged.
        x: An activation, [examples, ...].
        rate: Probability of a 0.
        draw: Index of this draw in the layer; draws with the same index drop the same entries.

    Raises:
        ConfigError: The rate is outside of 0 <= rate < 1, or draw of 0 <= draw < 2**32.

    References:
        Srivastava et al. 2014.
    """
    if not 0 <= rate < 1:
        raise ConfigError(f"dropout has rate={rate}. Use 0 <= rate < 1.")
    if not 0 <= draw < 2**32:
        raise ConfigError(f"dropout has draw={draw}. Use 0 <= draw < 2**32.")
    if key is None or rate == 0:
        return x
    if key.ndim == 1 and x.ndim > 2:
        key = token_keys(key, x.shape[1])
    return dropped(x, kept_entries(key, x.shape[key.ndim :], rate, draw), rate)


def kept_entries(keys: jax.Array, shape: tuple[int, ...], rate: float, draw: int) -> jax.Array:
    """Return the mask of kept entries, bool [*keys.shape, *shape]; draw: as in `dropout`."""
    flat = folded_keys(keys, draw).reshape(-1)
    bits = jax.vmap(lambda key: jax.random.bits(key, shape, jnp.uint32))(flat)
    return bits.reshape(*keys.shape, *shape) >= jnp.uint32(round(rate * 2**32))


def dropped(x: jax.Array, is_kept: jax.Array, rate: float) -> jax.Array:
    """Return x / (1 - rate) where `is_kept`, else 0."""
    return jnp.where(is_kept, x / (1 - rate), 0)
