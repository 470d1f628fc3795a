"""Floating-point operations of a function, counted in its jaxpr.

The compiler's own count is no use here: it counts the body of a scan once, whatever its length.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import jax
from jax.extend import core


def matmul_flops(function: Callable, *args: Any) -> int:
    """FLOPs of all matrix products in function(*args); args may be shapes. Multiply and add count as two.

    >>> a, b = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((2, 3), (3, 5)))
    >>> matmul_flops(lambda a, b: a @ b, a, b)
    60
    """
    return _flops(jax.make_jaxpr(function)(*args).jaxpr)


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
