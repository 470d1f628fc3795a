"""Causal attention over sequences whose tokens are divided over devices along cp.

Every device has two pieces of C tokens, an early and a late one (zig-zag order, see
`ppctl.model.parallel`). Its queries attend to its own pieces causally, and to other devices' wholly
or not at all: two pairs of pieces a device, so that all devices do equal work. The parts of a
softmax are merged by the logarithms of their sums (Liu, Zaharia and Abbeel 2023; zig-zag order: Zhu
2024).

gather: keys and values of all devices are gathered first, their gradients summed and scattered.
ring: they hop from device to device, one hop a part of the work, with their gradients.

Shape suffixes: B batch, T = 2C tokens of a device, N query heads, G kv heads, H width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ppctl.model.parallel import StageAxes


class PairKernel(NamedTuple):
    """Attention of some queries to some keys, mergeable with other parts of the same softmax.

    forward(q [B, T, N, H], k, v [B, S, G, H], causal) -> (output [B, T, N, H], logarithms of the
    sums [B, N, T]). backward(q, k, v, output, log_sums, g, causal) -> gradients of q, k, v through
    these keys; output, log_sums and g are of the whole softmax. causal: T = S, and no query attends
    to a later key.
    """

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def context_functions(
    kernel: PairKernel, axes: StageAxes
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return forward and backward of a device's attention, as `attention.kernel_of` takes them."""
    return partial(_forward, kernel, axes), partial(_backward, kernel, axes)


def _forward(
    kernel: PairKernel, axes: StageAxes, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # 1. this device's pieces: each with itself, and the late one with the early one
    c = jax.lax.axis_index("cp")
    wide = jnp.promote_types(q.dtype, jnp.float32)
    q_early, q_late = jnp.split(q, 2, axis=1)
    k_early, v_early = k[:, : k.shape[1] // 2], v[:, : v.shape[1] // 2]
    own = kernel.forward(_stacked(q), _stacked(k), _stacked(v), True)
    pairs = zip(*(jnp.split(a, 2) for a in own), strict=True)
    early, late = ((out.astype(wide), sums) for out, sums in pairs)
    late = _merged(late, kernel.forward(q_late, k_early, v_early, False))

    # 2. two pairs of pieces with each other device
    def one(carry: tuple, step: jax.Array) -> tuple[tuple, None]:
        early, late, bringing = carry
        (k, v), bringing = _brought(bringing, step, axes)
        is_earlier = _source(c, step, axes) < c
        q_both, k_both, v_both = _two_pairs(is_earlier, q_early, q_late, k, v)
        outs, sums = (jnp.split(a, 2) for a in kernel.forward(q_both, k_both, v_both, False))
        late = _merged(late, (outs[0], sums[0]))
        to = _merged(_either(is_earlier, early, late), (outs[1], sums[1]))
        return (_either(is_earlier, to, early), _either(is_earlier, late, to), bringing), None

    start = early, late, _start(k, v, axes)
    (early, late, _), _ = jax.lax.scan(one, start, jnp.arange(1, axes.cp))
    outs, sums = zip(early, late, strict=True)
    return jnp.concatenate(outs, 1).astype(q.dtype), jnp.concatenate(sums, 2)


def _backward(
    kernel: PairKernel,
    axes: StageAxes,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    log_sums: jax.Array,
    g: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    # 1. this device's pieces: each with itself, and the late one with the early one
    c = jax.lax.axis_index("cp")
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

    # 2. two pairs of pieces with each other device
    def one(carry: tuple, step: jax.Array) -> tuple[tuple, None]:
        dq_early, dq_late, bringing, sums = carry
        (k, v), bringing = _brought(bringing, step, axes)
        is_earlier = _source(c, step, axes) < c
        pairs = zip(early, late, strict=True)
        at = tuple(jnp.concatenate([b, jnp.where(is_earlier, a, b)]) for a, b in pairs)
        _, k_both, v_both = _two_pairs(is_earlier, early[0], late[0], k, v)
        dq, *of_keys = (jnp.split(a, 2) for a in pulled(at, k_both, v_both, False))
        dq_late = dq_late + dq[0] + jnp.where(is_earlier, 0, dq[1])
        dq_early = dq_early + jnp.where(is_earlier, dq[1], 0)
        added = [_of_pieces(is_earlier, a) for a in of_keys]
        sums = _collected(sums, added, _source(c, step, axes), axes)
        return (dq_early, dq_late, bringing, sums), None

    start = dq_early, dq_late, _start(k, v, axes), _first_sums(dk, dv, c, axes)
    (dq_early, dq_late, _, sums), _ = jax.lax.scan(one, start, jnp.arange(1, axes.cp))
    dk, dv = _home(sums, axes)
    dq = jnp.concatenate([dq_early, dq_late], 1)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


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
    """Return (output, log_sums) of two parts of a softmax merged, the output in a's dtype."""
    (out_a, sums_a), (out_b, sums_b) = a, b
    sums = jnp.logaddexp(sums_a, sums_b)
    share = lambda part: jnp.exp(part - sums).transpose(0, 2, 1)[..., None].astype(out_a.dtype)  # noqa: E731
    return out_a * share(sums_a) + out_b.astype(out_a.dtype) * share(sums_b), sums


def _two_pairs(
    is_earlier: jax.Array, q_early: jax.Array, q_late: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries, keys and values [2B, C, ...] of two pairs of pieces, with another device's.

    First pair: the late queries and the early piece. Second pair: the early queries and the early
    piece if the other device is earlier along cp, else the late queries and the late piece.
    """
    queries = jnp.concatenate([q_late, jnp.where(is_earlier, q_early, q_late)])
    (k_early, k_late), (v_early, v_late) = (jnp.split(a, 2, axis=1) for a in (k, v))
    both = lambda early, late: jnp.concatenate([early, jnp.where(is_earlier, early, late)])  # noqa: E731
    return queries, both(k_early, k_late), both(v_early, v_late)


def _of_pieces(is_earlier: jax.Array, halves: list[jax.Array]) -> jax.Array:
    """Return [B, T, ...] of the gradients of keys (or values) of `_two_pairs`."""
    first, second = halves
    late = jnp.where(is_earlier, 0, second)
    return jnp.concatenate([first + jnp.where(is_earlier, second, 0), late], axis=1)


# keys and values of the other devices, and the sums of their gradients


def _source(c: jax.Array, step: jax.Array, axes: StageAxes) -> jax.Array:
    """Return the device whose keys device c meets in a step."""
    return (c - step) % axes.cp


def _hop(tree: Any, axes: StageAxes) -> Any:
    ring = [(i, (i + 1) % axes.cp) for i in range(axes.cp)]
    return jax.tree.map(lambda a: jax.lax.ppermute(a, "cp", ring), tree)


def _start(k: jax.Array, v: jax.Array, axes: StageAxes) -> tuple[jax.Array, jax.Array]:
    """Return the steps' keys and values: this device's on a ring, else all, [cp, B, T, G, H]."""
    if axes.context == "ring":
        return k, v
    return jax.lax.all_gather(k, "cp"), jax.lax.all_gather(v, "cp")


def _brought(bringing: tuple, step: jax.Array, axes: StageAxes) -> tuple[tuple, tuple]:
    """Return (keys and values of a step's source, those for the next step)."""
    if axes.context == "ring":
        there = _hop(bringing, axes)
        return there, there
    source = _source(jax.lax.axis_index("cp"), step, axes)
    take = partial(jax.lax.dynamic_index_in_dim, index=source, keepdims=False)
    return tuple(map(take, bringing)), bringing


def _first_sums(
    dk: jax.Array, dv: jax.Array, c: jax.Array, axes: StageAxes
) -> tuple[jax.Array, ...]:
    if axes.context == "ring":
        return dk, dv
    sums = (jnp.zeros((axes.cp, *a.shape), a.dtype) for a in (dk, dv))
    put = partial(jax.lax.dynamic_update_index_in_dim, index=c, axis=0)
    return tuple(map(put, sums, (dk, dv)))


def _collected(
    sums: tuple, added: list[jax.Array], source: jax.Array, axes: StageAxes
) -> tuple[jax.Array, ...]:
    """Return the sums with a step's gradients of keys and values; on a ring they hop with them."""
    if axes.context == "ring":
        return tuple(a + b for a, b in zip(_hop(sums, axes), added, strict=True))
    put = partial(jax.lax.dynamic_update_index_in_dim, index=source, axis=0)
    return tuple(map(put, sums, added))


def _home(sums: tuple, axes: StageAxes) -> tuple[jax.Array, ...]:
    """Return the gradients of this device's own keys and values."""
    if axes.context == "ring":
        return _hop(sums, axes)
    return tuple(jax.lax.psum_scatter(a, "cp", scatter_dimension=0) for a in sums)
