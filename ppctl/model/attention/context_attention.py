"""Causal attention over sequences whose tokens are divided over devices along cp.

Every device has two pieces of C tokens, an early and a late one (zig-zag order, see
`ppctl.model.parallel`). Its queries attend causally to its two pieces. Each of its two query pieces
attends to a key piece of another device in full or not at all. For each other device, two pairs of
pieces attend in full, so that all devices do equal work. The parts of a softmax are merged by the
logarithms of their sums (Liu, Zaharia and Abbeel 2023; zig-zag order: Zhu 2024).
`StageAxes.context` selects how keys, values and their gradients are sent: see `_with_others`.

Shape suffixes: B batch, T = 2C tokens of a device, N query heads, G kv heads, H width of a head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ppctl.model.parallel import StageAxes


class PairKernel(NamedTuple):
    """Attention of some queries to some keys, mergeable with other parts of the same softmax.

    forward(q [B, T, N, H], k, v [B, S, G, H], causal) -> (output [B, T, N, H], log sums [B, N, T]).
    backward(q, k, v, output, log_sums, g, causal) -> gradients of q, k, v through these keys;
    output, its gradient g and log_sums are those of the whole softmax.
    causal: T = S, and no query attends to a later key.
    """

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def forward(
    kernel: PairKernel, axes: StageAxes, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return (output [B, T, N, H], log sums [B, N, T]) of this device's queries."""
    # 1. this device: each piece attends to itself, and the late piece to the early one
    wide = jnp.promote_types(q.dtype, jnp.float32)
    q_early, q_late = jnp.split(q, 2, axis=1)
    k_early, v_early = k[:, : k.shape[1] // 2], v[:, : v.shape[1] // 2]
    own = kernel.forward(_stacked(q), _stacked(k), _stacked(v), True)
    pairs = zip(*(jnp.split(a, 2) for a in own), strict=True)
    early, late = ((out.astype(wide), sums) for out, sums in pairs)
    late = _merged(late, kernel.forward(q_late, k_early, v_early, False))

    # 2. each other device: two pairs of pieces attend
    def meet(carry: tuple, is_earlier: jax.Array, kv: tuple) -> tuple[tuple, tuple]:
        early, late = carry
        q_both, k_both, v_both = _two_pairs(is_earlier, q_early, q_late, *kv)
        outs, sums = (jnp.split(a, 2) for a in kernel.forward(q_both, k_both, v_both, False))
        late = _merged(late, (outs[0], sums[0]))
        to = _merged(_either(is_earlier, early, late), (outs[1], sums[1]))
        return (_either(is_earlier, to, early), _either(is_earlier, late, to)), ()

    (early, late), _ = _with_others(axes, meet, (early, late), (k, v), ())
    outs, sums = zip(early, late, strict=True)
    return jnp.concatenate(outs, 1).astype(q.dtype), jnp.concatenate(sums, 2)


def backward(
    kernel: PairKernel,
    axes: StageAxes,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    log_sums: jax.Array,
    g: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of this device's q, k and v."""
    # 1. this device: each piece attends to itself, and the late piece to the early one
    wide = jnp.promote_types(q.dtype, jnp.float32)
    of_queries = [jnp.split(a, 2, axis=2 if a is log_sums else 1) for a in (q, out, log_sums, g)]
    early, late = zip(*of_queries, strict=True)

    def pulled(at: tuple, k: jax.Array, v: jax.Array, causal: bool) -> list[jax.Array]:
        q, out, log_sums, g = at
        return [a.astype(wide) for a in kernel.backward(q, k, v, out, log_sums, g, causal)]

    k_early, v_early = k[:, : k.shape[1] // 2], v[:, : v.shape[1] // 2]
    at = tuple(map(jnp.concatenate, of_queries))
    dq, dk, dv = map(_unstacked, pulled(at, _stacked(k), _stacked(v), True))
    dq_early, dq_late = jnp.split(dq, 2, axis=1)
    dq_more, *of_keys = pulled(late, k_early, v_early, False)
    early_piece = (slice(None), slice(k_early.shape[1]))
    dk, dv = (a.at[early_piece].add(b) for a, b in zip((dk, dv), of_keys, strict=True))
    dq_late = dq_late + dq_more

    # 2. each other device: two pairs of pieces attend
    def meet(carry: tuple, is_earlier: jax.Array, kv: tuple) -> tuple[tuple, tuple]:
        dq_early, dq_late = carry
        pairs = zip(early, late, strict=True)
        at = tuple(jnp.concatenate([b, jnp.where(is_earlier, a, b)]) for a, b in pairs)
        _, k_both, v_both = _two_pairs(is_earlier, early[0], late[0], *kv)
        dq, *of_keys = (jnp.split(a, 2) for a in pulled(at, k_both, v_both, False))
        dq_late = dq_late + dq[0] + jnp.where(is_earlier, 0, dq[1])
        dq_early = dq_early + jnp.where(is_earlier, dq[1], 0)
        return (dq_early, dq_late), tuple(_of_pieces(is_earlier, a) for a in of_keys)

    dq, (dk, dv) = _with_others(axes, meet, (dq_early, dq_late), (k, v), (dk, dv))
    return jnp.concatenate(dq, 1).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _with_others(
    axes: StageAxes, meet: Callable[..., Any], carry: tuple, kv: tuple, sums: tuple
) -> tuple[tuple, tuple]:
    """Return (carry, sums) of this device after a call of `meet` for each other device along cp.

    meet(carry, is_earlier, kv of another device) -> (carry, gradients of that device's kv).
    is_earlier: whether the other device is earlier along cp. sums: gradients of this device's kv so
    far; () in a forward. context=gather: keys and values of all devices are gathered first; their
    gradients are summed and scattered last. context=ring: kv and sums hop to the next device
    before each call.
    """
    # 1. one call of `meet`, for context=ring after a hop
    c, is_ring = jax.lax.axis_index("cp"), axes.context == "ring"
    ring = [(i, (i + 1) % axes.cp) for i in range(axes.cp)]
    hop = partial(jax.lax.ppermute, axis_name="cp", perm=ring)
    put = partial(jax.lax.dynamic_update_index_in_dim, axis=0)

    def one(carried: tuple, step: jax.Array) -> tuple[tuple, None]:
        carry, kv, sums = carried
        source = (c - step) % axes.cp
        if is_ring:
            kv, sums = jax.tree.map(hop, (kv, sums))
        carry, added = meet(carry, source < c, kv if is_ring else _at(source, kv))
        add = jnp.add if is_ring else partial(put, index=source)
        return (carry, kv, jax.tree.map(add, sums, added)), None

    # 2. all calls; then the sums return to their devices
    if not is_ring:
        kv = jax.lax.all_gather(kv, "cp")  # [cp, B, T, G, H]
        sums = tuple(put(jnp.zeros((axes.cp, *a.shape), a.dtype), a, c) for a in sums)
    (carry, _, sums), _ = jax.lax.scan(one, (carry, kv, sums), jnp.arange(1, axes.cp))
    home = hop if is_ring else partial(jax.lax.psum_scatter, axis_name="cp")
    return carry, jax.tree.map(home, sums)


def _stacked(a: jax.Array) -> jax.Array:
    """Return both pieces of [B, T, ...] as [2B, C, ...]."""
    return jnp.concatenate(jnp.split(a, 2, axis=1))


def _unstacked(a: jax.Array) -> jax.Array:
    return jnp.concatenate(jnp.split(a, 2), axis=1)


def _either(condition: jax.Array, a: tuple, b: tuple) -> tuple:
    return tuple(jnp.where(condition, x, y) for x, y in zip(a, b, strict=True))


def _merged(
    a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Merge two parts of a softmax into one: (output in a's dtype, log_sums)."""
    (out_a, sums_a), (out_b, sums_b) = a, b
    sums = jnp.logaddexp(sums_a, sums_b)
    share = lambda part: jnp.exp(part - sums).transpose(0, 2, 1)[..., None].astype(out_a.dtype)  # noqa: E731
    return out_a * share(sums_a) + out_b.astype(out_a.dtype) * share(sums_b), sums


def _two_pairs(
    is_earlier: jax.Array, q_early: jax.Array, q_late: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (queries, keys, values), [2B, C, ...], of the two pairs with another device's pieces.

    First pair: the late queries and the early keys. Second pair: the early queries and the early
    keys if the other device is earlier along cp, else the late queries and the late keys.
    """
    queries = jnp.concatenate([q_late, jnp.where(is_earlier, q_early, q_late)])
    (k_early, k_late), (v_early, v_late) = (jnp.split(a, 2, axis=1) for a in (k, v))
    both = lambda early, late: jnp.concatenate([early, jnp.where(is_earlier, early, late)])  # noqa: E731
    return queries, both(k_early, k_late), both(v_early, v_late)


def _of_pieces(is_earlier: jax.Array, halves: list[jax.Array]) -> jax.Array:
    """Return the gradients [B, T, ...] of another device's keys (or values).

    halves: gradients [B, C, ...] of the keys (or values) of each of the `_two_pairs`.
    """
    first, second = halves
    late = jnp.where(is_earlier, 0, second)
    return jnp.concatenate([first + jnp.where(is_earlier, second, 0), late], axis=1)


def _at(source: jax.Array, of_all: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
    """Return the keys and values of device `source`, from those of all devices."""
    take = partial(jax.lax.dynamic_index_in_dim, index=source, keepdims=False)
    return tuple(map(take, of_all))
