"""The trained parameters of a model: trees with None for frozen parameters.

A frozen parameter is an argument like any other, but is not differentiated. So it has no gradient,
no sum of gradients, no optimizer state and no weight-gradient work. Trees of gradients and of
optimizer state have None in its place.
"""

import math
from typing import Any

import jax

from ppctl.errors import ConfigError

Tree = Any
AVERAGE, MOMENTS = "average", "moments"  # parts of an optimizer's state that has an average


def is_none(a: Any) -> bool:
    return a is None


def trained_part(tree: Tree, trainable: Tree) -> Tree:
    """Return a tree with None for every frozen leaf.

    trainable: a tree of booleans like the tree; one boolean may stand for a subtree.

    >>> trained_part({"w": 1, "b": {"x": 2, "y": 3}}, {"w": False, "b": True})
    {'b': {'x': 2, 'y': 3}, 'w': None}
    """
    if trainable is True:
        return tree
    # None: frozen already, or on another device
    nothing = lambda part: jax.tree.map(lambda _: None, part, is_leaf=is_none)  # noqa: E731
    keep = lambda is_trained, part: part if is_trained else nothing(part)  # noqa: E731
    return jax.tree.map(keep, trainable, tree)


def with_trained(part: Tree, whole: Tree) -> Tree:
    """Return `whole` with its trained leaves, arrays or None, replaced by those of `part`.

    >>> with_trained({"w": None, "b": 5}, {"w": 1, "b": 2})
    {'b': 5, 'w': 1}
    """
    return jax.tree.map(lambda old, new: old if new is None else new, whole, part, is_leaf=is_none)


def averaged(state: Tree) -> Tree:
    """Return a state with the average, if it has one, in place of the trained parameters.

    >>> averaged({"params": {"w": 1}, "optimizer": {"average": {"w": 5}}})
    {'params': {'w': 5}, 'optimizer': {'average': {'w': 5}}}
    """
    held = state.get("optimizer")
    if not isinstance(held, dict) or AVERAGE not in held:
        return state
    return {**state, "params": with_trained(held[AVERAGE], state["params"])}


def trained_flags(tree: Tree, trainable: Tree) -> tuple[bool, ...]:
    """Return a flag for each leaf of a tree: whether it is trained."""
    spread = lambda is_trained, part: jax.tree.map(lambda _: is_trained, part)  # noqa: E731
    return tuple(jax.tree.leaves(jax.tree.map(spread, trainable, tree)))


def trained_share(layers: Tree, trainable: Tree) -> float:
    """Return the trained share, 0..1, of the weights of stacked layers.

    It is also the share of the weight-gradient work that is done. Only matrices count, as their
    gradients are matrix products. trainable: flags of one layer.

    >>> of = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
    >>> layers = {"w": of(2, 4, 4), "a": of(2, 4, 1)}
    >>> trained_share(layers, {"w": False, "a": True}), trained_share(layers, True)
    (0.2, 1.0)
    """
    flags = trained_flags(layers, trainable)
    shapes = (leaf.shape for leaf in jax.tree.leaves(layers))
    sizes = [math.prod(shape[1:]) if len(shape) > 2 else 0 for shape in shapes]
    if all(flags):
        return 1.0
    trained = sum(size for size, is_trained in zip(sizes, flags, strict=True) if is_trained)
    return trained / max(1, sum(sizes))


def checked_flags(params: Tree, trainable: Tree) -> tuple[bool, ...]:
    """Return `trained_flags`. ConfigError if the trees differ, or all parameters are frozen."""
    try:
        flags = trained_flags(params, trainable)
    except ValueError as error:
        given, expected = map(jax.tree.structure, (trainable, params))
        raise ConfigError(
            f"trainable differs from the tree of the parameters: it is {given}, they are "
            f"{expected}. Give each parameter True or False; one boolean may stand for a subtree."
        ) from error
    other = next((flag for flag in flags if not isinstance(flag, bool)), None)
    if other is not None:
        raise ConfigError(f"trainable has {other!r}. Give each parameter True or False.")
    if not any(flags):
        raise ConfigError("trainable leaves no parameter to train. Set it to True for some.")
    return flags
