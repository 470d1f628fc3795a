"""Two ways to send tokens to the devices of their experts, and the results back.

way      | sends                                                    | rows that a device computes
gather   | every token to every device, sums of results back        | those of its experts
alltoall | a token to the devices of its experts, each result back  | the same, in slots by sender

`spread` makes a row for each token and expert. Its transpose `combine` sums a token's rows. Both
are gathers, by a permutation and by its inverse, and each is the other's gradient. So no gradient
is a scatter-add, whose order of summation is undefined. Choices of an expert beyond the last, those
of padding, get no row.

Shape suffixes: M tokens of this device, N tokens of all devices of the group, n devices of the
group, K experts of a token, L experts of this device, R rows that a device computes, D width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# (rows [R, D], number of rows of each expert [L], weight of each row [R]) -> [R, D]
Compute = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Group:
    """The devices that divide the experts: axes of a mesh, and their number."""

    axes: tuple[str, ...]
    size: int
    num_local: int  # number of experts on a device

    @property
    def first_expert(self) -> jax.Array | int:
        return jax.lax.axis_index(self.axes) * self.num_local if self.axes else 0


def num_rows(num_tokens: int, top_k: int, group: Group, capacity: float | None) -> int:
    """Return the maximum number of rows that a device computes.

    num_tokens: number of tokens of each device of the group. capacity: the bound on rows, as a
    multiple of the even share num_tokens * top_k; None: no bound.

    >>> num_rows(8, 2, Group(("ep",), 4, 1), None), num_rows(8, 2, Group(("ep",), 4, 1), 1.5)
    (32, 24)
    """
    most = group.size * num_tokens * min(top_k, group.num_local)
    return most if capacity is None else min(most, int(_bound(capacity, num_tokens * top_k)))


def _bound(capacity: float, num_choices: Any) -> Any:
    """Return the bound on rows, given the even share of choices: a number or a traced integer.

    Rounded in float32, so that traced and plain numbers agree.
    """
    library = jnp if isinstance(num_choices, jax.Array) else np
    return library.ceil(np.float32(capacity) * library.float32(num_choices)).astype(np.int32)


class Places(NamedTuple):
    """The order of rows by expert: the token of each row, and the row of each token's K choices.

    An unused row may name any token. The row index of a choice without a row is R or more.
    """

    token_R: jax.Array
    row_MK: jax.Array


@jax.custom_vjp
def spread(x_MD: jax.Array, places: Places) -> jax.Array:
    """Return the rows [R, D], each a copy of its token's activation."""
    return x_MD[places.token_R]


@jax.custom_vjp
def combine(y_RD: jax.Array, places: Places) -> jax.Array:
    """Return the sum [M, D] of each token's rows."""
    return _rows_at(y_RD, places.row_MK).sum(1)


def _rows_at(a: jax.Array, index: jax.Array) -> jax.Array:
    return a.at[index].get(mode="fill", fill_value=0)


spread.defvjp(
    lambda x, places: (spread(x, places), places), lambda places, g: (combine(g, places), None)
)
combine.defvjp(
    lambda y, places: (combine(y, places), places), lambda places, g: (spread(g, places), None)
)


@jax.custom_vjp
def permuted(a: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    """Return a[index], zeros for indices past the end. inverse: the inverse of `index`."""
    return _rows_at(a, index)


permuted.defvjp(
    lambda a, index, inverse: (permuted(a, index, inverse), (index, inverse)),
    lambda saved, g: (permuted(g, *saved[::-1]), None, None),
)


def _sorted(keys: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Return (the first num_rows of the indices that sort keys, sorted position of each key)."""
    order = jnp.argsort(keys)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)), unique_indices=True)
    return order[:num_rows], places


def _clipped(sizes: jax.Array, most: int | jax.Array) -> jax.Array:
    """Return the sizes of consecutive groups, cut off after `most` rows in total.

    >>> _clipped(jnp.array([3, 2, 4]), 4).tolist()
    [3, 1, 0]
    """
    ends = jnp.minimum(jnp.cumsum(sizes), most)
    return jnp.diff(ends, prepend=0).astype(jnp.int32)


class Combined(NamedTuple):
    """The output of the experts, and the number of dropped rows."""

    y_MD: jax.Array  # each token's sum over its experts
    num_dropped: jax.Array  # this device's number of rows dropped by the capacity


def by_gather(
    x_MD: jax.Array,
    chosen_MK: jax.Array,
    weights_MK: jax.Array,
    group: Group,
    capacity: float | None,
    compute: Compute,
) -> Combined:
    """Return each token's sum over its experts; every device gathers all tokens of the group."""
    # 1. gather the group's tokens, and sort their choices by expert; other devices' experts last
    (M, K), L = chosen_MK.shape, group.num_local
    x_ND, chosen_NK, weights_NK = x_MD, chosen_MK, weights_MK
    if group.axes:
        gather = lambda a: jax.lax.all_gather(a, group.axes, tiled=True)  # noqa: E731
        x_ND, chosen_NK, weights_NK = map(gather, (x_MD, chosen_MK, weights_MK))
    local = chosen_NK.reshape(-1) - group.first_expert
    local = jnp.where((local >= 0) & (local < L), local, L)
    R = most = num_rows(M, K, group, capacity)
    if capacity is not None:
        num_choices = (chosen_NK < group.size * L).sum()
        most = jnp.minimum(R, _bound(capacity, -(-num_choices // group.size)))
    order_R, row_NK = _sorted(local, R)
    counts_L = jnp.bincount(local, length=L + 1)[:L]
    # 2. compute the rows of this device's experts, and sum the rows of each token
    row_NK = jnp.where((local < L) & (row_NK < most), row_NK, R)
    places = Places(order_R // K, row_NK.reshape(-1, K))
    weights_R = permuted(weights_NK.reshape(-1), order_R, row_NK)
    y_RD = compute(spread(x_ND, places), _clipped(counts_L, most), weights_R)
    y_ND = combine(y_RD, places)
    if group.axes:
        y_ND = jax.lax.psum_scatter(y_ND, group.axes, tiled=True)
    return Combined(y_ND, jnp.maximum(counts_L.sum() - most, 0))


def by_alltoall(
    x_MD: jax.Array,
    chosen_MK: jax.Array,
    weights_MK: jax.Array,
    group: Group,
    capacity: float | None,
    compute: Compute,
) -> Combined:
    """Return each token's sum over its experts; a device sends equally many rows to each."""
    # 1. sort this device's rows by receiver, num_slots for each
    (M, K), n, L = chosen_MK.shape, group.size, group.num_local
    num_slots = most = -(-num_rows(M, K, group, capacity) // n)
    chosen = chosen_MK.reshape(-1)
    order, row = _sorted(chosen, M * K)
    counts_nL = jnp.bincount(chosen, length=n * L + 1)[:-1].reshape(n, L)
    if capacity is not None:
        most = jnp.minimum(num_slots, -(-_bound(capacity, counts_nL.sum()) // n))
    ends_n = jnp.cumsum(counts_nL.sum(1))
    first_n = ends_n - counts_nL.sum(1)
    slots = first_n[:, None] + jnp.arange(num_slots)
    source = order[jnp.minimum(slots, M * K - 1)].reshape(-1)  # token * K + choice, by slot
    device = jnp.minimum(chosen // L, n - 1)
    place = row - first_n[device]
    slot = jnp.where((chosen < n * L) & (place < most), device * num_slots + place, n * num_slots)
    places = Places(source // K, slot.reshape(M, K))

    # 2. send the rows, and sort the arrived rows by expert
    def exchange(a: jax.Array) -> jax.Array:
        parts = a.reshape(n, -1, *a.shape[1:])
        return jax.lax.all_to_all(parts, group.axes, 0, 0).reshape(a.shape)

    sent_nL = jax.vmap(lambda counts: _clipped(counts, most))(counts_nL)
    arrived_nL = exchange(sent_nL)
    ends_nL = jnp.cumsum(arrived_nL, 1)
    local = (jnp.arange(num_slots)[None, :, None] >= ends_nL[:, None]).sum(-1).reshape(-1)
    inside, outside = _sorted(local, n * num_slots)
    of_slots = permuted(weights_MK.reshape(-1), source, slot)
    weights_R = permuted(exchange(of_slots), inside, outside)
    rows_RD = permuted(exchange(spread(x_MD, places)), inside, outside)
    # 3. compute the arrived rows, send the results back, and sum the rows of each token
    y_RD = compute(rows_RD, arrived_nL.sum(0).astype(jnp.int32), weights_R)
    y_MD = combine(exchange(permuted(y_RD, outside, inside)), places)
    return Combined(y_MD, (counts_nL - sent_nL).sum())


WAYS = {"gather": by_gather, "alltoall": by_alltoall}
