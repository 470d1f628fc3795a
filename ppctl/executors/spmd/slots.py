"""Slots and sums that a device carries from tick to tick: reading, writing, adding."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def empty_slots(count: int, tree: Tree) -> Tree:
    return jax.tree.map(lambda a: jnp.zeros((count, *a.shape), a.dtype), tree)


def padded_sum(arrays: Sequence[jax.Array]) -> jax.Array:
    """Return jnp.stack(arrays), as a sum of arrays padded with zeros.

    XLA for GPUs makes one kernel with one result of a concatenation of up to `MOST_PADDED` large
    arrays. The optimizer's update of stacked gradients would then take a pass for each of its
    moments and one for the parameters.
    """
    last = len(arrays) - 1
    widths = ([(k, last - k), *[(0, 0)] * a.ndim] for k, a in enumerate(arrays))
    first, *rest = (jnp.pad(a[None], each) for a, each in zip(arrays, widths, strict=True))
    return sum(rest, start=first)


def read_slot(slots: Tree, slot: Any) -> Tree:
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, slot, keepdims=False), slots)


def write_slot(slots: Tree, slot: jax.Array, value: Tree) -> Tree:
    write = lambda a, v: jax.lax.dynamic_update_index_in_dim(a, v, slot, 0)  # noqa: E731
    return jax.tree.map(write, slots, value)


def write_arrival(
    slots: jax.Array, slot: jax.Array, value: jax.Array, arrives: jax.Array
) -> jax.Array:
    """Return the slots with `value` written where `arrives`."""
    return write_slot(slots, slot, jnp.where(arrives, value, read_slot(slots, slot)))
