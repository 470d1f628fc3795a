"""Which parameters of a model are trained: trees in which all others are None.

What is frozen is an argument of a function like any other, and nothing differentiates with respect to it. So it has no
gradient, no sum of gradients, no state of an optimizer, and no work in W; trees of these have None in its place.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from ppctl.errors import ConfigError

Tree = Any


def trained_part(tree: Tree, trainable: Tree) -> Tree:
    """Return a tree with None for every leaf that is frozen.

    trainable: booleans like the tree, of which one may stand for all below it.

    >>> trained_part({"w": 1, "b": {"x": 2, "y": 3}}, {"w": False, "b": True})
    {'b': {'x': 2, 'y': 3}, 'w': None}
    """
    if trainable is True:
        return tree
    is_none = lambda a: a is None  # noqa: E731  frozen already, or held elsewhere
    nothing = lambda part: jax.tree.map(lambda _: None, part, is_leaf=is_none)  # noqa: E731
    return jax.tree.map(lambda is_trained, part: part if is_trained else nothing(part), trainable, tree)


def with_trained(part: Tree, whole: Tree) -> Tree:
    """Return `whole` with the leaves of a trained part in their places.

    >>> with_trained({"w": None, "b": 5}, {"w": 1, "b": 2})
    {'b': 5, 'w': 1}
    """
    return jax.tree.map(lambda old, new: old if new is None else new, whole, part)


def trained_flags(tree: Tree, trainable: Tree) -> tuple[bool, ...]:
    """Return for each leaf of a tree whether it is trained."""
    spread = lambda is_trained, part: jax.tree.map(lambda _: is_trained, part)  # noqa: E731
    return tuple(jax.tree.leaves(jax.tree.map(spread, trainable, tree)))


def trained_share(layers: Tree, trainable: Tree) -> float:
    """Return the share, 0..1, of the weights of stacked layers that is trained: what W has of its work.

    Weights are the matrices, whose gradients are products. trainable: as of a `Stack`, of a layer; True is 1.

    >>> layers = {"w": jax.ShapeDtypeStruct((2, 4, 4), "float32"), "a": jax.ShapeDtypeStruct((2, 4, 1), "float32")}
    >>> trained_share(layers, {"w": False, "a": True}), trained_share(layers, True)
    (0.2, 1.0)
    """
    flags, shapes = trained_flags(layers, trainable), [leaf.shape for leaf in jax.tree.leaves(layers)]
    sizes = [math.prod(shape[1:]) if len(shape) > 2 else 0 for shape in shapes]
    if all(flags):
        return 1.0
    return sum(size for size, is_trained in zip(sizes, flags, strict=True) if is_trained) / max(1, sum(sizes))


def checked_flags(params: Tree, trainable: Tree) -> tuple[bool, ...]:
    """Return `trained_flags` of parameters. ConfigError where the trees differ, or nothing is trained."""
    try:
        flags = trained_flags(params, trainable)
    except ValueError as error:
        given, expected = map(jax.tree.structure, (trainable, params))
        raise ConfigError(
            f"trainable is no tree of booleans like that of the parameters: it is {given}, they are {expected}. Give "
            "each parameter True or False; one may stand for all below it."
        ) from error
    other = next((flag for flag in flags if not isinstance(flag, bool)), None)
    if other is not None:
        raise ConfigError(f"trainable has {other!r}; of each parameter it must be True or False.")
    if not any(flags):
        raise ConfigError("trainable leaves no parameter to train. Set it True for some.")
    return flags
