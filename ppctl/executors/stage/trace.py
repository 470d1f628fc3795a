"""A function of a batch as a sequence of operations that can be run from any one to any other.

Operations are the equations that depend on the inputs. Others are not in the sequence, and run wherever their results
are needed: what depends on parameters and constants alone, and what only reshapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
from jax.extend import core

from ppctl.errors import ConfigError
from ppctl.executors.stage.flops import equation_flops, inner_jaxprs
from ppctl.executors.stage.jaxprs import CALLS, bind_eqn, env_value, is_literal
from ppctl.model.network import MARK

Tree = Any
Shape = jax.ShapeDtypeStruct
JITS = ("jit", "pjit")
RESHAPING = ("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims")


class Trace:
    """outputs = function(leaves, inputs), traced for these shapes, as `num_ops` operations."""

    def __init__(self, function: Callable[[list, Any], Tree], leaves: Sequence[Shape], inputs: Shape):
        closed, self.out_shapes = jax.make_jaxpr(function, return_shape=True)(list(leaves), inputs)
        shapes = [Shape(a.shape, a.dtype) for a in closed.in_avals]
        flat = jax.make_jaxpr(lambda *args: _without_jits(closed.jaxpr, closed.consts, args))(*shapes)
        jaxpr = flat.jaxpr
        self.consts = dict(zip(jaxpr.constvars, flat.consts, strict=True))
        *self.leaves, self.input = jaxpr.invars
        self.outvars = jaxpr.outvars
        self.ops: list[core.JaxprEqn] = []
        self.marks: list[int] = []  # the number of operations before each
        self.marked: dict[core.Var, Any] = {}  # for each value of a mark the one that it was given
        self.made_by: dict[core.Var, core.JaxprEqn] = {}  # of other values that no operation makes
        self._read: list[set[core.Var]] = []  # by each operation: leaves, the input and results of operations
        reads: dict[core.Var, set[core.Var]] = {v: {v} for v in jaxpr.invars}
        leaves_set = set(self.leaves)
        for eqn in jaxpr.eqns:
            found = set().union(*(reads.get(v, set()) for v in eqn.invars if not is_literal(v)))
            if is_mark(eqn):
                self.marks.append(len(self.ops))
                marked = dict(zip(eqn.outvars, eqn.invars, strict=True))
                self.marked |= marked
                reads |= {v: set() if is_literal(given) else reads.get(given, set()) for v, given in marked.items()}
                continue
            if any(map(_holds_mark, inner_jaxprs(eqn))):
                raise ConfigError(
                    f"a stage_boundary stands inside of {eqn.primitive.name}, which is one operation. Set it outside."
                )
            if found <= leaves_set or eqn.primitive.name in RESHAPING:
                self.made_by |= dict.fromkeys(eqn.outvars, eqn)
                reads |= dict.fromkeys(eqn.outvars, found)
            else:
                self.ops.append(eqn)
                self._read.append(found)
                reads |= {v: {v} for v in eqn.outvars}
        self._read_last = set().union(*(reads.get(v, set()) for v in self.outvars if not is_literal(v)))
        self.num_ops = len(self.ops)

    @property
    def names(self) -> list[str]:
        """The name of each operation."""
        return [eqn.primitive.name for eqn in self.ops]

    def needed(self, start: int, stop: int) -> list[str]:
        """Return the names of the operations from `start` to before `stop` whose results are used."""
        return [_name(eqn) for eqn in self.ops[start:stop] if any(v in self._uses for v in eqn.outvars)]

    @cached_property
    def costs(self) -> list[int]:
        """FLOPs of each operation, of matrix products alone."""
        return [equation_flops(eqn) if any(v in self._uses for v in eqn.outvars) else 0 for eqn in self.ops]

    @cached_property
    def _uses(self) -> dict[core.Var, list[int]]:
        """The operations that need each leaf, the input or result, ascending; `num_ops` stands for the outputs."""
        uses: dict[core.Var, list[int]] = {v: [self.num_ops] for v in self._read_last}
        for i in reversed(range(self.num_ops)):
            if any(v in uses for v in self.ops[i].outvars):
                for v in self._read[i]:
                    uses.setdefault(v, []).append(i)
        return {v: found[::-1] for v, found in uses.items()}

    def users(self, leaf: int) -> list[int]:
        """Return the operations that need a leaf; `num_ops` stands for the outputs."""
        return self._uses.get(self.leaves[leaf], [])

    @cached_property
    def _crossing(self) -> list[list[core.Var]]:
        """For each place 0..num_ops the values that are made before it and needed behind it."""
        found: list[list[core.Var]] = [[] for _ in range(self.num_ops + 1)]
        results = [(self.input, 0), *((v, i + 1) for i, eqn in enumerate(self.ops) for v in eqn.outvars)]
        for v, first in results:
            for place in range(first, self._uses.get(v, [-1])[-1] + 1):
                found[place].append(v)
        return found

    def crossing(self, place: int) -> list[Shape]:
        """Return the values that are made before operation `place`, or given, and needed by it or behind it."""
        return [Shape(v.aval.shape, v.aval.dtype) for v in self._crossing[place]]  # pyright: ignore[reportAttributeAccessIssue] of arrays

    def run(self, start: int, stop: int, values: Sequence[Any], leaves: Mapping[int, Any]) -> list[Any]:
        """Return the values that cross `stop`, from those that cross `start` and the leaves needed, by number."""
        env = self._run(start, stop, values, leaves)
        return [env[v] for v in self._crossing[stop]]

    def outputs(self, start: int, values: Sequence[Any], leaves: Mapping[int, Any]) -> Tree:
        """Return the outputs of the function, from what crosses `start`."""
        env = self._run(start, self.num_ops, values, leaves)
        outs = [self._value(env, v) for v in self.outvars]
        return jax.tree.unflatten(jax.tree.structure(self.out_shapes), outs)

    def _run(self, start: int, stop: int, values: Sequence[Any], leaves: Mapping[int, Any]) -> dict[Any, Any]:
        env: dict[Any, Any] = {**self.consts, **dict(zip(self._crossing[start], values, strict=True))}
        env |= {self.leaves[i]: leaf for i, leaf in leaves.items()}
        for eqn in self.ops[start:stop]:
            if any(v in self._uses for v in eqn.outvars):
                env |= dict(zip(eqn.outvars, bind_eqn(eqn, [self._value(env, v) for v in eqn.invars]), strict=True))
        return env

    def _value(self, env: dict[Any, Any], v: Any) -> Any:
        """Return the value of v, made now where that is no operation's."""
        if not is_literal(v) and v in self.marked:  # each by itself: the mark's other values may not be there
            return self._value(env, self.marked[v])
        if not is_literal(v) and v not in env:
            eqn = self.made_by[v]
            env |= dict(zip(eqn.outvars, bind_eqn(eqn, [self._value(env, each) for each in eqn.invars]), strict=True))
        return env_value(env, v)


def _name(eqn: core.JaxprEqn) -> str:
    """Return the name of an operation; of a call, as of a function with a derivative of its own, the function's."""
    name = eqn.primitive.name
    called = eqn.params[CALLS[name]] if name in CALLS else None
    return name if called is None else getattr(called, "jaxpr", called).debug_info.func_name


def is_mark(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation is a call of stage_boundary."""
    return eqn.primitive.name in JITS and eqn.params["name"] == MARK


def _holds_mark(jaxpr: core.Jaxpr) -> bool:
    return any(is_mark(eqn) or any(map(_holds_mark, inner_jaxprs(eqn))) for eqn in jaxpr.eqns)


def _without_jits(jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """The outputs of the program. Custom derivatives and remat stay what they are; marks stay too."""
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        values = [env_value(env, v) for v in eqn.invars]
        if eqn.primitive.name in JITS and not is_mark(eqn):
            called = eqn.params["jaxpr"]
            outs = _without_jits(called.jaxpr, called.consts, values)
        else:
            outs = bind_eqn(eqn, values)
        env |= dict(zip(eqn.outvars, outs, strict=True))
    return [env_value(env, v) for v in jaxpr.outvars]
