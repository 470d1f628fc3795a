"""Tools that analyze jaxprs and run them equation by equation."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ppctl.model.stack import ADDS_TO_LAST

Mask = list[bool]
Tree = Any

# primitive -> the parameter with the called program
CALLS: dict[str, str] = dict.fromkeys(("jit", "pjit", "checkpoint", "remat", "remat2"), "jaxpr")
CALLS |= dict.fromkeys(("closed_call", "core_call", "eval_jaxpr"), "call_jaxpr")
CALLS |= dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), "call_jaxpr")
CALLS["custom_vjp_call_jaxpr"] = "fun_jaxpr"
SCATTER_HINTS = ("indices_are_sorted", "unique_indices", "mode")
BARRIER = "optimization_barrier"
VIEWS = ("transpose", "reshape", "squeeze", "expand_dims", "convert_element_type")
ADDITIONS = ("add", "add_any")
# primitive -> the parameter with the dtype of its result
DTYPE_OF_RESULT = {"dot_general": "preferred_element_type", "convert_element_type": "new_dtype"}


Rule = Callable[[core.JaxprEqn, list[Any]], list[Any]]  # equation, operands -> results


def interpret(closed: core.ClosedJaxpr, args: Sequence[Any], rule: Rule) -> list[Any]:
    """Return the outputs of a program whose equations `rule` runs."""
    jaxpr, env = closed.jaxpr, env_of(closed.jaxpr, closed.consts, args)
    for eqn in jaxpr.eqns:
        outs = rule(eqn, [env_value(env, v) for v in eqn.invars])
        env |= dict(zip(eqn.outvars, outs, strict=True))
    return [env_value(env, v) for v in jaxpr.outvars]


def retraced(closed: core.ClosedJaxpr, rule: Rule) -> core.ClosedJaxpr:
    """Return a trace of `interpret` with this rule, as a new program."""
    shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type)  # noqa: E731
    return jax.make_jaxpr(lambda *args: interpret(closed, args, rule))(*map(shape, closed.in_avals))


def called_program(eqn: core.JaxprEqn) -> core.ClosedJaxpr | None:
    """Return the program that an equation calls; None unless it is a call."""
    if eqn.primitive.name not in CALLS:
        return None
    called = eqn.params[CALLS[eqn.primitive.name]]
    return called if isinstance(called, core.ClosedJaxpr) else core.ClosedJaxpr(called, ())


def flatten(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Return the program without calls and no-op casts, also in the bodies of its scans."""
    return retraced(closed, _run_flat)


def _run_flat(eqn: core.JaxprEqn, values: list[Any]) -> list[Any]:
    name, called = eqn.primitive.name, called_program(eqn)
    if name == BARRIER or (eqn.params.get("differentiated") and eqn.params["prevent_cse"]):
        # one barrier for each value, because each may be in I or in W
        values = [*map(jax.lax.optimization_barrier, values)]
    if called is not None:
        return interpret(called, values, _run_flat)
    if name == BARRIER or _changes_nothing(eqn):
        return values
    body = {"jaxpr": flatten(eqn.params["jaxpr"])} if is_scan(eqn) else {}
    return bind_eqn(eqn, values, **body)


def run_jaxpr(closed: core.ClosedJaxpr, args: Sequence[Any], wanted: Mask) -> list[Any]:
    """Return the wanted outputs, None for others; unneeded inputs may be anything."""
    jaxpr, env = closed.jaxpr, env_of(closed.jaxpr, closed.consts, args)
    masks, _ = demand(jaxpr, wanted)
    for i in sorted(masks):
        env |= results_of(jaxpr.eqns[i], env)
    return masked_values(env, jaxpr.outvars, wanted)


def add_last_outputs(
    closed: core.ClosedJaxpr, args: Tree, own: Tree, total: Tree
) -> tuple[Tree, Tree]:
    """Return (first outputs, in the tree structure of `own`; `total` plus the other outputs)."""
    (first, own_def), (sums, total_def) = jax.tree.flatten(own), jax.tree.flatten(total)
    found = add_outputs(closed, jax.tree.leaves(args), [*[None] * len(first), *sums])
    others = jax.tree.unflatten(total_def, found[len(first) :])
    return jax.tree.unflatten(own_def, found[: len(first)]), others


def add_outputs(
    closed: core.ClosedJaxpr, args: Sequence[Any], totals: Sequence[jax.Array | None]
) -> list[Any]:
    """Return for each output of a program its total plus the output; without a total, the output.

    Where possible, the program starts a sum from the total instead of zeros: a scatter-add, a scan
    or a kernel. This saves making, reading and adding an array of the total's size. A product is
    computed in its total's dtype: it is rounded only once, and XLA lets cuBLAS add the total.
    """
    # 1. find sums that can start from a total, and products to compute in a total's dtype
    jaxpr, env = closed.jaxpr, env_of(closed.jaxpr, closed.consts, args)
    find, outvars = Origins(jaxpr), list[Any](jaxpr.outvars)
    begins: dict[core.Var, jax.Array] = {}  # sum -> total that it starts from
    dtypes: dict[core.Var, Any] = {}  # product or its view -> dtype of the total
    for k, (total, v) in enumerate(zip(totals, jaxpr.outvars, strict=True)):
        if total is None:
            continue
        *_, last = find.path(v, _changes_no_value)
        if find.is_sum_from_zeros(last, total.dtype):
            begins[last], outvars[k] = total, last
            continue
        *_, last = path = find.path(v, lambda eqn: eqn.primitive.name in VIEWS)
        if find.is_product(last) and _can_hold(total.dtype, last.aval.dtype):
            dtypes |= dict.fromkeys(path, total.dtype)
    # 2. run the program with these totals and dtypes
    for eqn in jaxpr.eqns:
        values, changes = [env_value(env, v) for v in eqn.invars], {}
        for v in eqn.outvars:
            if v in begins and eqn.primitive.name == "scatter-add":
                # a new call, because the traced equation has the program's dtype, not the total's
                how = {name: eqn.params[name] for name in ("dimension_numbers", *SCATTER_HINTS)}
                total, (_, places, updates) = begins[v], values
                env[v] = jax.lax.scatter_add(total, places, updates.astype(total.dtype), **how)
            elif v in begins:
                values[carry_place(eqn, v) if is_scan(eqn) else -1] = begins[v]
            elif v in dtypes and eqn.primitive.name in DTYPE_OF_RESULT:
                changes[DTYPE_OF_RESULT[eqn.primitive.name]] = jnp.dtype(dtypes[v])
        if not all(v in env for v in eqn.outvars):
            env |= dict(zip(eqn.outvars, bind_eqn(eqn, values, **changes), strict=True))

    # 3. add the other totals to their outputs
    def added(total: jax.Array | None, v: Any) -> Any:
        value = env_value(env, v)
        if total is None or (not is_literal(v) and v in begins):
            return value
        return total + jnp.asarray(value, total.dtype)

    return [added(*each) for each in zip(totals, outvars, strict=True)]


class Origins:
    """The equations that make a program's values; paths end at values with several readers."""

    def __init__(self, jaxpr: core.Jaxpr):
        self.made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        read = (*jaxpr.outvars, *(v for eqn in jaxpr.eqns for v in eqn.invars))
        self.uses = Counter(v for v in read if not is_literal(v))

    def path(self, v: Any, passes: Callable[[core.JaxprEqn], bool]) -> list[Any]:
        """Return [v, operand of v's equation, ...], as far as `passes` accepts the equations."""
        path = [v]
        while self.is_own(v) and passes(self.made_by[v]):
            v = next(a for a in self.made_by[v].invars if not is_literal(a))
            path.append(v)
        return path

    def is_own(self, v: Any) -> bool:
        """Return whether v is the result of an equation and has only one reader."""
        return not is_literal(v) and v in self.made_by and self.uses[v] == 1

    def is_product(self, v: Any) -> bool:
        return self.is_own(v) and self.made_by[v].primitive.name == "dot_general"

    def is_sum_from_zeros(self, v: Any, dtype: Any) -> bool:
        """Return whether v is a sum that begins with zeros, so that it could begin with a total."""
        if not self.is_own(v):
            return False
        eqn = self.made_by[v]
        if eqn.primitive.name == "scatter-add":
            return self.is_zeros(eqn.invars[0])
        if str(eqn.params.get("name")).endswith(ADDS_TO_LAST):
            return v.aval.dtype == dtype and self.is_zeros(eqn.invars[-1])
        if not is_scan(eqn) or eqn.outvars.index(v) >= extents(eqn)[1] or v.aval.dtype != dtype:
            return False
        place, body = carry_place(eqn, v), eqn.params["jaxpr"].jaxpr
        before, after = body.invars[place], body.outvars[eqn.outvars.index(v)]
        inside = Origins(body)
        if not inside.is_own(after):
            return False
        adds = inside.made_by[after]
        terms = {**dict.fromkeys(ADDITIONS, adds.invars), "scatter-add": adds.invars[:1]}
        is_only_added = before in terms.get(adds.primitive.name, ()) and inside.uses[before] == 1
        return is_only_added and self.is_zeros(eqn.invars[place])

    def is_zeros(self, v: Any) -> bool:
        if is_literal(v) or v not in self.made_by:
            return False
        filled = self.made_by[v]
        value: Any = filled.invars[0] if filled.primitive.name == "broadcast_in_dim" else None
        return value is not None and is_literal(value) and not value.val


def _changes_no_value(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation returns its operand, unchanged or cast."""
    operands: Any = eqn.invars
    if eqn.primitive.name == "mul":
        return any(is_literal(v) and v.val == 1 for v in operands)
    return eqn.primitive.name == "convert_element_type"


def _can_hold(dtype: Any, other: Any) -> bool:
    """Return whether `dtype` holds all values of `other`, a floating dtype."""
    return jnp.issubdtype(other, jnp.floating) and jnp.promote_types(dtype, other) == dtype


def bind_eqn(eqn: core.JaxprEqn, values: Sequence[Any], **changes: Any) -> list[Any]:
    params = eqn.primitive.get_bind_params({**eqn.params, **changes})
    with eqn.ctx.manager:
        outs = eqn.primitive.bind(*values, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def demand(
    jaxpr: core.Jaxpr, outs: Mask, always: frozenset[int] = frozenset()
) -> tuple[dict[int, Mask], Mask]:
    """Return masks of needed values: (results of each needed equation by its index, inputs).

    outs: mask of the needed outputs. always: indices of equations that run in any case, besides
    those with effects.
    """
    need, masks = select_variables(jaxpr.outvars, outs), {}
    for i, eqn in reversed([*enumerate(jaxpr.eqns)]):
        whole = has_effects(eqn) or i in always
        mask = [whole or v in need for v in eqn.outvars]
        if not any(mask) and not whole:
            continue
        reads = [True] * len(eqn.invars)
        if is_scan(eqn):
            body, (first, num_carry) = eqn.params["jaxpr"].jaxpr, extents(eqn)
            while True:  # until the mask includes all carries that an iteration reads
                _, reads = demand(body, mask)
                needed = reads[first : first + num_carry]
                carried = [a or b for a, b in zip(mask, needed, strict=False)]
                if carried == mask[:num_carry]:
                    break
                mask = [*carried, *mask[num_carry:]]
            reads[first : first + num_carry] = mask[:num_carry]
        masks[i] = mask
        need |= select_variables(eqn.invars, reads)
    return masks, [v in need for v in jaxpr.invars]


def depending_only(jaxpr: core.Jaxpr, inputs: Mask) -> set[core.Var]:
    """Return the variables that depend only on the masked inputs and constants."""
    found = {*jaxpr.constvars, *select_variables(jaxpr.invars, inputs)}
    for eqn in jaxpr.eqns:
        if not has_effects(eqn) and all(is_literal(v) or v in found for v in eqn.invars):
            found |= set(eqn.outvars)
    return found


def select_variables(variables: Sequence[Any], mask: Mask) -> set[core.Var]:
    return {v for v, m in zip(variables, mask, strict=True) if m and not is_literal(v)}


def env_of(jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> dict[Any, Any]:
    """Return the values of a program's constants and inputs by variable."""
    return dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))


def env_value(env: dict[Any, Any], v: Any) -> Any:
    return v.val if is_literal(v) else env.get(v)


def masked_values(env: dict[Any, Any], variables: Sequence[Any], mask: Mask) -> list[Any]:
    """Return the values of variables, None where not masked."""
    return [env_value(env, v) if m else None for v, m in zip(variables, mask, strict=True)]


def results_of(eqn: core.JaxprEqn, env: dict[Any, Any]) -> dict[core.Var, Any]:
    """Return the results of an equation by variable."""
    outs = bind_eqn(eqn, [env_value(env, v) for v in eqn.invars])
    return dict(zip(eqn.outvars, outs, strict=True))


def is_literal(v: Any) -> bool:
    return isinstance(v, core.Literal)


def has_effects(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation has effects besides naming an axis of the mesh."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def is_scan(eqn: core.JaxprEqn) -> bool:
    return eqn.primitive.name == "scan"


def extents(eqn: core.JaxprEqn) -> tuple[int, int]:
    """Return (number of constants, number of carries) of a scan; other inputs are scanned over."""
    params = eqn.params
    if "ft_in" in params:  # jax 0.12
        consts, carry, _ = (len(list(part)) for part in params["ft_in"].update(eqn.invars).unpack())
        return consts, carry
    return params["num_consts"], params["num_carry"]


def carry_place(eqn: core.JaxprEqn, v: core.Var) -> int:
    """Return the index of a scan's input that is the initial value of the carry v, a result."""
    return extents(eqn)[0] + eqn.outvars.index(v)


def _changes_nothing(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation rounds a value of 32 bits or more to the precision it has."""
    if eqn.primitive.name != "reduce_precision":
        return False
    rounded: Any = eqn.invars[0]
    dtype = jnp.finfo(rounded.aval.dtype)
    is_wide = dtype.bits >= 32 and eqn.params["mantissa_bits"] >= dtype.nmant
    return is_wide and eqn.params["exponent_bits"] >= dtype.nexp
