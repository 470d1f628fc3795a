"""Causal attention over sequences whose tokens are divided over devices along cp.

Every device has two pieces of C tokens, an early and a late one (zig-zag order, see `ppctl.model.parallel`). Its
queries attend to its own pieces causally, and to those of others wholly or not at all: of each other device two pairs
of pieces, so that all devices do the same work. The parts of a softmax are merged by the logarithms of their sums (Liu,
Zaharia and Abbeel 2023; zig-zag order: Zhu 2024).

gather: keys and values of all devices are gathered first, and their gradients are summed and scattered.
ring: they go from device to device, one hop a part of the work, and their gradients go with them.

Shape suffixes: B batch, T = 2C tokens of a device, N query heads, G kv heads, H width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ppctl.model.parallel import StageAxes


class PairKernel(NamedTuple):
    """Attention of some queries to some keys, with what merges it with other parts of the same softmax.

    forward(q [B, T, N, H], k, v [B, S, G, H], causal) -> (output [B, T, N, H], logarithms of the sums [B, N, T]).
    backward(q, k, v, output, log_sums, g, causal) -> gradients of q, k, v through these keys; output, log_sums and g
    are those of the whole softmax. causal: T = S, and no query attends to a later key.
    """

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def context_functions(kernel: PairKernel, axes: StageAxes) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return forward and backward of a device's attention, as `attention.kernel_of` takes them."""

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        c = jax.lax.axis_index("cp")
        wide = jnp.promote_types(q.dtype, jnp.float32)
        q_early, q_late = jnp.split(q, 2, axis=1)
        k_early, v_early = k[:, : k.shape[1] // 2], v[:, : v.shape[1] // 2]
        own = kernel.forward(_stacked(q), _stacked(k), _stacked(v), True)
        early, late = ((out.astype(wide), sums) for out, sums in zip(*(jnp.split(a, 2) for a in own), strict=True))
        late = _merged(late, kernel.forward(q_late, k_early, v_early, False))

        def one(carry: tuple, step: jax.Array) -> tuple[tuple, None]:
            early, late, bringing = carry
            (k, v), bringing = _brought(bringing, step, axes)
            is_earlier = _source(c, step, axes) < c
            q_both, k_both, v_both = _two_pairs(is_earlier, q_early, q_late, k, v)
            outs, sums = (jnp.split(a, 2) for a in kernel.forward(q_both, k_both, v_both, False))
            late = _merged(late, (outs[0], sums[0]))
            to = _merged(_either(is_earlier, early, late), (outs[1], sums[1]))
            return (_either(is_earlier, to, early), _either(is_earlier, late, to), bringing), None

        (early, late, _), _ = jax.lax.scan(one, (early, late, _start(k, v, axes)), jnp.arange(1, axes.cp))
        outs, sums = zip(early, late, strict=True)
        return jnp.concatenate(outs, 1).astype(q.dtype), jnp.concatenate(sums, 2)

    def backward(
        q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, log_sums: jax.Array, g: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        c = jax.lax.axis_index("cp")
        wide = jnp.promote_types(q.dtype, jnp.float32)
        of_queries = [jnp.split(a, 2, axis=2 if a is log_sums else 1) for a in (q, out, log_sums, g)]
        early, late = zip(*of_queries, strict=True)

        def pulled(at: tuple, k: jax.Array, v: jax.Array, causal: bool) -> list[jax.Array]:
            q, out, log_sums, g = at
            return [a.astype(wide) for a in kernel.backward(q, k, v, out, log_sums, g, causal)]

        k_early, v_early = k[:, : k.shape[1] // 2], v[:, : v.shape[1] // 2]
        dq, dk, dv = (
            _unstacked(a) for a in pulled(tuple(map(jnp.concatenate, of_queries)), _stacked(k), _stacked(v), True)
        )
        dq_early, dq_late = jnp.split(dq, 2, axis=1)
        dq_more, *of_keys = pulled(late, k_early, v_early, False)
        dk, dv = (_with_early(a, more) for a, more in zip((dk, dv), of_keys, strict=True))
        dq_late = dq_late + dq_more

        def one(carry: tuple, step: jax.Array) -> tuple[tuple, None]:
            dq_early, dq_late, bringing, sums = carry
            (k, v), bringing = _brought(bringing, step, axes)
            is_earlier = _source(c, step, axes) < c
            at = tuple(jnp.concatenate([b, jnp.where(is_earlier, a, b)]) for a, b in zip(early, late, strict=True))
            _, k_both, v_both = _two_pairs(is_earlier, early[0], late[0], k, v)
            dq, *of_keys = (jnp.split(a, 2) for a in pulled(at, k_both, v_both, False))
            dq_late = dq_late + dq[0] + jnp.where(is_earlier, 0, dq[1])
            dq_early = dq_early + jnp.where(is_earlier, dq[1], 0)
            added = [_of_pieces(is_earlier, a) for a in of_keys]
            return (dq_early, dq_late, bringing, _collected(sums, added, _source(c, step, axes), axes)), None

        start = dq_early, dq_late, _start(k, v, axes), _first_sums(dk, dv, c, axes)
        (dq_early, dq_late, _, sums), _ = jax.lax.scan(one, start, jnp.arange(1, axes.cp))
        dk, dv = _home(sums, axes)
        return jnp.concatenate([dq_early, dq_late], 1).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

    return forward, backward


def _stacked(a: jax.Array) -> jax.Array:
    """Return both pieces of [B, T, ...] as [2B, C, ...]."""
    return jnp.concatenate(jnp.split(a, 2, axis=1))


def _unstacked(a: jax.Array) -> jax.Array:
    return jnp.concatenate(jnp.split(a, 2), axis=1)


def _with_early(a: jax.Array, more: jax.Array) -> jax.Array:
    """Return [B, T, ...] with `more` [B, C, ...] added to its early piece."""
    return a.at[:, : more.shape[1]].add(more)


def _either(condition: jax.Array, a: tuple, b: tuple) -> tuple:
    return tuple(jnp.where(condition, x, y) for x, y in zip(a, b, strict=True))


def _merged(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return (output, log_sums) of both parts of a softmax together; the output in the dtype of `a`."""
    (out_a, sums_a), (out_b, sums_b) = a, b
    sums = jnp.logaddexp(sums_a, sums_b)
    share = lambda part: jnp.exp(part - sums).transpose(0, 2, 1)[..., None].astype(out_a.dtype)  # noqa: E731
    return out_a * share(sums_a) + out_b.astype(out_a.dtype) * share(sums_b), sums


def _two_pairs(
    is_earlier: jax.Array, q_early: jax.Array, q_late: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries, keys and values [2B, C, ...] of the two pairs of pieces of this device and another.

    The late queries see the early piece of any. The second pair is the early queries and the early piece of a device
    that comes earlier along cp, or the late queries and the late piece of one that comes later.
    """
    queries = jnp.concatenate([q_late, jnp.where(is_earlier, q_early, q_late)])
    (k_early, k_late), (v_early, v_late) = (jnp.split(a, 2, axis=1) for a in (k, v))
    both = lambda early, late: jnp.concatenate([early, jnp.where(is_earlier, early, late)])  # noqa: E731
    return queries, both(k_early, k_late), both(v_early, v_late)


def _of_pieces(is_earlier: jax.Array, halves: list[jax.Array]) -> jax.Array:
    """Return [B, T, ...] of the gradients of keys (or values) of `_two_pairs`."""
    first, second = halves
    return jnp.concatenate([first + jnp.where(is_earlier, second, 0), jnp.where(is_earlier, 0, second)], axis=1)


# keys and values of the other devices, and the sums of their gradients


def _source(c: jax.Array, step: jax.Array, axes: StageAxes) -> jax.Array:
    """Return the device whose keys device c meets in a step."""
    return (c - step) % axes.cp


def _hop(tree: Any, axes: StageAxes) -> Any:
    ring = [(i, (i + 1) % axes.cp) for i in range(axes.cp)]
    return jax.tree.map(lambda a: jax.lax.ppermute(a, "cp", ring), tree)


def _start(k: jax.Array, v: jax.Array, axes: StageAxes) -> tuple[jax.Array, jax.Array]:
    """Return what the steps take keys and values from: this device's own on a ring, else all, [cp, B, T, G, H]."""
    return (k, v) if axes.context == "ring" else (jax.lax.all_gather(k, "cp"), jax.lax.all_gather(v, "cp"))


def _brought(bringing: tuple, step: jax.Array, axes: StageAxes) -> tuple[tuple, tuple]:
    """Return (keys and values of a step's source, what the next step takes them from)."""
    if axes.context == "ring":
        there = _hop(bringing, axes)
        return there, there
    source = _source(jax.lax.axis_index("cp"), step, axes)
    return tuple(jax.lax.dynamic_index_in_dim(a, source, keepdims=False) for a in bringing), bringing


def _first_sums(dk: jax.Array, dv: jax.Array, c: jax.Array, axes: StageAxes) -> tuple[jax.Array, ...]:
    if axes.context == "ring":
        return dk, dv
    return tuple(
        jax.lax.dynamic_update_index_in_dim(jnp.zeros((axes.cp, *a.shape), a.dtype), a, c, 0) for a in (dk, dv)
    )


def _collected(sums: tuple, added: list[jax.Array], source: jax.Array, axes: StageAxes) -> tuple[jax.Array, ...]:
    """Return the sums with the gradients of a step's keys and values added, which on a ring go with them."""
    if axes.context == "ring":
        return tuple(a + b for a, b in zip(_hop(sums, axes), added, strict=True))
    return tuple(jax.lax.dynamic_update_index_in_dim(a, b, source, 0) for a, b in zip(sums, added, strict=True))


def _home(sums: tuple, axes: StageAxes) -> tuple[jax.Array, ...]:
    """Return the gradients of this device's own keys and values."""
    if axes.context == "ring":
        return _hop(sums, axes)
    return tuple(jax.lax.psum_scatter(a, "cp", scatter_dimension=0) for a in sums)
