"""Programs as JAX traces them, taken apart and run equation by equation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

Mask = list[bool]

CALLS = (  # primitive -> the parameter that holds what it calls
    dict.fromkeys(("jit", "pjit", "checkpoint", "remat", "remat2"), "jaxpr")
    | dict.fromkeys(("closed_call", "core_call", "eval_jaxpr", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr")
    | {"custom_vjp_call_jaxpr": "fun_jaxpr"}
)
SCATTER_HINTS = ("indices_are_sorted", "unique_indices", "mode")
BARRIER = "optimization_barrier"


def flatten(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Return the same program without calls and casts that change nothing, in the bodies of its scans too."""
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in closed.in_avals]
    return jax.make_jaxpr(lambda *args: _inline(closed.jaxpr, closed.consts, args))(*shapes)


def _inline(jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        values, name = [env_value(env, v) for v in eqn.invars], eqn.primitive.name
        if name == BARRIER or (eqn.params.get("differentiated") and eqn.params["prevent_cse"]):
            values = [jax.lax.optimization_barrier(value) for value in values]  # one by one: each may be in I or in W
        if name in CALLS:
            called = eqn.params[CALLS[name]]
            is_closed = isinstance(called, core.ClosedJaxpr)
            outs = _inline(called.jaxpr, called.consts, values) if is_closed else _inline(called, (), values)
        elif name == BARRIER or _changes_nothing(eqn):
            outs = values
        else:
            outs = bind_eqn(eqn, values, **({"jaxpr": flatten(eqn.params["jaxpr"])} if is_scan(eqn) else {}))
        env |= dict(zip(eqn.outvars, outs, strict=True))
    return [env_value(env, v) for v in jaxpr.outvars]


def run_jaxpr(closed: core.ClosedJaxpr, args: Sequence[Any], wanted: Mask) -> list[Any]:
    """Return the outputs that are wanted, the others None. Inputs that these do not need may be anything."""
    jaxpr = closed.jaxpr
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
    masks, _ = demand(jaxpr, wanted)
    for i in sorted(masks):
        eqn = jaxpr.eqns[i]
        env |= dict(zip(eqn.outvars, bind_eqn(eqn, [env_value(env, v) for v in eqn.invars]), strict=True))
    return [env_value(env, v) if w else None for v, w in zip(jaxpr.outvars, wanted, strict=True)]


def add_outputs(closed: core.ClosedJaxpr, args: Sequence[Any], totals: Sequence[jax.Array]) -> list[jax.Array]:
    """Return each of `totals` with the output in its place added.

    What the program scatters into zeros is scattered into the total: no array of that size is made, read and added.
    """
    jaxpr = closed.jaxpr
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
    made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    for eqn in jaxpr.eqns:
        env |= dict(zip(eqn.outvars, bind_eqn(eqn, [env_value(env, v) for v in eqn.invars]), strict=True))

    def added(total: jax.Array, v: Any) -> jax.Array:
        eqn = None if is_literal(v) else made_by.get(v)
        if eqn is None or not _scatters_into_zeros(eqn, made_by):
            return total + env_value(env, v).astype(total.dtype)
        _, indices, updates = (env_value(env, each) for each in eqn.invars)
        how = {name: eqn.params[name] for name in ("dimension_numbers", *SCATTER_HINTS)}
        return jax.lax.scatter_add(total, indices, updates.astype(total.dtype), **how)

    return [added(*each) for each in zip(totals, jaxpr.outvars, strict=True)]


def _scatters_into_zeros(eqn: core.JaxprEqn, made_by: dict[core.Var, core.JaxprEqn]) -> bool:
    table: Any = eqn.invars[0] if eqn.primitive.name == "scatter-add" else None
    if table is None or is_literal(table) or table not in made_by:
        return False
    filled = made_by[table]
    value: Any = filled.invars[0] if filled.primitive.name == "broadcast_in_dim" else None
    return value is not None and is_literal(value) and not value.val


def bind_eqn(eqn: core.JaxprEqn, values: Sequence[Any], **changes: Any) -> list[Any]:
    params = eqn.primitive.get_bind_params({**eqn.params, **changes})
    with eqn.ctx.manager:
        outs = eqn.primitive.bind(*values, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def demand(jaxpr: core.Jaxpr, outs: Mask, always: frozenset[int] = frozenset()) -> tuple[dict[int, Mask], Mask]:
    """Return (by equation the results that the outputs `outs` need, the inputs); equations `always` are needed too."""
    need, masks = select_variables(jaxpr.outvars, outs), {}
    for i, eqn in reversed([*enumerate(jaxpr.eqns)]):
        whole = has_effects(eqn) or i in always
        mask = [whole or v in need for v in eqn.outvars]
        if not any(mask) and not whole:
            continue
        reads = [True] * len(eqn.invars)
        if is_scan(eqn):
            body, (first, num_carry) = eqn.params["jaxpr"].jaxpr, extents(eqn)
            while True:  # until the carries that an iteration needs are the ones that it leaves
                _, reads = demand(body, mask)
                carried = [a or b for a, b in zip(mask, reads[first : first + num_carry], strict=False)]
                if carried == mask[:num_carry]:
                    break
                mask = [*carried, *mask[num_carry:]]
            reads[first : first + num_carry] = mask[:num_carry]
        masks[i] = mask
        need |= select_variables(eqn.invars, reads)
    return masks, [v in need for v in jaxpr.invars]


def depending_only(jaxpr: core.Jaxpr, inputs: Mask) -> set[core.Var]:
    """Return the variables that depend on no input but the chosen ones."""
    found = {*jaxpr.constvars, *select_variables(jaxpr.invars, inputs)}
    for eqn in jaxpr.eqns:
        if not has_effects(eqn) and all(is_literal(v) or v in found for v in eqn.invars):
            found |= set(eqn.outvars)
    return found


def select_variables(variables: Sequence[Any], mask: Mask) -> set[core.Var]:
    return {v for v, m in zip(variables, mask, strict=True) if m and not is_literal(v)}


def env_value(env: dict[Any, Any], v: Any) -> Any:
    return v.val if is_literal(v) else env.get(v)


def is_literal(v: Any) -> bool:
    return isinstance(v, core.Literal)


def has_effects(eqn: core.JaxprEqn) -> bool:
    """Tell whether an equation does more than compute results; that it names an axis of the mesh is none."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def is_scan(eqn: core.JaxprEqn) -> bool:
    return eqn.primitive.name == "scan"


def extents(eqn: core.JaxprEqn) -> tuple[int, int]:
    """Return (number of constants, number of carries) among the inputs of a scan; the others are scanned over."""
    params = eqn.params
    if "ft_in" in params:  # jax 0.12
        consts, carry, _ = (len(list(part)) for part in params["ft_in"].update(eqn.invars).unpack())
        return consts, carry
    return params["num_consts"], params["num_carry"]


def _changes_nothing(eqn: core.JaxprEqn) -> bool:
    """Tell whether an equation rounds to the precision that a value has anyway, which narrow types do not."""
    if eqn.primitive.name != "reduce_precision":
        return False
    rounded: Any = eqn.invars[0]
    dtype = jnp.finfo(rounded.aval.dtype)
    return dtype.bits >= 32 and eqn.params["exponent_bits"] >= dtype.nexp and eqn.params["mantissa_bits"] >= dtype.nmant
