"""Order the loops of a program with the collectives after them, by data, on simulated devices.

XLA for CPUs starts the collectives of a device in the program's order, but a loop or branch that
waits for a thread counts as started. So a later collective may start before those inside the loop,
and devices wait for each other forever (docs/executors-internals.md, "The ticks of spmd"). XLA for
other devices keeps the program's order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ppctl.executors.stage.jaxpr_tools import bind_eqn, called_program, interpret, retraced

Tree = Any
# primitive -> the parameters with programs that it runs
FLOWS = {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}


def ordered(function: Callable[..., Tree], after: Tree, *args: Tree) -> Tree:
    """Return function(*args); its operations wait for `after`, and for each loop before them."""
    leaves, treedef = jax.tree.flatten(args)
    flat = lambda *leaves: function(*jax.tree.unflatten(treedef, leaves))  # noqa: E731
    closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
    outs = interpret(closed, leaves, _Order(jax.tree.leaves(after)).run)
    return jax.tree.unflatten(jax.tree.structure(shapes), outs)


class _Order:
    """Runs equations; each waits for the results of the last loop before it."""

    def __init__(self, results: Sequence[jax.Array] = ()):
        self.wait_for(results)

    def wait_for(self, results: Sequence[jax.Array]) -> None:
        """Let all later equations wait for the smallest of these arrays."""
        self.never: jax.Array | None = None  # False, which only a reader of the array knows
        self.waiting: dict[int, tuple[Any, Any]] = {}  # id of a value -> (value, waiting value)
        floats = [a for a in results if jnp.issubdtype(a.dtype, jnp.floating)]
        if floats:
            least = min(floats, key=lambda a: a.size)
            self.never = jnp.any(jnp.isnan(least) & jnp.isinf(least))

    def run(self, eqn: core.JaxprEqn, values: list[Any]) -> list[Any]:
        """Return the results of an equation."""
        if (called := called_program(eqn)) is not None:
            return interpret(called, values, self.run)
        flows = FLOWS.get(eqn.primitive.name, ())
        programs = {name: _with_order(eqn.params[name]) for name in flows}
        outs = bind_eqn(eqn, [*map(self._waiting, values)], **programs)
        if flows:
            self.wait_for(outs)
        self.waiting |= {id(out): (out, out) for out in outs}
        return outs

    def _waiting(self, value: Any) -> Any:
        is_array = isinstance(value, jax.Array) and not jnp.issubdtype(
            value.dtype, jax.dtypes.extended
        )
        if self.never is None or not is_array:
            return value
        if id(value) not in self.waiting:
            waits = jax.lax.select(
                jnp.broadcast_to(self.never, value.shape), jnp.zeros_like(value), value
            )
            self.waiting[id(value)] = value, waits
        return self.waiting[id(value)][1]


def _with_order(program: Any) -> Any:
    """Return a loop's body, or branches, with their loops ordered."""
    if isinstance(program, core.ClosedJaxpr):
        return retraced(program, _Order().run)
    return tuple(map(_with_order, program))
