"""A pipeline's loss and gradients compared with those of its model without one: `ppctl.verify`."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppctl.model.layer_inputs import LOSS
from ppctl.model.stack import Stack
from ppctl.training.pipeline.call_checks import on_host
from ppctl.training.pipeline.pipeline import Pipeline
from ppctl.training.pipeline.unpipelined.whole_model import (
    initial_params,
    of_author,
    plain_functions,
)

Tree = Any
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 5e-2}  # max|difference|/max|reference|
ROUNDINGS = 8.0  # roundings of the largest number by which another order of sums may differ
SLACKS = 2.0  # times the change of a state's number by the tolerance of gradients


@dataclass(frozen=True)
class Number:
    """The comparison of a number. error: |difference| / |reference|; absolute if that is 0."""

    value: float
    reference: float
    error: float


@dataclass(frozen=True)
class Leaf:
    """The comparison of an array; error: relative to max_abs.

    max_abs: of the reference; of a state, of its change in all steps. layer: the worst of stacked
    layers, or a network's that uses it; None: no layer.
    """

    name: str
    shape: tuple[int, ...]
    norm: float  # of all entries
    max_abs: float
    max_difference: float  # largest |difference|
    error: float
    layer: int | None


@dataclass(frozen=True)
class Verification:
    """Loss and gradients of a batch next to those of the un-pipelined model.

    Errors are relative: of an array to its largest entry. Up to `tolerance` they are rounding.
    """

    loss: Number
    gradients: tuple[Leaf, ...]  # by the names of the author's parameters
    tolerance: float

    @property
    def worst(self) -> Leaf:
        """The gradient of the largest error."""
        return worst_of(self.gradients)

    @property
    def ok(self) -> bool:
        """Whether every error is within the tolerance."""
        errors = [self.loss.error, *(leaf.error for leaf in self.gradients)]
        return all(error <= self.tolerance for error in errors)  # NaN fails


def verify(pipe: Pipeline, batch: Mapping[str, Any], seed: int | None = None) -> Verification:
    """Return a pipeline's loss and gradients compared with plain autodiff through its whole model.

    The comparison is as sharp as the dtypes: with compute and parameters in float64 a wrong
    schedule cannot hide behind rounding (tolerance 1e-10; float32 1e-4, bfloat16 5e-2).

    Args:
        batch: Of the pipeline's size.
        seed: Of the initial parameters; None: the pipeline's.

    ConfigError: the batch has other shapes or values than the pipeline takes. The un-pipelined
    model runs on one device.
    """
    arrays = on_host(batch, pipe.batch_shapes, pipe.stack)
    state = pipe.init(seed)
    params = initial_params(pipe.stack, pipe.states.seed if seed is None else seed)
    loss_and_grads, _ = plain_functions(*pipe.plain)
    return verify_gradients(pipe, loss_and_grads, params, state, arrays)


def verify_gradients(
    pipe: Pipeline,
    plain: Callable[[Tree, Tree, int], tuple[dict[str, jax.Array], Tree]],
    params: Tree,
    state: Tree,
    batch: Tree,
) -> Verification:
    """Return loss and gradients of a batch, compared; state: the initial one, kept.

    plain: loss and gradients without a pipeline; params: of `state`, natural.
    """
    loss, grads = pipe.loss_and_grads(state, batch)
    losses, expected = jax.device_get(plain(params, batch, 0))
    tolerance = tolerance_of(pipe)
    least = float(rounding_of(expected)) / tolerance
    expected, grads = (of_author(pipe.stack, tree) for tree in (expected, grads))
    leaves = in_layers(pipe.stack, compare_trees(expected, grads, least=least))
    return Verification(compared(loss, losses[LOSS]), leaves, tolerance)


def tolerance_of(pipe: Pipeline) -> float:
    """Return the largest error that counts as rounding, by the dtypes of compute and parameters."""
    held = {str(a.dtype) for a in jax.tree.leaves(pipe.states.natural["params"])}
    return max(TOLERANCE[dtype] for dtype in {*held, str(pipe.dtype)} & {*TOLERANCE})


def compared(value: Any, reference: Any) -> Number:
    """Return the comparison of two numbers.

    >>> compared(0.5, 0).error
    0.5
    """
    value, reference = float(value), float(reference)
    return Number(value, reference, abs(value - reference) / (abs(reference) or 1.0))


def rounding_of(grads: Tree) -> Any:
    """Return the largest rounding of a gradient that sums to 0, by the largest of all."""
    leaves = jax.tree.leaves(grads)
    largest = jnp.stack([jnp.abs(g).max() for g in leaves]).max()
    return ROUNDINGS * jnp.finfo(leaves[0].dtype).eps * largest


def in_layers(stack: Stack, leaves: Iterable[Leaf]) -> tuple[Leaf, ...]:
    """Return the leaves with the layers of a network's parameters; of other models as they are."""
    network = stack.options.network
    layers = () if network is None else network.contents[1:-1]
    layer_of = {f"/{name}": int(held.name) for held in layers for name in held.params}

    def placed(leaf: Leaf) -> Leaf:
        endings = [ending for ending in layer_of if f"/{leaf.name}".endswith(ending)]
        return replace(leaf, layer=layer_of[max(endings, key=len)]) if endings else leaf

    return tuple(map(placed, leaves))


def compare_trees(
    expected: Tree, actual: Tree, before: Tree = None, slack: Tree = None, *, least: float = 0.0
) -> Iterator[Leaf]:
    """Yield the comparison of each array of two trees in natural order.

    before, slack: of a state, its start, and changes of its numbers by rounding of gradients. Its
    errors are differences beyond that, relative to the largest change. Other errors are relative to
    the largest entry, or to `least` where that is larger: below it all is rounding.
    """
    # 1. arrays side by side; optimizers nest the same arrays differently
    flat, treedef = jax.tree_util.tree_flatten_with_path(expected)
    nothing: list[Any] = [None] * len(flat)
    others = (nothing if tree is None else treedef.flatten_up_to(tree) for tree in (before, slack))
    for (path, want), got, start, moved in zip(flat, jax.tree.leaves(actual), *others, strict=True):
        # 2. differences
        is_floating = jnp.issubdtype(want.dtype, jnp.floating)
        rounding = ROUNDINGS * jnp.finfo(want.dtype).eps if is_floating else 0.0
        want, got = np.asarray(want, np.float64), np.asarray(got, np.float64)
        difference = excess = np.abs(want - got)
        change = want
        if start is not None:
            change = want - np.asarray(start, np.float64)
            allowed = SLACKS * np.asarray(moved) + rounding * np.abs(want).max()
            excess = np.maximum(difference - allowed, 0.0)
        # 3. the largest, and where it is
        max_abs = float(np.abs(change).max())
        part = next((key for key in map(_key, path) if key in ("embed_head", "layers")), None)
        is_stacked = part == "layers" and difference.ndim > 0
        yield Leaf(
            jax.tree_util.keystr(path, simple=True, separator="/"),
            want.shape,
            float(np.linalg.norm(got)),
            max_abs,
            float(difference.max()),
            float(excess.max()) / (max(max_abs, least) or 1.0),
            int(excess.reshape(len(excess), -1).max(axis=1).argmax()) if is_stacked else None,
        )


def worst_of(leaves: Sequence[Leaf]) -> Leaf:
    """Return the leaf of the largest error."""
    return max(leaves, key=lambda leaf: (math.isnan(leaf.error), leaf.error))


def _key(entry: Any) -> Any:
    return getattr(entry, "key", None)
