"""Rotary positions (Su et al. 2021), with wavelengths stretched for longer sequences.

Shape suffixes: B batch, T tokens, N heads, H width of a head.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppctl.model.parallel import WHOLE, StageAxes, own_tokens


@dataclass(frozen=True)
class Rope:
    """Rotary positions: pair i of the H/2 pairs of a head turns by theta**(-2i/H) radians a token.

    scaling selects the pairs that turn slower by `factor`: none | linear | llama3 | yarn.
    linear: all pairs (Chen et al. 2023).
    llama3: pairs with a wavelength above original_len/low_freq_factor. Pairs with a wavelength
    below original_len/high_freq_factor are unchanged, and those between are mixed (Llama Team 2024;
    `apply_scaling` of Meta's model.py).
    yarn: pairs with fewer than beta_slow turns in original_len. Pairs with more than beta_fast
    turns are unchanged, and a ramp over i mixes those between. Queries and keys are multiplied by
    attention_factor; None: 1 + log(factor)/10 (Peng et al. 2023).
    fraction: share of a head's dims that turn, 0..1. The first dims turn, and H above is their
    number; the other dims are unchanged.
    """

    theta: float = 10000.0
    scaling: str = "none"
    factor: float = 1.0
    original_len: int = 1
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    beta_fast: float = 0.0
    beta_slow: float = 0.0
    attention_factor: float | None = None
    fraction: float = 1.0

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Return the frequency of each pair in radians a token, [H/2]."""
        half = head_dim // 2
        plain = self.theta ** (-np.arange(half) / half)
        if self.scaling == "none":
            return plain
        if self.scaling == "linear":
            return plain / self.factor
        turns = self.original_len * plain / (2 * math.pi)  # full turns of a pair in original_len
        if self.scaling == "llama3":
            low, high = self.low_freq_factor, self.high_freq_factor
            kept = np.clip((turns - low) / (high - low), 0, 1)
        else:
            low = max(math.floor(self._pair_of(self.beta_fast, head_dim)), 0)
            high = min(math.ceil(self._pair_of(self.beta_slow, head_dim)), head_dim - 1)
            kept = 1 - np.clip((np.arange(half) - low) / (high - low or 0.001), 0, 1)
        return plain / self.factor * (1 - kept) + plain * kept

    def _pair_of(self, turns: float, head_dim: int) -> float:
        """Return the fractional index i of the pair with `turns` turns in original_len tokens."""
        wavelength = self.original_len / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(self.theta))

    @property
    def magnitude(self) -> float:
        """Return the factor that multiplies queries and keys: 1 unless scaling=yarn."""
        if self.scaling != "yarn":
            return 1.0
        factor = self.attention_factor
        return 1 + 0.1 * math.log(self.factor) if factor is None else factor


Rotate = Callable[..., jax.Array]  # (x [B, T, N, H], rope, axes of the stage) -> rotated x


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
    frequencies = rope.frequencies(round(rope.fraction * head_dim))
    angles = np.arange(num_tokens)[:, None, None, None] * frequencies
    cos, sin = np.cos(angles) * rope.magnitude, np.sin(angles) * rope.magnitude
    return cos.astype(dtype), np.concatenate([-sin, sin], axis=-2).astype(dtype)
