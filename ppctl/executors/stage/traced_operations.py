"""A function of a batch as a sequence of operations, and its cuts into layers.

Operations are the equations that depend on the inputs; any range of them can run by itself. Other
equations (of only parameters and constants, or reshapes) run wherever their results are needed.
A mark is a call of stage_boundary, where the user wants a cut.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ppctl.errors import ConfigError, setting
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
from ppctl.schedule.partition.cut_layers import clusters

Tree = Any
Shape = jax.ShapeDtypeStruct
JITS = ("jit", "pjit")
WIDE = 2  # maximum width of the head's input, in multiples of the widest boundary
RESHAPING = ("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims")


class Trace:
    """The trace of outputs = function(leaves, inputs) for these shapes, as `num_ops` operations."""

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
        self.marked: dict[core.Var, Any] = {}  # result of a mark -> its argument
        self.made_by: dict[core.Var, core.JaxprEqn] = {}  # result -> its equation, not an operation
        self._read: list[set[core.Var]] = []  # leaves, inputs and results that each operation reads
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
                    f"a stage_boundary is inside {eqn.primitive.name}, which is one operation. "
                    "Move it outside."
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
        """Return the names of the used operations from `start` up to `stop` (excluded)."""
        return [_name(eqn) for eqn in self.ops[start:stop] if self._is_used(eqn)]

    @cached_property
    def costs(self) -> list[int]:
        """FLOPs of the matrix products in each operation."""
        return [equation_flops(eqn) if self._is_used(eqn) else 0 for eqn in self.ops]

    @cached_property
    def _uses(self) -> dict[core.Var, list[int]]:
        """Operations that need each leaf, input or result, ascending; `num_ops`: the outputs."""
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
        """Values made before operation `place` and needed from it on, for each place 0..num_ops."""
        found: list[list[core.Var]] = [[] for _ in range(self.num_ops + 1)]
        results = [(v, i + 1) for i, eqn in enumerate(self.ops) for v in eqn.outvars]
        for v, first in [*((v, 0) for v in self.inputs), *results]:
            for place in range(first, self._uses.get(v, [-1])[-1] + 1):
                found[place].append(v)
        return found

    def crossing(self, place: int) -> list[Shape]:
        """Return the shapes of the values made before operation `place` and needed from it on."""
        return [Shape(v.aval.shape, v.aval.dtype) for v in self._crossing[place]]  # pyright: ignore[reportAttributeAccessIssue] of arrays

    def entering(self, inputs: Tree) -> list[Any]:
        """Return the values that cross place 0, from the inputs."""
        pairs = zip(self.inputs, jax.tree.leaves(inputs), strict=True)
        return [a for v, a in pairs if v in self._crossing[0]]

    def run(
        self, start: int, stop: int, values: Sequence[Any], leaves: Mapping[int, Any]
    ) -> list[Any]:
        """Return the values that cross `stop`, from those that cross `start`; leaves: by index."""
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
        """Return the value of v, computed now unless an operation computes it."""
        # a mark is bypassed, not run: values of its other arguments may be missing in env
        if not is_literal(v) and v in self.marked:
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


@dataclass(frozen=True)
class Contents:
    """The contents of a layer of a network, or of its embedding or head."""

    name: str  # "embedding", "0", "1", ..., "head"
    params: Mapping[str, tuple[int, ...]]  # shapes by the user's names, with shared parameters
    operations: Mapping[str, int]  # number of each operation by JAX's names, without reshapes


@dataclass(frozen=True)
class NetworkCuts:
    """The cuts of a trace: at its marks, or by work (auto).

    num_parameters: number of the trace's first leaves that are parameters.
    """

    trace: Trace
    num_layers: int
    num_parameters: int
    auto: bool

    def bounds(self) -> tuple[int, ...]:
        """Return the first operation of each layer and of the head."""
        last = self.trace.num_ops
        first = next(
            (place for place in range(last + 1) if not integers_crossing(self.trace, place)),
            last + 1,
        )
        if self.auto:
            last = self._tied(first)
            bounds = self._clustered(first, last)
            head = self._head(bounds)
            return bounds if head == last else self._clustered(first, head)
        marks = len(self.trace.marks)
        if marks + 1 != self.num_layers:
            raise ConfigError(
                f"apply has {marks} stage_boundary marks, which make {marks + 1} layers, but "
                f"{setting('model.num_layers', self.num_layers)}. Leave it out, or use "
                f"{setting('model.layers', 'auto', 'layers=NUMBER')}."
            )
        bounds = (first, *self.trace.marks, max(first, self._tied(first)))
        for l, (start, stop) in enumerate(pairwise(bounds)):
            if start > stop and l == 0:
                raise no_floats(integers_crossing(self.trace, stop), l + 1)
            if start >= stop and (l or not first):  # layer 0 may be empty if the embedding is not
                raise ConfigError(
                    f"layer {l} of {self.num_layers} computes nothing. Move a stage_boundary."
                )
        return (*bounds[:-1], self._head(bounds))

    def _clustered(self, first: int, last: int) -> tuple[int, ...]:
        if first >= last:
            raise no_floats(integers_crossing(self.trace, first - 1), 1)
        torn = self._torn(first)
        is_possible = lambda place: place not in torn and not integers_crossing(self.trace, place)  # noqa: E731
        size = lambda place: _size(self.trace.crossing(place)) if is_possible(place) else math.inf  # noqa: E731
        costs, passing = self.trace.costs[first:last], [*map(size, range(first, last))]
        return tuple(first + place for place in clusters(costs, passing, self.num_layers))

    def _tied(self, first: int) -> int:
        """Return the first operation after the embedding that uses its parameters, or the end."""
        users = map(self.trace.users, range(self.num_parameters))
        tied = [u for found in users if found and found[0] < first for u in found if u >= first]
        return min([self.trace.num_ops, *tied])

    def _torn(self, first: int) -> set[int]:
        """Return the places where a cut separates users of a parameter (except the embedding's)."""
        users = map(self.trace.users, range(self.num_parameters))
        ranges = (range(u[0] + 1, u[-1] + 1) for u in users if u and u[0] >= first)
        return {place for places in ranges for place in places}

    def _head(self, bounds: Sequence[int]) -> int:
        """Return the head's first operation: bounds[-1], or an earlier one inside the last layer.

        It is earlier if the head's input would be wider than `WIDE` allows.
        """
        widest = max(_size(self.trace.crossing(place)) for place in bounds[:-1])
        if _size(self.trace.crossing(bounds[-1])) <= WIDE * widest:
            return bounds[-1]
        torn = self._torn(bounds[0])
        places = (p for p in range(bounds[-1] - 1, bounds[-2], -1) if p not in torn)
        return next((p for p in places if _size(self.trace.crossing(p)) <= widest), bounds[-1])


def is_floating(a: Shape) -> bool:
    return jnp.issubdtype(a.dtype, jnp.floating)


def integers_crossing(trace: Trace, place: int) -> list[Shape]:
    """Return the shapes of crossing values that are neither floating nor boolean."""
    return [a for a in trace.crossing(place) if not is_floating(a) and a.dtype != jnp.bool_]


def _size(shapes: Sequence[Shape]) -> int:
    return sum(a.size for a in shapes)


def no_floats(shapes: Sequence[Shape], l: int) -> ConfigError:
    found = " and ".join(f"{a.dtype}{list(a.shape)}" for a in shapes)
    return ConfigError(
        f"{found} crosses the boundary before layer {l}, but values between layers must be "
        "floating. Convert them in the first layer, or move the boundary."
    )
