"""Rotary positions (Su et al. 2021), with wavelengths stretched for longer sequences.

Shape suffixes: B batch, T tokens, N heads, H width of a head.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppctl.config.groups.rope_settings import Linear, Llama3, Rope, Yarn
from ppctl.model.parallel import WHOLE, StageAxes, own_tokens

Rotate = Callable[..., jax.Array]  # (x [B, T, N, H], rope, axes of the stage) -> rotated x


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Return the frequency of each of the H/2 pairs in radians a token: theta**(-2i/H), or scaled.

    H: the number of a head's dims that turn. Sources: linear, Chen et al. 2023; llama3, Llama Team
    2024 (`apply_scaling` of Meta's model.py); yarn, Peng et al. 2023.
    """
    half = head_dim // 2
    plain = rope.theta ** (-np.arange(half) / half)

    def pair_of(turns: float, length: int) -> float:
        """Return the fractional index of the pair with this number of turns in `length` tokens."""
        wavelength = length / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    match rope.record:
        case None:
            return plain
        case Linear(factor):
            return plain / factor
        case Llama3(factor, length, low, high):
            turns = length * plain / (2 * math.pi)  # full turns of a pair in `length` tokens
            kept = np.clip((turns - low) / (high - low), 0, 1)
        case Yarn(factor, length, fast, slow):
            low = max(math.floor(pair_of(fast, length)), 0)
            high = min(math.ceil(pair_of(slow, length)), head_dim - 1)
            kept = 1 - np.clip((np.arange(half) - low) / (high - low or 0.001), 0, 1)
    return plain / factor * (1 - kept) + plain * kept


def rotate(x_BTNH: jax.Array, rope: Rope, axes: StageAxes = WHOLE) -> jax.Array:
    """Return x with pair (i, i + H/2) at position t turned by t times its frequency."""
    # NumPy arrays, so that a program holds one copy of them for all layers
    tables: Any = _tables(rope, x_BTNH.shape[1] * axes.cp, x_BTNH.shape[-1], x_BTNH.dtype)
    cos, sin = (own_tokens(table, axes, dim=0) for table in tables)
    return _turned(x_BTNH, cos, sin)


def rotate_at(x_BTNH: jax.Array, rope: Rope, first: jax.Array, num_positions: int) -> jax.Array:
    """Return x turned for the positions first, first + 1, ...; first + T <= num_positions."""
    # slice exact tables: angles computed from `first`, which is traced, would have rounding errors
    tables = _tables(rope, num_positions, x_BTNH.shape[-1], x_BTNH.dtype)
    take = partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=x_BTNH.shape[1])
    return _turned(x_BTNH, *map(take, tables))


def _turned(x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Return x with its pairs turned.

    Heads are not sliced into halves, because accelerators would copy the slices to memory. They are
    sliced only if some of their dims do not turn (fraction < 1).
    """
    turned = 2 * cos.shape[-1]
    if turned < x_BTNH.shape[-1]:
        parts = _turned(x_BTNH[..., :turned], cos, sin), x_BTNH[..., turned:]
        return jnp.concatenate(parts, -1)
    halves = x_BTNH.reshape(*x_BTNH.shape[:-1], 2, -1)
    return (halves * cos + jax.lax.rev(halves, (halves.ndim - 2,)) * sin).reshape(x_BTNH.shape)


@lru_cache(8)  # tables are read in several traces of each layer
def _tables(
    rope: Rope, num_tokens: int, head_dim: int, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Return (cosines [T, 1, 1, H/2], signed sines [T, 1, 2, H/2]) as constants, in NumPy."""
    of_pairs, scaling = frequencies(rope, round(rope.fraction * head_dim)), rope.record
    angles = np.arange(num_tokens)[:, None, None, None] * of_pairs
    magnitude = scaling.magnitude if isinstance(scaling, Yarn) else 1.0
    cos, sin = np.cos(angles) * magnitude, np.sin(angles) * magnitude
    return cos.astype(dtype), np.concatenate([-sin, sin], axis=-2).astype(dtype)
