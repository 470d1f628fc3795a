"""The split backward of a layer: its input gradient (I) now, its weight gradients (W) later.

I is the part of the backward's jaxpr that the input gradient needs, W is the rest. Values that W
reads from I are `pending`. docs/executors-internals.md: "The split backward".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core

from ppctl.errors import ConfigError
from ppctl.executors.stage.jaxpr_flops import PRODUCTS, inner_jaxprs
from ppctl.executors.stage.jaxpr_tools import (
    BARRIER,
    Mask,
    demand,
    depending_only,
    env_of,
    env_value,
    extents,
    flatten,
    is_literal,
    is_scan,
    masked_values,
    results_of,
    select_variables,
)

Tree = Any
Shape = jax.ShapeDtypeStruct

VIEWS = (
    *("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims"),
    *("convert_element_type", "copy"),
)
FOREIGN = ("ffi_call", "pure_callback", "io_callback")  # primitives that cannot be cut


@dataclass(frozen=True)
class Split:
    """The two halves of a layer's backward: input gradient (I) and weight gradients (W)."""

    input_grad: Callable[[Tree, Tree, jax.Array], tuple[jax.Array, list[jax.Array]]]
    weight_grad: Callable[[Tree, list[jax.Array]], Tree]  # w, pending -> dw
    pending: list[Shape]  # shapes of the second result of input_grad(w, saved, gy)
    reads_w: bool  # whether `weight_grad` reads any parameter


def split(pull: Callable, w: Tree, saved: Tree, gy: Shape) -> Split:
    """Return the two halves of gx, dw = pull(w, saved, gy).

    Raises ConfigError if each half needs other results of an operation that cannot be cut, such as
    a while loop.
    """
    closed, (gx_shape, dw_shape) = jax.make_jaxpr(pull, return_shape=True)(w, saved, gy)
    flat = flatten(closed)
    num_w, num_gx = len(jax.tree.leaves(w)), len(jax.tree.leaves(gx_shape))
    num_in, num_out = len(flat.jaxpr.invars), len(flat.jaxpr.outvars)
    handed = [i >= num_w for i in range(num_in)]

    early = [i < num_gx for i in range(num_out)]
    roles = {"late": [not e for e in early], "handed": handed, "fixed": [not h for h in handed]}
    best = _cheapest(lambda moved: _Cut(flat, early, moved=moved, **roles))

    def input_grad(w: Tree, saved: Tree, gy: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        outs, pending = best.first(jax.tree.leaves((w, saved, gy)))
        return jax.tree.unflatten(jax.tree.structure(gx_shape), outs[:num_gx]), pending

    def weight_grad(w: Tree, pending: list[jax.Array]) -> Tree:
        outs = best.second([*jax.tree.leaves(w), *[None] * (num_in - num_w)], pending)
        return jax.tree.unflatten(jax.tree.structure(dw_shape), outs[num_gx:])

    reads_w = any(best.second_reads[:num_w])
    return Split(input_grad, weight_grad, list(best.crossing.values()), reads_w)


def _cheapest(cut: Callable[[frozenset[int]], _Cut]) -> _Cut:
    """Return a cut with few crossing bytes, found by moving equations into `first` one by one."""
    best, moved = cut(frozenset()), frozenset[int]()
    for i in range(len(best.jaxpr.eqns)):  # take equal cuts, too: they may lead to better ones
        if best.can_move(i):
            other = cut(moved | {i})
            if other.num_bytes <= best.num_bytes:
                best, moved = other, moved | {i}
    for i in sorted(moved, reverse=True):  # undo moves without gain
        other = cut(moved - {i})
        if other.num_bytes <= best.num_bytes:
            best, moved = other, moved - {i}
    return best


class _Cut:
    """A flat jaxpr cut in two, with values that cross from `first` to `second`.

    `first` computes the outputs `early`, `second` the outputs `late`. handed: inputs that cross to
    `second`; it takes only the other inputs as arguments. fixed: inputs equal for every microbatch.
    moved: equations that `first` runs although only `second` needs them. Unread arguments and
    uncomputed results are None.
    """

    def __init__(
        self,
        closed: core.ClosedJaxpr,
        early: Mask,
        late: Mask,
        *,
        handed: Mask,
        fixed: Mask,
        moved: frozenset[int] = frozenset(),
    ):
        # 1. the equations of `first`
        jaxpr = self.jaxpr = closed.jaxpr
        self.early, self.late, self.consts = early, late, closed.consts
        self.masks, _ = demand(jaxpr, early, moved)
        self.crossing: dict[Any, Shape] = {}  # keys: variable, or (scan, index in its crossing)
        self.scans: dict[int, _ScanCut] = {}  # cuts of scans that run in `first`
        self.second_steps: list[tuple[int, _ScanCut | None]] = []
        # 2. the equations of `second`, from the last to the first
        constant = depending_only(jaxpr, fixed)
        need = select_variables(jaxpr.outvars, late)
        for i, eqn in reversed([*enumerate(jaxpr.eqns)]):
            wanted = [v in need for v in eqn.outvars]
            if not any(wanted):
                continue
            here = self.masks.get(i, [False] * len(wanted))
            is_missing = any(w and not h for w, h in zip(wanted, here, strict=True))
            is_constant = all(v in constant for v in eqn.outvars)
            reads = [True] * len(eqn.invars)
            if is_scan(eqn) and is_missing and not is_constant:
                missing = [w and not h for w, h in zip(wanted, here, strict=True)]
                scan = _ScanCut(eqn, here, missing, constant)
                self.second_steps.append((i, scan))
                self.crossing |= {(i, j): shape for j, shape in enumerate(scan.crossing)}
                if any(here):
                    self.scans[i] = scan
                reads = scan.second_reads
            elif is_constant or not any(here) or (not is_missing and _is_view(eqn)):
                self.second_steps.append((i, None))
                here = [False] * len(wanted)
            elif not is_missing:
                reads = [False] * len(eqn.invars)
            elif not _is_opaque(eqn):  # one operation with several results, such as jax.lax.split
                here, reads = wanted, [False] * len(eqn.invars)
            else:
                raise _inseparable(eqn)
            self._cross(v for v, h in zip(eqn.outvars, here, strict=True) if h and v in need)
            need |= select_variables(eqn.invars, reads)
        # 3. inputs of `second`, and scans that only `first` runs
        inputs = list(zip(jaxpr.invars, handed, strict=True))
        self._cross(v for v, is_handed in inputs if is_handed and v in need)
        self.second_reads = [v in need and not is_handed for v, is_handed in inputs]
        for i, mask in self.masks.items():
            if is_scan(jaxpr.eqns[i]) and i not in self.scans:
                self.scans[i] = _ScanCut(jaxpr.eqns[i], mask, [False] * len(mask), constant)

    def _cross(self, variables: Iterable[core.Var]) -> None:
        self.crossing |= {v: _shape(v) for v in variables}

    @property
    def num_bytes(self) -> int:
        """Bytes of the values that cross."""
        return sum(map(_num_bytes, self.crossing.values()))

    def can_move(self, i: int) -> bool:
        """Return whether equation i is cheap and in `second`, but reads no result of `second`."""
        eqn, eqns = self.jaxpr.eqns[i], self.jaxpr.eqns
        if i in self.masks or (i, None) not in self.second_steps:
            return False
        if eqn.primitive.name in PRODUCTS or _is_opaque(eqn):
            return False
        steps = (j for j, _ in self.second_steps if j not in self.masks)
        later = {v for j in steps for v in eqns[j].outvars}
        return not any(v in later for v in eqn.invars if not is_literal(v))

    def first(self, args: Sequence[Any]) -> tuple[list[Any], list[jax.Array]]:
        """Return (early outputs, values that cross)."""
        env = env_of(self.jaxpr, self.consts, args)
        for i in sorted(self.masks):
            eqn = self.jaxpr.eqns[i]
            if i not in self.scans:
                env |= results_of(eqn, env)
                continue
            outs, crossing = self.scans[i].first([env_value(env, v) for v in eqn.invars])
            env |= dict(zip(eqn.outvars, outs, strict=True))
            env |= {(i, j): value for j, value in enumerate(crossing)}
        outs = masked_values(env, self.jaxpr.outvars, self.early)
        return outs, [env[key] for key in self.crossing]

    def second(self, args: Sequence[Any], crossing: Sequence[jax.Array]) -> list[Any]:
        """Return the late outputs, from the inputs that are not handed and the crossing values."""
        env = env_of(self.jaxpr, self.consts, args)
        env |= dict(zip(self.crossing, crossing, strict=True))
        for i, scan in reversed(self.second_steps):
            eqn = self.jaxpr.eqns[i]
            if scan is None:
                env |= results_of(eqn, env)
                continue
            values = masked_values(env, eqn.invars, scan.second_reads)
            outs = scan.second(values, [env[i, j] for j in range(len(scan.crossing))])
            env |= {v: out for v, out in zip(eqn.outvars, outs, strict=True) if out is not None}
        return masked_values(env, self.jaxpr.outvars, self.late)


class _ScanCut:
    """A scan cut in two: a loop for the results in the mask `early`, a later loop for `late`.

    constant: variables that are equal for every microbatch.
    """

    def __init__(self, eqn: core.JaxprEqn, early: Mask, late: Mask, constant: set[core.Var]):
        params = eqn.params
        self.options = {name: params[name] for name in ("length", "reverse", "unroll")}
        self.num_consts, self.num_carry = extents(eqn)
        body, loop = params["jaxpr"], slice(self.num_consts, self.num_consts + self.num_carry)
        fixed = [is_literal(v) or v in constant for v in eqn.invars]
        fixed[loop] = [False] * self.num_carry
        handed = [False] * len(fixed)
        # `demand` made `early` include all carries that an iteration of the first loop reads
        handed[loop] = early[: self.num_carry]
        while True:  # until the second loop's carry has all that an iteration reads
            self.cut = _Cut(body, early, late, handed=handed, fixed=fixed)
            carried = [a or b for a, b in zip(late, self.cut.second_reads[loop], strict=False)]
            if carried == late[: self.num_carry]:
                break
            late = [*carried, *late[self.num_carry :]]
        self.early, self.late = early, late
        self.second_reads = self.cut.second_reads.copy()
        self.second_reads[loop] = late[: self.num_carry]
        stack = lambda a: Shape((params["length"], *a.shape), a.dtype)  # noqa: E731
        self.crossing = [*map(stack, self.cut.crossing.values())]

    def _run(
        self, step: Callable, mask: Mask, values: list[Any], handed: Sequence[jax.Array]
    ) -> tuple[list[Any], Any]:
        """Return (results, crossing values) of a loop over step(inputs, handed), of the same form.

        mask: carries and results that the loop computes. handed: values from the first loop, with
        a leading dim over iterations; [] in the first loop itself.
        """
        number, consts = self.num_carry, values[: self.num_consts]
        start, xs = values[self.num_consts :][:number], values[self.num_consts + number :]
        start = [value if m else None for value, m in zip(start, mask, strict=False)]

        def body(carry: list, xs: tuple) -> tuple[list, tuple]:
            outs, crossing = step([*consts, *carry, *xs[0]], xs[1])
            return outs[:number], (outs[number:], crossing)

        carry, (ys, crossing) = jax.lax.scan(body, start, (xs, handed), **self.options)
        return [*carry, *ys], crossing

    def first(self, values: list[Any]) -> tuple[list[Any], list[jax.Array]]:
        return self._run(lambda args, _: self.cut.first(args), self.early, values, [])

    def second(self, values: list[Any], crossing: Sequence[jax.Array]) -> list[Any]:
        step = lambda args, handed: (self.cut.second(args, handed), None)  # noqa: E731
        return self._run(step, self.late, values, crossing)[0]


def _shape(v: Any) -> Shape:
    return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)


def _num_bytes(shape: Shape) -> int:
    return shape.size * shape.dtype.itemsize


def _is_view(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation is a view whose operand is no larger than its result."""
    size = lambda v: _num_bytes(_shape(v))  # noqa: E731
    is_view = eqn.primitive.name in (*VIEWS, BARRIER)
    return is_view and sum(map(size, eqn.invars)) <= sum(map(size, eqn.outvars))


def _is_opaque(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation is more than one operation: a loop, a branch, a kernel."""
    return eqn.primitive.name in FOREIGN or bool(inner_jaxprs(eqn))


def _inseparable(eqn: core.JaxprEqn) -> ConfigError:
    results = ", ".join(f"{shape.dtype}{list(shape.shape)}" for shape in map(_shape, eqn.outvars))
    return ConfigError(
        f"the backward of a layer cannot be split: {eqn.primitive.name}, with results {results}, "
        "yields the gradients of the layer's input and of its weights together. Write it with "
        "jax.lax.scan, or use a schedule of unsplit backwards, such as schedule=interleaved."
    )
