"""Floating-point operations of a function, counted in its jaxpr.

The compiler's own count is no use here: it counts the body of a scan once, whatever its length.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import jax
from jax.extend import core

from ppctl.model.stack import Stack, init

Tree = Any


def matmul_flops(function: Callable, *args: Any) -> int:
    """FLOPs of all matrix products in function(*args); args may be shapes. Multiply and add count as two.

    >>> a, b = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((2, 3), (3, 5)))
    >>> matmul_flops(lambda a, b: a @ b, a, b)
    60
    """
    return _flops(jax.make_jaxpr(function)(*args).jaxpr)


def end_costs(stack: Stack, batch: Tree, *, recompute: bool) -> dict[str, float]:
    """What "embed" and "head" cost, in layers: FLOPs of matrix products, forward and backward; nothing is compiled.

    recompute: a layer's forward counts twice, since its backward runs it again. Looking up an embedding counts nothing.
    """
    params = jax.eval_shape(lambda: init(stack, 0))
    ends, layer = params["ends"], jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), params["layers"])
    x = jax.eval_shape(stack.embed, ends, batch["inputs"])

    def there_and_back(function: Callable, *args: Any) -> Tree:
        y, pull = jax.vjp(function, *args)
        return pull(y)

    def embed(ends: Tree, inputs: Any) -> Tree:  # the data need no gradient
        return there_and_back(lambda ends: stack.embed(ends, inputs), ends)

    def head(ends: Tree, x: Any, targets: Any) -> Tree:
        return there_and_back(lambda ends, x: stack.head(ends, x, targets)[0], ends, x)

    one = matmul_flops(partial(there_and_back, stack.layer), layer, x)
    one += matmul_flops(stack.layer, layer, x) if recompute else 0
    return {
        "embed": matmul_flops(embed, ends, batch["inputs"]) / one,
        "head": matmul_flops(head, ends, x, batch["targets"]) / one,
    }


def _flops(jaxpr: core.Jaxpr) -> int:
    total = 0
    for equation in jaxpr.eqns:
        inner = [_flops(sub) for value in equation.params.values() for sub in _jaxprs(value)]
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left: Any = equation.invars[0].aval
            out: Any = equation.outvars[0].aval
            total += 2 * prod(left.shape[dim] for dim in contracted) * prod(out.shape)
        elif equation.primitive.name == "cond":
            total += max(inner, default=0)
        else:
            total += equation.params.get("length", 1) * sum(inner)
    return total


def _jaxprs(value: Any) -> list[core.Jaxpr]:
    values = value if isinstance(value, tuple | list) else (value,)
    closed = (v.jaxpr if isinstance(v, core.ClosedJaxpr) else v for v in values)
    return [v for v in closed if isinstance(v, core.Jaxpr)]
