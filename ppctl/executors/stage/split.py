"""The backward of a layer in two: its input gradient (I) now, its weight gradients (W) later, without a second chain.

I is what the input gradient needs of the backward's jaxpr, W the rest; what crosses is `pending`. Which values cross,
which are computed twice and which work moves from W to I: docs/executors-internals.md, "The split backward".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core

from ppctl.errors import ConfigError
from ppctl.executors.stage.jaxprs import (
    BARRIER,
    Mask,
    bind_eqn,
    demand,
    depending_only,
    env_value,
    extents,
    flatten,
    is_literal,
    is_scan,
    select_variables,
)

Tree = Any
Shape = jax.ShapeDtypeStruct

VIEWS = ("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "convert_element_type", "copy")
PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")
FOREIGN = ("ffi_call", "pure_callback", "io_callback")  # nobody can see which result is whose


@dataclass(frozen=True)
class Split:
    """I and W of a layer. `pending`: the shapes of the arrays that `input_grad` hands to `weight_grad`."""

    input_grad: Callable[[Tree, Tree, jax.Array], tuple[jax.Array, list[jax.Array]]]  # w, saved, gy -> gx, pending
    weight_grad: Callable[[Tree, list[jax.Array]], Tree]  # w, pending -> dw
    pending: list[Shape]
    reads_w: bool  # whether `weight_grad` reads any parameter


def split(pull: Callable, w: Tree, saved: Tree, gy: Shape) -> Split:
    """Return the two halves of gx, dw = pull(w, saved, gy). The arguments give shapes and dtypes.

    ConfigError where a loop, a branch or a kernel that cannot be taken apart yields both gx and dw.
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

    return Split(input_grad, weight_grad, list(best.crossing.values()), any(best.second_reads[:num_w]))


def _cheapest(cut: Callable[[frozenset[int]], _Cut]) -> _Cut:
    """Return the cut with the least bytes that moving one equation after the other finds."""
    best, moved = cut(frozenset()), frozenset[int]()
    for i in range(len(best.jaxpr.eqns)):  # an equal cut may lead to a better one
        if best.can_move(i):
            other = cut(moved | {i})
            if other.num_bytes <= best.num_bytes:
                best, moved = other, moved | {i}
    for i in sorted(moved, reverse=True):  # an equation that moved in vain stays in W
        other = cut(moved - {i})
        if other.num_bytes <= best.num_bytes:
            best, moved = other, moved - {i}
    return best


class _Cut:
    """A flat jaxpr in two: `first` computes the outputs `early` and what crosses, `second` the outputs `late`.

    handed: inputs that `second` gets by crossing only; it is given the others. fixed: inputs that are the same for
    every microbatch. moved: equations that `first` runs though it need not. Arguments that are not read and results
    that are not computed are None.
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
        jaxpr = self.jaxpr = closed.jaxpr
        self.early, self.late = early, late
        self.consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self.masks, _ = demand(jaxpr, early, moved)
        self.crossing: dict[Any, Shape] = {}  # by variable, or (scan, number) of what its iterations hand on
        self.scans: dict[int, _ScanCut] = {}  # those of `first`, some of which have a part in `second`
        self.second_steps: list[tuple[int, _ScanCut | None]] = []
        constant = depending_only(jaxpr, fixed)
        need = select_variables(jaxpr.outvars, late)
        for i, eqn in reversed([*enumerate(jaxpr.eqns)]):
            wanted = [v in need for v in eqn.outvars]
            here = self.masks.get(i, [False] * len(wanted))
            missing = [w and not h for w, h in zip(wanted, here, strict=True)]
            if not any(wanted):
                continue
            reads = [True] * len(eqn.invars)
            if is_scan(eqn) and any(missing) and not _is_constant(eqn, constant):
                scan = _ScanCut(eqn, here, missing, constant)
                self.second_steps.append((i, scan))
                self.crossing |= {(i, j): shape for j, shape in enumerate(scan.crossing)}
                if any(here):
                    self.scans[i] = scan
                reads = scan.second_reads
            elif _is_constant(eqn, constant) or not any(here) or (not any(missing) and _is_view(eqn)):
                self.second_steps.append((i, None))
                here = [False] * len(wanted)
            elif not any(missing):
                reads = [False] * len(eqn.invars)
            elif not _is_opaque(eqn):  # one operation with several results, such as jax.lax.split
                here, reads = wanted, [False] * len(eqn.invars)
            else:
                raise _inseparable(eqn)
            self._cross(v for v, h in zip(eqn.outvars, here, strict=True) if h and v in need)
            need |= select_variables(eqn.invars, reads)
        self._cross(v for v, is_handed in zip(jaxpr.invars, handed, strict=True) if is_handed and v in need)
        self.second_reads = [v in need and not is_handed for v, is_handed in zip(jaxpr.invars, handed, strict=True)]
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
        """Return whether equation i is cheap work of `second` that needs nothing else of it."""
        eqn = self.jaxpr.eqns[i]
        if i in self.masks or (i, None) not in self.second_steps or eqn.primitive.name in PRODUCTS or _is_opaque(eqn):
            return False
        later = {v for j, _ in self.second_steps if j not in self.masks for v in self.jaxpr.eqns[j].outvars}
        return not any(v in later for v in eqn.invars if not is_literal(v))

    def first(self, args: Sequence[Any]) -> tuple[list[Any], list[jax.Array]]:
        """Return (outputs, values that cross) of inputs."""
        env: dict[Any, Any] = {**self.consts, **dict(zip(self.jaxpr.invars, args, strict=True))}
        for i in sorted(self.masks):
            eqn = self.jaxpr.eqns[i]
            values = [env_value(env, v) for v in eqn.invars]
            outs, crossing = self.scans[i].first(values) if i in self.scans else (bind_eqn(eqn, values), [])
            env |= dict(zip(eqn.outvars, outs, strict=True)) | {(i, j): value for j, value in enumerate(crossing)}
        outs = [env_value(env, v) if e else None for v, e in zip(self.jaxpr.outvars, self.early, strict=True)]
        return outs, [env[key] for key in self.crossing]

    def second(self, args: Sequence[Any], crossing: Sequence[jax.Array]) -> list[Any]:
        """Return the late outputs, from the inputs that are not handed and from what crossed."""
        env: dict[Any, Any] = {**self.consts, **dict(zip(self.jaxpr.invars, args, strict=True))}
        env |= dict(zip(self.crossing, crossing, strict=True))
        for i, scan in reversed(self.second_steps):
            eqn = self.jaxpr.eqns[i]
            if scan is None:
                env |= dict(zip(eqn.outvars, bind_eqn(eqn, [env_value(env, v) for v in eqn.invars]), strict=True))
                continue
            values = [env_value(env, v) if r else None for v, r in zip(eqn.invars, scan.second_reads, strict=True)]
            outs = scan.second(values, [env[i, j] for j in range(len(scan.crossing))])
            env |= {v: out for v, out in zip(eqn.outvars, outs, strict=True) if out is not None}
        return [env_value(env, v) if l else None for v, l in zip(self.jaxpr.outvars, self.late, strict=True)]


class _ScanCut:
    """A scan in two: a loop for the results `early`, and a loop over the values that it hands on, for `late`."""

    def __init__(self, eqn: core.JaxprEqn, early: Mask, late: Mask, constant: set[core.Var]):
        params = eqn.params
        self.options = {name: params[name] for name in ("length", "reverse", "unroll")}
        self.num_consts, self.num_carry = extents(eqn)
        body, loop = params["jaxpr"], slice(self.num_consts, self.num_consts + self.num_carry)
        fixed = [is_literal(v) or v in constant for v in eqn.invars]
        fixed[loop] = [False] * self.num_carry
        handed = [False] * len(fixed)
        handed[loop] = early[: self.num_carry]  # demand has closed them over the iterations
        while True:  # until the carries that the second loop reads are the ones that it carries
            self.cut = _Cut(body, early, late, handed=handed, fixed=fixed)
            carried = [a or b for a, b in zip(late, self.cut.second_reads[loop], strict=False)]
            if carried == late[: self.num_carry]:
                break
            late = [*carried, *late[self.num_carry :]]
        self.early, self.late = early, late
        self.second_reads = self.cut.second_reads.copy()
        self.second_reads[loop] = late[: self.num_carry]
        length = params["length"]
        self.crossing = [jax.ShapeDtypeStruct((length, *s.shape), s.dtype) for s in self.cut.crossing.values()]

    def _run(self, step: Callable, mask: Mask, values: list[Any], handed: Sequence[jax.Array]) -> tuple[list[Any], Any]:
        """Return (results, values that cross) of the loop over outs, crossing = step(inputs, values handed on)."""
        consts, start = values[: self.num_consts], values[self.num_consts :]
        carry = [value if m else None for value, m in zip(start, mask[: self.num_carry], strict=False)]

        def body(carry: list, xs: tuple) -> tuple[list, tuple]:
            outs, crossing = step([*consts, *carry, *xs[0]], xs[1])
            return outs[: self.num_carry], (outs[self.num_carry :], crossing)

        carry, (ys, crossing) = jax.lax.scan(body, carry, (start[self.num_carry :], handed), **self.options)
        return [*carry, *ys], crossing

    def first(self, values: list[Any]) -> tuple[list[Any], list[jax.Array]]:
        return self._run(lambda args, _: self.cut.first(args), self.early, values, [])

    def second(self, values: list[Any], crossing: Sequence[jax.Array]) -> list[Any]:
        return self._run(lambda args, handed: (self.cut.second(args, handed), None), self.late, values, crossing)[0]


def _shape(v: Any) -> Shape:
    return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)


def _num_bytes(shape: Shape) -> int:
    return shape.size * shape.dtype.itemsize


def _is_constant(eqn: core.JaxprEqn, constant: set[core.Var]) -> bool:
    return all(v in constant for v in eqn.outvars)


def _is_view(eqn: core.JaxprEqn) -> bool:
    """Return whether the result is cheap to make again from an operand that is no larger."""
    size = lambda v: _num_bytes(_shape(v))  # noqa: E731
    is_view = eqn.primitive.name in (*VIEWS, BARRIER)
    return is_view and sum(map(size, eqn.invars)) <= sum(map(size, eqn.outvars))


def _is_opaque(eqn: core.JaxprEqn) -> bool:
    """Return whether the equation is more than one operation: a loop, a branch, a kernel."""
    params = [p for value in eqn.params.values() for p in (value if isinstance(value, tuple | list) else (value,))]
    return eqn.primitive.name in FOREIGN or any(isinstance(p, core.Jaxpr | core.ClosedJaxpr) for p in params)


def _inseparable(eqn: core.JaxprEqn) -> ConfigError:
    results = ", ".join(f"{shape.dtype}{list(shape.shape)}" for shape in map(_shape, eqn.outvars))
    return ConfigError(
        f"the backward of a layer has no I and W: {eqn.primitive.name}, with results {results}, yields the gradients "
        "of the layer's input and of its weights together. Write it with jax.lax.scan, or use a schedule of whole "
        "backwards, such as schedule=interleaved."
    )
