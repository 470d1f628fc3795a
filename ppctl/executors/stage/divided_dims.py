"""The dim of each value of a program that XLA divides over an axis, found from its arguments.

Shardings are part of a compiled program, not of a trace, and the host must know how values between
two programs lie before it compiles either. So dims are followed through the operations as XLA's
partitioner does, but only through operations that each device can run alone; other results count as
undivided. The dims decide where values lie, never their contents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

from jax.extend import core

from ppctl.executors.stage.jaxpr_tools import CALLS, extents, is_literal, is_scan

Dims = list[int | None]  # the divided dim of each value
REDUCTIONS = (
    *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
    *("argmax", "argmin"),
)


def divided_dims(jaxpr: core.Jaxpr, dims: Sequence[int | None]) -> Dims:
    """Return the divided dim of each output, from those of the inputs; None: undivided.

    >>> import jax, jax.numpy as jnp
    >>> x, up, down = jnp.ones((3, 4)), jnp.ones((4, 8)), jnp.ones((8, 4))
    >>> hidden_and_y = lambda x, up, down: (h := jnp.tanh(x @ up), h @ down)
    >>> divided_dims(jax.make_jaxpr(hidden_and_y)(x, up, down).jaxpr, [None, 1, 0])
    [1, None]
    """
    found = dict(zip(jaxpr.invars, dims, strict=True))
    of = lambda v: None if is_literal(v) else found.get(v)  # noqa: E731
    for eqn in jaxpr.eqns:
        found |= dict(zip(eqn.outvars, _of_equation(eqn, [of(v) for v in eqn.invars]), strict=True))
    return [of(v) for v in jaxpr.outvars]


def _of_equation(eqn: core.JaxprEqn, dims: Dims) -> Dims:
    name = eqn.primitive.name
    if name in CALLS or name == "shard_map":
        return divided_dims(_open(eqn.params[CALLS.get(name, "jaxpr")]), dims)
    if is_scan(eqn):
        return _of_scan(eqn, dims)
    if name == "cond":
        branches = (divided_dims(_open(branch), dims[1:]) for branch in eqn.params["branches"])
        pairs = zip(*branches, strict=True)
        return [next((dim for dim in each if dim is not None), None) for each in pairs]
    rule = RULES.get(name, _in_place)
    return [rule(eqn, dims, v.aval.shape) for v in eqn.outvars]  # pyright: ignore[reportAttributeAccessIssue] of arrays


def _open(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> core.Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def _of_scan(eqn: core.JaxprEqn, dims: Dims) -> Dims:
    """Return the dims of last carries and stacked results; turns must keep a carry's dim."""
    num_consts, num_carry = extents(eqn)
    consts, rest = dims[:num_consts], dims[num_consts:]
    carry, xs = rest[:num_carry], rest[num_carry:]
    each = [None if dim is None or dim == 0 else dim - 1 for dim in xs]
    while True:
        outs = divided_dims(_open(eqn.params["jaxpr"]), [*consts, *carry, *each])
        kept = [a if a == b else None for a, b in zip(carry, outs[:num_carry], strict=True)]
        if kept == carry:
            return [*carry, *(None if dim is None else dim + 1 for dim in outs[num_carry:])]
        carry = kept


def _in_place(eqn: core.JaxprEqn, dims: Dims, shape: tuple[int, ...]) -> int | None:
    """Return the dim if its size stays: element-wise operations, slices, windows."""
    for v, dim in zip(eqn.invars, dims, strict=True):
        given: tuple[int, ...] = v.aval.shape  # pyright: ignore[reportAttributeAccessIssue] of arrays
        if dim is not None and len(given) == len(shape) and given[dim] == shape[dim]:
            return dim
    return None


def _of_product(eqn: core.JaxprEqn, dims: Dims, _: tuple[int, ...]) -> int | None:
    """Return the dim of the output [batch, left, right], without the contracted dims."""
    contracted, batch = eqn.params["dimension_numbers"]
    ndims = [v.aval.ndim for v in eqn.invars]  # pyright: ignore[reportAttributeAccessIssue] of arrays
    shared = zip(ndims, contracted, batch, strict=True)
    free = [[d for d in range(n) if d not in (*gone, *each)] for n, gone, each in shared]
    first = len(batch[0])
    for side, start in ((0, first), (1, first + len(free[0]))):
        dim = dims[side]
        if dim in batch[side]:
            return tuple(batch[side]).index(dim)
        if dim in free[side]:
            return start + free[side].index(dim)
    return None


def _without(dim: int | None, gone: Sequence[int]) -> int | None:
    return None if dim is None or dim in gone else dim - sum(each < dim for each in gone)


def _of_reshape(eqn: core.JaxprEqn, dims: Dims, shape: tuple[int, ...]) -> int | None:
    """Return the dim after a reshape: the first of merged dims, or of the dims made from one."""
    if dims[0] is None:
        return None
    given: tuple[int, ...] = eqn.invars[0].aval.shape  # pyright: ignore[reportAttributeAccessIssue] of arrays
    before = [1, *accumulate(given, mul)][dims[0]]
    sizes = enumerate([1, *accumulate(shape, mul)][:-1])
    return next((d for d, size in sizes if size == before and shape[d] > 1), None)


RULES: dict[str, Callable[[core.JaxprEqn, Dims, tuple[int, ...]], int | None]] = {
    "dot_general": _of_product,
    "transpose": lambda eqn, dims, _: (
        None if dims[0] is None else tuple(eqn.params["permutation"]).index(dims[0])
    ),
    "broadcast_in_dim": lambda eqn, dims, _: (
        None if dims[0] is None else eqn.params["broadcast_dimensions"][dims[0]]
    ),
    "reshape": _of_reshape,
    "squeeze": lambda eqn, dims, _: _without(dims[0], eqn.params["dimensions"]),
    **dict.fromkeys(REDUCTIONS, lambda eqn, dims, _: _without(dims[0], eqn.params["axes"])),
    **dict.fromkeys(("conv_general_dilated", "while", "pallas_call"), lambda *_: None),
}
