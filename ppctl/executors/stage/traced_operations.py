"""A function of a batch as a sequence of operations, which can run from any one to any other.

Operations are the equations that depend on the inputs. Other equations (of only parameters and
constants, or reshapes) run wherever their results are needed.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
from jax.extend import core

from ppctl.errors import ConfigError
from ppctl.executors.stage.jaxpr_flops import equation_flops, inner_jaxprs
from ppctl.executors.stage.jaxpr_tools import (
    bind_eqn,
    called_program,
    env_value,
    interpret,
    is_literal,
    retraced,
)
from ppctl.model.network import MARK

Tree = Any
Shape = jax.ShapeDtypeStruct
JITS = ("jit", "pjit")
RESHAPING = ("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims")


class Trace:
    """outputs = function(leaves, inputs), traced for these shapes, as `num_ops` operations."""

    def __init__(
        self, function: Callable[[list, Any], Tree], leaves: Sequence[Shape], inputs: Tree
    ):
        # 1. the program without inner jits
        closed, self.out_shapes = jax.make_jaxpr(function, return_shape=True)(list(leaves), inputs)
        flat = retraced(closed, _without_jits)
        jaxpr = flat.jaxpr
        self.consts = dict(zip(jaxpr.constvars, flat.consts, strict=True))
        self.leaves, self.inputs = jaxpr.invars[: len(leaves)], jaxpr.invars[len(leaves) :]
        self.outvars = jaxpr.outvars
        # 2. its equations: marks, operations and others
        self.ops: list[core.JaxprEqn] = []
        self.marks: list[int] = []  # number of operations before each mark
        self.marked: dict[core.Var, Any] = {}  # argument of each result of a mark
        self.made_by: dict[core.Var, core.JaxprEqn] = {}  # equation of values without operation
        self._read: list[set[core.Var]] = []  # leaves, input and results that each operation reads
        reads: dict[core.Var, set[core.Var]] = {v: {v} for v in jaxpr.invars}
        read_by = lambda vs: set().union(*(reads.get(v, set()) for v in vs if not is_literal(v)))  # noqa: E731
        leaves_set = set(self.leaves)
        for eqn in jaxpr.eqns:
            found = read_by(eqn.invars)
            if is_mark(eqn):
                self.marks.append(len(self.ops))
                marked = dict(zip(eqn.outvars, eqn.invars, strict=True))
                self.marked |= marked
                reads |= {v: read_by([given]) for v, given in marked.items()}
                continue
            if any(map(_holds_mark, inner_jaxprs(eqn))):
                raise ConfigError(
                    f"a stage_boundary stands inside of {eqn.primitive.name}, which is one "
                    "operation. Set it outside."
                )
            if found <= leaves_set or eqn.primitive.name in RESHAPING:
                self.made_by |= dict.fromkeys(eqn.outvars, eqn)
                reads |= dict.fromkeys(eqn.outvars, found)
            else:
                self.ops.append(eqn)
                self._read.append(found)
                reads |= {v: {v} for v in eqn.outvars}
        self._read_last = read_by(self.outvars)
        self.num_ops = len(self.ops)

    @property
    def names(self) -> list[str]:
        """The name of each operation."""
        return [eqn.primitive.name for eqn in self.ops]

    def _is_used(self, eqn: core.JaxprEqn) -> bool:
        return any(v in self._uses for v in eqn.outvars)

    def needed(self, start: int, stop: int) -> list[str]:
        """Return the names of the used operations from `start` to before `stop`."""
        return [_name(eqn) for eqn in self.ops[start:stop] if self._is_used(eqn)]

    @cached_property
    def costs(self) -> list[int]:
        """FLOPs of the matrix products in each operation."""
        return [equation_flops(eqn) if self._is_used(eqn) else 0 for eqn in self.ops]

    @cached_property
    def _uses(self) -> dict[core.Var, list[int]]:
        """The operations, ascending, that need each leaf, the input, a result; num_ops: outputs."""
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
        """The values before each place 0..num_ops that are needed after it."""
        found: list[list[core.Var]] = [[] for _ in range(self.num_ops + 1)]
        results = [(v, i + 1) for i, eqn in enumerate(self.ops) for v in eqn.outvars]
        for v, first in [*((v, 0) for v in self.inputs), *results]:
            for place in range(first, self._uses.get(v, [-1])[-1] + 1):
                found[place].append(v)
        return found

    def crossing(self, place: int) -> list[Shape]:
        """Return the shapes of the values from before `place` that it or later operations need."""
        return [Shape(v.aval.shape, v.aval.dtype) for v in self._crossing[place]]  # pyright: ignore[reportAttributeAccessIssue] of arrays

    def entering(self, inputs: Tree) -> list[Any]:
        """Return the values that cross place 0, from the inputs."""
        pairs = zip(self.inputs, jax.tree.leaves(inputs), strict=True)
        return [a for v, a in pairs if v in self._crossing[0]]

    def run(
        self, start: int, stop: int, values: Sequence[Any], leaves: Mapping[int, Any]
    ) -> list[Any]:
        """Return the values that cross `stop`, from those across `start` and leaves by number."""
        env = self._run(start, stop, values, leaves)
        return [env[v] for v in self._crossing[stop]]

    def outputs(self, start: int, values: Sequence[Any], leaves: Mapping[int, Any]) -> Tree:
        """Return the outputs of the function, from the values that cross `start`."""
        env = self._run(start, self.num_ops, values, leaves)
        outs = [self._value(env, v) for v in self.outvars]
        return jax.tree.unflatten(jax.tree.structure(self.out_shapes), outs)

    def _run(
        self, start: int, stop: int, values: Sequence[Any], leaves: Mapping[int, Any]
    ) -> dict[Any, Any]:
        env: dict[Any, Any] = self.consts | dict(zip(self._crossing[start], values, strict=True))
        env |= {self.leaves[i]: leaf for i, leaf in leaves.items()}
        for eqn in self.ops[start:stop]:
            if self._is_used(eqn):
                self._bind(env, eqn)
        return env

    def _bind(self, env: dict[Any, Any], eqn: core.JaxprEqn) -> None:
        """Add the results of an equation to env."""
        outs = bind_eqn(eqn, [self._value(env, v) for v in eqn.invars])
        env |= dict(zip(eqn.outvars, outs, strict=True))

    def _value(self, env: dict[Any, Any], v: Any) -> Any:
        """Return the value of v, computed now unless an operation makes it."""
        if not is_literal(v) and v in self.marked:  # other values of the mark may be missing
            return self._value(env, self.marked[v])
        if not is_literal(v) and v not in env:
            self._bind(env, self.made_by[v])
        return env_value(env, v)


def _name(eqn: core.JaxprEqn) -> str:
    """Return the name of an operation, or of the function that it calls."""
    called = called_program(eqn)
    return eqn.primitive.name if called is None else called.jaxpr.debug_info.func_name


def is_mark(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation is a call of stage_boundary."""
    return eqn.primitive.name in JITS and eqn.params["name"] == MARK


def _holds_mark(jaxpr: core.Jaxpr) -> bool:
    return any(is_mark(eqn) or any(map(_holds_mark, inner_jaxprs(eqn))) for eqn in jaxpr.eqns)


def _without_jits(eqn: core.JaxprEqn, values: list[Any]) -> list[Any]:
    """Return the results of an equation, run without jits; other calls and marks stay."""
    if eqn.primitive.name not in JITS or is_mark(eqn):
        return bind_eqn(eqn, values)
    return interpret(eqn.params["jaxpr"], values, _without_jits)
