"""A device of a divided stage alone: what the others along tp and cp would send stands in, and nothing is sent.

What arrives has the size and the dtype that it has on a mesh, and is made of the device's own values: a gather writes
as much, a sum that is scattered adds as much. Links take no time; who uses this counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ppctl.errors import ConfigError
from ppctl.executors.stage.jaxprs import CALLS, bind_eqn, env_value
from ppctl.model.parallel import StageAxes

BODIES = {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}  # with jaxprs of their own


def alone(function: Callable[..., Any], axes: StageAxes) -> Callable[..., Any]:
    """Return a function like that of one device of a divided stage, which needs no other device.

    ConfigError, in tracing, where it sends what has no stand-in.
    """
    if axes.num_devices * axes.vocab_ranks == 1:
        return function

    def run(*args: Any) -> Any:
        closed, out = jax.make_jaxpr(function, axis_env=list(axes.sizes), return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(out), _run(closed, jax.tree.leaves(args)))

    return run


def _run(closed: core.ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    jaxpr = closed.jaxpr
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        values, name = [env_value(env, v) for v in eqn.invars], eqn.primitive.name
        if name in STAND_INS:
            outs = [STAND_INS[name](value, eqn.params) for value in values or [None]]
        elif name in CALLS:
            called = eqn.params[CALLS[name]]
            outs = _run(called if isinstance(called, core.ClosedJaxpr) else core.ClosedJaxpr(called, ()), values)
        elif name in BODIES:
            outs = bind_eqn(eqn, values, **{key: _without_sends(eqn.params[key]) for key in BODIES[name]})
        elif "axis_name" in eqn.params:
            raise ConfigError(
                f"`ppctl rehearse` runs one device, and nothing stands in for what others send by {name}. Use "
                "`ppctl plan`, or a model that sends by all_gather, psum_scatter, psum, pmax and ppermute."
            )
        else:
            outs = bind_eqn(eqn, values)
        env |= dict(zip(eqn.outvars, outs, strict=True))
    return [env_value(env, v) for v in jaxpr.outvars]


def _without_sends(body: Any) -> Any:
    """Return the jaxpr of a loop, or those of branches, with stand-ins."""
    if isinstance(body, tuple):
        return tuple(map(_without_sends, body))
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in body.in_avals]
    return jax.make_jaxpr(lambda *args: _run(body, args))(*shapes)


# what stands in; behind a barrier, so that no compiler sees through it to what was sent


def _gathered(value: jax.Array, params: dict[str, Any]) -> jax.Array:
    """Return own values, and in place of each other device's the same in another order."""
    dim, value = params["all_gather_dimension"], jax.lax.optimization_barrier(value)
    if not params["tiled"]:
        value = jnp.expand_dims(value, dim)
    turned = jax.lax.rev(value, (value.ndim - 1,))  # of all parts alike a compiler would make a view
    parts = [turned if i % 2 else value for i in range(params["axis_size"])]
    return jax.lax.optimization_barrier(jnp.concatenate(parts, dim))


def _sum_scattered(value: jax.Array, params: dict[str, Any]) -> jax.Array:
    """Return the sum of the parts that the devices would get."""
    dim, value = params["scatter_dimension"], jax.lax.optimization_barrier(value)
    parts = jnp.split(value, params["axis_size"], dim)
    total = sum(parts[1:], parts[0])
    return jax.lax.optimization_barrier(total if params["tiled"] else jnp.squeeze(total, dim))


def _own(value: jax.Array, params: dict[str, Any]) -> jax.Array:
    del params
    return jax.lax.optimization_barrier(value)


def _first(value: None, params: dict[str, Any]) -> jax.Array:
    """Return the number of the first device."""
    del value, params
    return jax.lax.optimization_barrier(jax.lax.full((), 0, jnp.int32))


STAND_INS: dict[str, Callable[[Any, dict[str, Any]], jax.Array]] = {
    "all_gather": _gathered,
    "reduce_scatter": _sum_scattered,
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "pmax", "ppermute"), _own),
    "axis_index": _first,
}
