"""The formulas of an optimizer's updates, read from its traced program.

The formula of an update lists the parameters that affect the update, and states whether it is
elementwise. The arrays of an elementwise update may be stacked, padded and divided. Nothing is
computed.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ppctl.errors import ConfigError
from ppctl.executors.parameter_layout import names_of
from ppctl.executors.stage.jaxpr_tools import called_program, is_literal
from ppctl.model.stack import shapes_like

Tree = Any
ARITHMETIC = ("add", "sub", "mul", "div", "neg", "sign", "abs", "square", "integer_pow", "pow")
ARITHMETIC += ("sqrt", "rsqrt", "cbrt", "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic")
COMPARISONS = ("max", "min", "select_n", "clamp", "eq", "ne", "lt", "le", "gt", "ge", "is_finite")
COMPARISONS += ("and", "or", "not", "xor", "convert_element_type", "copy", "stop_gradient")
ELEMENTWISE = frozenset(ARITHMETIC + COMPARISONS)
# operations that keep equal entries equal
UNIFORM = ELEMENTWISE | {"broadcast_in_dim", "reshape", "squeeze", "transpose"}
RANDOM = ("random_", "threefry", "rng_")  # prefixes of JAX's random operations
# parameters of JAX's operations that do not change a formula
SHAPES = ("shape", "broadcast_dimensions", "sharding", "weak_type")


class Formula(NamedTuple):
    """The parameters and operations that determine an array of an optimizer's update or state.

    owners: numbers of the parameters that affect the array, also through their gradients and state.
    is_elementwise: whether each entry depends only on the same entry of the owners. Without owners:
    whether all entries are equal, and independent of shapes. text: a hash of the operations, which
    does not depend on the shapes of arrays.
    """

    owners: frozenset[int]
    is_elementwise: bool
    text: int


class Mixing(ConfigError):
    """Error: the update of a parameter depends on other parameters, or on random numbers."""


class Place(NamedTuple):
    """The place of a leaf in an optimizer's state."""

    names: tuple[str, ...]
    owner: int | None  # index of its parameter; None: shared, such as a count of steps
    slot: str  # names without those of the parameter, such as "0/mu"


def places_in(state: Tree, params: Tree) -> list[Place]:
    """Return the place of each leaf of a state, in order; params: None for frozen parameters.

    >>> places_in({"mu": {"w": 1.0, "none": {}}, "count": 2}, {"w": 0.0, "none": {}})[1]
    Place(names=('mu', 'w'), owner=0, slot='mu')
    """
    spots, treedef = jax.tree.flatten(params, is_leaf=lambda a: a is None)
    numbers = (np.cumsum([spot is not None for spot in spots]) - 1).tolist()
    counts_of = lambda node: _leaf_counts(treedef, jax.tree.structure(node))  # noqa: E731
    places = []
    for path, node in jax.tree.leaves_with_path(state, lambda node: counts_of(node) is not None):
        above, counts = names_of(path), counts_of(node)
        if counts is None:
            places.append(Place(above, None, "/".join(above)))
            continue
        owners = [i for i, count in enumerate(counts) for _ in range(count)]
        numbered = jax.tree.leaves_with_path(jax.tree.unflatten(treedef, numbers))
        lengths = [len(names_of(path)) for path, _ in numbered]
        for (below, _), i in zip(jax.tree.leaves_with_path(node), owners, strict=True):
            names = names_of(below)
            slot = "/".join((*above, *names[lengths[i] :]))
            places.append(Place((*above, *names), numbers[i], slot))
    return places


def _leaf_counts(params: Any, state: Any) -> list[int] | None:
    """Return the number of state leaves at each parameter leaf; None if the structures differ.

    Both arguments are treedefs. A masked part of the parameters has no leaves in the state.
    """
    kind = state.node_data() and state.node_data()[0]
    if kind is optax.MaskedNode:
        return [0] * params.num_leaves
    if jax.tree_util.treedef_is_leaf(params) and params.num_leaves:  # {} is a leaf without leaves
        return None if _has_records(state) else [state.num_leaves]
    pairs = params.node_data(), state.node_data(), params.children(), state.children()
    if pairs[0] != pairs[1] or len(pairs[2]) != len(pairs[3]):
        return None
    counts = [_leaf_counts(*children) for children in zip(*pairs[2:], strict=True)]
    return None if None in counts else [n for each in counts if each is not None for n in each]


def _has_records(state: Any) -> bool:
    """Return whether a treedef contains named tuples, which optax makes for whole trees."""
    kind = state.node_data() and state.node_data()[0]
    is_record = hasattr(kind, "_fields") and kind is not optax.MaskedNode
    return is_record or any(map(_has_records, state.children()))


def has_state(optimizer: optax.GradientTransformation, params: Tree, kind: type) -> bool:
    """Return whether the optimizer's state contains this kind, such as ZeroNansState."""
    state = jax.eval_shape(optimizer.init, params)
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return any(isinstance(leaf, kind) for leaf in leaves)


def update_formulas(optimizer: optax.GradientTransformation, params: Tree) -> list[Formula]:
    """Return the formula of each parameter's update and state; params: arrays or shapes.

    Raises Mixing, a ConfigError, if an update depends on other parameters or on random numbers. The
    check of `optax.apply_if_finite` does not count as a dependency: see `LayerOptimizer`.
    """
    # 1. the program of an update
    update = optax.with_extra_args_support(optimizer).update
    params = shapes_like(params)
    state = jax.eval_shape(optimizer.init, params)
    norm = jax.ShapeDtypeStruct((), jnp.float32)
    traced = jax.make_jaxpr(lambda g, s, p, n: update(g, s, p, norm=n), return_shape=True)
    closed, out = traced(params, state, params, norm)
    # 2. the formulas of the program's inputs
    paths = [names_of(path) for path, _ in jax.tree.leaves_with_path(params)]
    numbers = range(len(paths))
    inputs = [("g", i) for i in numbers] + [(slot, i) for _, i, slot in places_in(state, params)]
    inputs += [*(("p", i) for i in numbers), ("norm", None)]
    owners = (frozenset[int]() if i is None else frozenset({i}) for _, i in inputs)
    given = [Formula(of, True, hash(kind)) for of, (kind, _) in zip(owners, inputs, strict=True)]
    # 3. the formulas of the program's outputs, by owner
    sizes = [a.shape for a in jax.tree.leaves(params)]
    reader = _Reader(sizes, ignores_finite=has_state(optimizer, params, optax.ApplyIfFiniteState))
    after = [*enumerate(paths), *((i, names) for names, i, _ in places_in(out[1], params))]
    by_owner: dict[int, list[Formula]] = {i: [] for i in numbers}
    for formula, (owner, names) in zip(reader.outputs(closed, given), after, strict=True):
        others = formula.owners - {owner}
        if others:
            raise Mixing(f"{'.'.join(names)} depends on {'.'.join(paths[min(others)])}")
        if owner is not None:
            by_owner[owner].append(formula)
    return [_joined(None, of)._replace(owners=frozenset()) for of in by_owner.values()]


class _Reader:
    """Computes the formulas of a program's values; ignores_finite: is_finite is no dependency."""

    def __init__(self, sizes: Sequence[tuple[int, ...]], *, ignores_finite: bool):
        self.sizes, self.ignores_finite = sizes, ignores_finite

    def outputs(self, closed: Any, given: Sequence[Formula]) -> list[Formula]:
        """Return the formulas of a program's outputs; given: those of its inputs."""
        jaxpr, constants = closed.jaxpr, [*map(np.asarray, closed.consts)]
        env: dict[Any, Formula] = dict(zip(jaxpr.invars, given, strict=True))
        for v, a in zip(jaxpr.constvars, constants, strict=True):
            env[v] = Formula(frozenset(), not a.ndim, hash(a.tobytes()))

        def read(v: Any) -> Formula:
            return Formula(frozenset(), True, hash(str(v.val))) if is_literal(v) else env[v]

        for eqn in jaxpr.eqns:
            values, called = [read(v) for v in eqn.invars], called_program(eqn)
            if called is not None:
                found = self.outputs(called, values)
            elif eqn.primitive.name == "cond":  # each output, joined over all branches
                branches = [self.outputs(each, values[1:]) for each in eqn.params["branches"]]
                each_output = zip(*branches, strict=True)
                found = [_joined("cond", (values[0], *each)) for each in each_output]
            else:
                found = [self._formula(eqn, values)] * len(eqn.outvars)
            env |= zip(eqn.outvars, found, strict=True)
        return [read(v) for v in jaxpr.outvars]

    def _formula(self, eqn: Any, values: Sequence[Formula]) -> Formula:
        name = eqn.primitive.name
        if name.startswith(RANDOM):
            raise Mixing("it draws random numbers")
        kept = {key: str(value) for key, value in eqn.params.items() if key not in SHAPES}
        found = _joined((name, *sorted(kept.items())), values)
        if name == "is_finite" and self.ignores_finite:
            return Formula(frozenset(), True, found.text)
        owned = [v for v, f in zip(eqn.invars, values, strict=True) if f.owners]
        if not owned:
            are_scalars = not any(v.aval.shape for v in (*eqn.invars, *eqn.outvars))
            is_uniform = found.is_elementwise and (name in UNIFORM or are_scalars)
            return found._replace(is_elementwise=is_uniform)
        shapes = {tuple(v.aval.shape) for v in (*owned, *eqn.outvars)}
        whole = {tuple(self.sizes[i]) for i in found.owners}
        is_elementwise = found.is_elementwise and name in ELEMENTWISE and shapes == whole
        return found._replace(is_elementwise=is_elementwise)


def _joined(name: Any, values: Sequence[Formula]) -> Formula:
    """Return the formula of an operation: elementwise if all its values are."""
    owners = frozenset[int]().union(*(f.owners for f in values))
    text = hash((name, *(f.text for f in values)))
    return Formula(owners, all(f.is_elementwise for f in values), text)


def check_separate(optimizer: optax.GradientTransformation, params: Tree) -> None:
    """Raise Mixing if an update depends on another parameter, or on its copy in another layer.

    params: shapes {"embed_head", "layers"} with one layer. The check puts two layers in place of
    one: a tuple of two layers or, if that does not fit a mask, a tuple for each parameter.
    """
    pair = lambda a: (a, a)  # noqa: E731
    both = {**params, "layers": pair(params["layers"])}
    each = {**params, "layers": jax.tree.map(pair, params["layers"])}
    for tree in (both, each):
        try:
            update_formulas(optimizer, tree)
        except Mixing:
            raise
        except Exception:  # the tree does not fit the optimizer
            continue
        return
    update_formulas(optimizer, params)
