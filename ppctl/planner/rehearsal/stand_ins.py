"""One device of a divided stage, with stand-ins for all that it receives inside it.

Stand-ins have the size and dtype of the received values, and are made of the device's values: a
gather writes as much, a sum that is scattered adds as much. Links take no time; callers count them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ppctl.errors import ConfigError
from ppctl.executors.stage.jaxpr_tools import bind_eqn, called_program, interpret, retraced
from ppctl.model.parallel import StageAxes

# the parameters of primitives that hold jaxprs
BODIES = {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}


def alone(function: Callable[..., Any], axes: StageAxes) -> Callable[..., Any]:
    """Return a function like that of one device of a divided stage, without other devices.

    ConfigError, in tracing, for sends without a stand-in.
    """
    if axes.num_devices == 1 and not axes.vocab_parts:
        return function

    def run(*args: Any) -> Any:
        closed, out = jax.make_jaxpr(function, axis_env=list(axes.sizes), return_shape=True)(*args)
        leaves = interpret(closed, jax.tree.leaves(args), _run_alone)
        return jax.tree.unflatten(jax.tree.structure(out), leaves)

    return run


def _run_alone(eqn: core.JaxprEqn, values: list[Any]) -> list[Any]:
    """Return the results of an equation, with stand-ins for received values."""
    name, called = eqn.primitive.name, called_program(eqn)
    if name in STAND_INS:
        return [STAND_INS[name](value, eqn.params) for value in values or [None]]
    if called is not None:
        return interpret(called, values, _run_alone)
    if name in BODIES:
        bodies = {key: _without_sends(eqn.params[key]) for key in BODIES[name]}
        return bind_eqn(eqn, values, **bodies)
    if "axis_name" in eqn.params:
        raise ConfigError(
            "`ppctl rehearse` runs one device, and nothing stands in for what others send by "
            f"{name}. Use `ppctl plan`, or a model that sends by all_gather, psum_scatter, "
            "psum, pmax and ppermute."
        )
    return bind_eqn(eqn, values)


def _without_sends(body: Any) -> Any:
    """Return the jaxpr of a loop, or those of branches, with stand-ins."""
    if isinstance(body, tuple):
        return tuple(map(_without_sends, body))
    return retraced(body, _run_alone)


# stand-ins, after a barrier that hides the sent values from compilers


def _gathered(value: jax.Array, params: dict[str, Any]) -> jax.Array:
    """Return the device's values, and in place of each other device's the same in another order."""
    dim, value = params["all_gather_dimension"], jax.lax.optimization_barrier(value)
    if not params["tiled"]:
        value = jnp.expand_dims(value, dim)
    turned = jax.lax.rev(value, (value.ndim - 1,))  # equal parts would be compiled to a view
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
