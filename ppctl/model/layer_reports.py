"""Counts that a model reports, such as tokens of each expert, and the parameters that they update.

Counts take the place of a gradient: `report` is the identity on a parameter, and the parameter's
"gradient" is the counts. So executors sum counts as they sum gradients: once, however often a
forward is recomputed. Counts are not divided by the number of losses.

Parameters in `StackOptions.updates` ("counted parameters") keep their dtype and stay out of the
global norm and the optimizer. After a step each becomes update(parameter, counts), unless the
optimizer skips the step. Source: flax's `_overwrite_with_gradient`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.errors import ConfigError
from ppctl.model.trainable_parameters import is_none, trained_flags

Tree = Any
Updates = Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]]
COUNTS = "counts"  # name of the counts among a step's metrics
_traced = Counter[str]()  # number of reports traced by "calls", "forwards" and "backwards"


@jax.custom_vjp
def _reported(parameter: jax.Array, counts: jax.Array) -> jax.Array:
    _traced["calls"] += 1
    return parameter


def _forward(parameter: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    _traced["forwards"] += 1
    return parameter, counts


def _backward(counts: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
    _traced["backwards"] += 1
    return jnp.asarray(counts, g.dtype), None  # constant counts may be a plain number


_reported.defvjp(_forward, _backward)


def report(parameter: jax.Array, counts: jax.Array) -> jax.Array:
    """Return the parameter unchanged, with `counts` as its "gradient".

    For layers, embedding and head of a `Stack` that declares the parameter in `updates`.

    Args:
        parameter: A parameter of the layer, or of embedding and head.
        counts: Sums over the function's examples, in the parameter's shape. Inside a divided stage:
            this device's summand.

    Returns:
        The parameter, which must reach the function's output by differentiable operations. If only
        integers depend on it, add `0 * result.sum()` to the output.

    Raises:
        ConfigError: The shapes differ.

    >>> bias, counts = jnp.zeros(2), jnp.array([3.0, 1.0])
    >>> jax.grad(lambda bias: (2 * report(bias, counts)).sum())(bias).tolist()
    [3.0, 1.0]
    """
    parameter, counts = jnp.asarray(parameter), jnp.asarray(counts)
    if parameter.shape != counts.shape:
        raise ConfigError(
            f"report has counts {list(counts.shape)} for a parameter {list(parameter.shape)}. "
            "Sum them to the parameter's shape."
        )
    return _reported(parameter, jax.lax.stop_gradient(counts.astype(parameter.dtype)))


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _name_in_updates(path: tuple) -> str:
    """Return the name in `updates` of a leaf of {"embed_head", "layers"}."""
    return _name(path[1:] if path[0].key == "layers" else path)


def cast_layers(layers: Tree, dtype: Any, uncast: Collection[str]) -> Tree:
    """Return layers, arrays or shapes, cast to `dtype`; parameters named in `uncast` stay."""

    def cast(path: tuple, a: Any) -> Any:
        if _name(path) in uncast:
            return a
        is_shape = isinstance(a, jax.ShapeDtypeStruct)
        return jax.ShapeDtypeStruct(a.shape, jnp.dtype(dtype)) if is_shape else a.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, layers)


def cast_embed_head(embed_head: Tree, dtype: Any, uncast: Collection[str]) -> Tree:
    """Return `cast_layers` of embedding and head, whose names begin with "embed_head/"."""
    return cast_layers({"embed_head": embed_head}, dtype, uncast)["embed_head"]


def divided_by(grads: Tree, number: jax.Array, updates: Updates) -> Tree:
    """Return gradients {"embed_head", "layers"} divided by a number; counts stay undivided."""

    def divide(path: tuple, g: jax.Array) -> jax.Array:
        return g if is_counted(path, updates) else g / number.astype(g.dtype)

    return jax.tree_util.tree_map_with_path(divide, grads)


def is_counted(path: tuple, updates: Updates) -> bool:
    """Return whether a leaf of {"embed_head", "layers"} is a parameter in `updates`."""
    return bool(updates) and _name_in_updates(path) in updates


def without_counted(tree: Tree, updates: Updates) -> Tree:
    """Return a tree {"embed_head", "layers"} with None for the parameters in `updates`."""
    if not updates:
        return tree
    return jax.tree_util.tree_map_with_path(
        lambda path, a: None if is_counted(path, updates) else a, tree
    )


def counted_part(tree: Tree, updates: Updates) -> Tree:
    """Return a tree {"embed_head", "layers"} with None for leaves that are not counted."""
    return jax.tree_util.tree_map_with_path(
        lambda path, a: a if is_counted(path, updates) else None, tree
    )


def counts_by_name(counts: Tree) -> dict[str, jax.Array]:
    """Return the leaves of `counted_part` by the names in `updates`."""
    return {_name_in_updates(path): a for path, a in jax.tree_util.tree_leaves_with_path(counts)}


def with_updated(
    params: Tree, grads: Tree, updates: Updates, num_stacked: int, *, is_applied: Any = True
) -> Tree:
    """Return parameters, with the counted ones updated by the counts in `grads`.

    num_stacked: number of leading axes of the leaves of "layers" that stack the layers. is_applied:
    whether the optimizer applies the step; otherwise all parameters stay.
    """

    def one(path: tuple, p: jax.Array, counts: jax.Array | None) -> jax.Array:
        if counts is None or not is_counted(path, updates):
            return p
        update = updates[_name_in_updates(path)]
        for _ in range(num_stacked if path[0].key == "layers" else 0):
            update = jax.vmap(update)
        return jnp.where(is_applied, update(p, counts).astype(p.dtype), p)

    if not updates:
        return params
    return jax.tree_util.tree_map_with_path(one, params, grads, is_leaf=is_none)


def num_reports() -> int:
    """Return the number of reports in functions traced so far, without their derivatives."""
    return _traced["calls"]


def check_reports(stack: Any, params: Tree, x: Any, batch: Tree, *, outside: bool) -> None:
    """Raise ConfigError unless the reports of a stack's functions fit its `updates`.

    params: {"embed_head", "layers"}, with one layer. params, x, batch: shapes. outside: whether
    embedding or head report counts.
    """
    # 1. the declared parameters
    updates, paths = stack.options.updates, jax.tree_util.tree_leaves_with_path(params)
    which = {part: stack.trains(part) for part in params}
    trained = trained_flags(params, which)
    flags = dict(zip((_name_in_updates(path) for path, _ in paths), trained, strict=True))
    for name in updates:
        if name not in flags:
            of_layers = [each for each in flags if not each.startswith("embed_head/")]
            raise ConfigError(
                f"updates names {name}, but a layer has {', '.join(of_layers)}. Use one of these."
            )
        if not flags[name]:
            raise ConfigError(f"updates names {name}, which trainable freezes. Set it to True.")
    # 2. the reports of a function, forwards and backwards
    (embed, head), layers = stack.outer, map(stack.layer_of, range(stack.num_layers))
    calls: list[tuple[Callable, Tree, tuple]]
    calls = [(layer, params["layers"], (x,)) for layer in dict.fromkeys(layers)]
    if outside:
        calls.append((embed, params["embed_head"], (batch["inputs"],)))
        calls.append((lambda *args: head(*args)[0], params["embed_head"], (x, batch["targets"])))
    for function, w, given in calls:
        _traced.clear()
        jax.eval_shape(partial(_pulled, function), w, *given)
        what = "a layer" if w is params["layers"] else "the embedding or the head"
        if _traced["forwards"] and not updates:
            raise ConfigError(
                f"{what} reports counts, but the stack declares no parameter for them: the "
                "optimizer would use them as a gradient. Use StackOptions(updates={name: update})."
            )
        if _traced["backwards"] < _traced["forwards"]:
            raise ConfigError(
                f"{what} reports counts, but its output has no derivative in the result of "
                "ppctl.report: the counts would be lost. Add 0 * result.sum() to the output."
            )


def _pulled(function: Callable, w: Tree, *given: Tree) -> Tree:
    """Return the gradients of w for an output's gradient of ones."""
    y, pull = jax.vjp(lambda w: function(w, *given), w)
    return pull(jnp.ones_like(y))
