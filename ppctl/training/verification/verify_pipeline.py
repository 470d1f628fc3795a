"""`ppctl.verify`: compare a pipeline's loss and gradients with those of the un-pipelined model."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppctl.errors import ConfigError, setting
from ppctl.executors.parameter_layout import is_layer
from ppctl.model.layer_inputs import LOSS
from ppctl.model.stack import Stack
from ppctl.training.pipeline.call_checks import on_host
from ppctl.training.pipeline.mixing import rounded_dtype
from ppctl.training.pipeline.pipeline import Pipeline
from ppctl.training.pipeline.whole_model import initial_params, of_author, plain_functions

Tree = Any
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 5e-2}  # max|difference|/max|reference|
ROUNDINGS = 8.0  # allowed error, in eps of the largest number: the order of sums differs
SLACKS = 2.0  # allowed error of a state, in changes of it by gradients that differ by the tolerance


@dataclass(frozen=True)
class Number:
    """The comparison of a number. error: |difference| / |reference|; |difference| if that is 0."""

    value: float
    reference: float
    error: float


@dataclass(frozen=True)
class Leaf:
    """The comparison of an array with its reference.

    max_abs: the largest entry of the reference; for a state, the largest change of the reference in
    all steps. error: the largest difference relative to max_abs; for a state, only the excess over
    the difference that rounding can cause. layer: the stacked layer with the largest error, or the
    layer of a network that uses the array; None: no layer.
    """

    name: str
    shape: tuple[int, ...]
    norm: float  # 2-norm of the compared array
    max_abs: float
    max_difference: float  # largest difference, absolute
    error: float
    layer: int | None


@dataclass(frozen=True)
class Verification:
    """The comparison of loss and gradients with those of the un-pipelined model.

    Errors are relative; those of an array are relative to its largest entry. Errors up to
    `tolerance` count as rounding.
    """

    loss: Number
    gradients: tuple[Leaf, ...]  # one per parameter, with the author's names
    tolerance: float

    @property
    def worst(self) -> Leaf:
        """The gradient with the largest error."""
        return worst_of(self.gradients)

    @property
    def ok(self) -> bool:
        """Whether every error is within the tolerance."""
        compared = self.loss, *self.gradients
        return all(each.error <= self.tolerance for each in compared)  # NaN fails


def verify(pipe: Pipeline, batch: Mapping[str, Any], seed: int | None = None) -> Verification:
    """Compare a pipeline's loss and gradients with plain autodiff through its un-pipelined model.

    The tolerance depends on the dtypes of compute and parameters: float64 1e-10, float32 1e-4,
    bfloat16 5e-2. In float64, rounding cannot hide a wrong schedule.

    Args:
        pipe: The pipeline. Its un-pipelined model runs on one device, which must hold it.
        batch: {"inputs", "targets"} of the pipeline's batch size.
        seed: Seed of the initial parameters; None: the pipeline's seed.

    Returns:
        The comparison; `ok` is whether all errors are within the tolerance.

    Raises:
        ConfigError: The batch has shapes or values that do not fit the pipeline, or the model
            computes in 8 bits and the pipeline not in float64.
    """
    check_comparable(pipe)
    arrays = on_host(batch, pipe.batch_shapes, pipe.stack)
    found = pipe.loss_and_grads(pipe.init(seed), arrays)
    params = initial_params(pipe.stack, pipe.states.seed if seed is None else seed)
    loss_and_grads, _ = plain_functions(*pipe.plain)
    return verify_gradients(pipe, jax.device_get(loss_and_grads(params, arrays, 0)), found)


def check_comparable(pipe: Pipeline) -> None:
    """Raise ConfigError for 8-bit products outside float64, which no tolerance can compare.

    Other roundings move values over the middle of two 8-bit numbers, and so change a gradient by as
    much as a wrong schedule would.
    """
    if pipe.stack.options.rounded_weights and pipe.dtype != jnp.float64:
        asked, use = (setting("run.dtype", str(dtype)) for dtype in (pipe.dtype, "float64"))
        both = f"{asked} with {setting('model.linear_dtype')}"
        what = f"{both}: roundings to 8 bits hide differences, except in float64"
        raise ConfigError(f"{what}. Use {use} to verify.")


def verify_gradients(
    pipe: Pipeline, plain: tuple[Mapping[str, np.ndarray], Tree], found: tuple[jax.Array, Tree]
) -> Verification:
    """Return the comparison of (losses, gradients): plain, on the host, and of the pipeline."""
    (loss, grads), (losses, expected), tolerance = found, plain, tolerance_of(pipe)
    least = float(rounding_of(expected, narrower_dtype(pipe), np)) / tolerance
    expected, grads = (of_author(pipe.stack, tree) for tree in (expected, grads))
    leaves = in_layers(pipe.stack, compare_trees(expected, grads, least=least))
    return Verification(compared(loss, losses[LOSS]), leaves, tolerance)


def tolerance_of(pipe: Pipeline) -> float:
    """Return the largest error that counts as rounding, for the dtypes of parameters and compute,
    or a narrower one that the model casts to.
    """
    held = {str(a.dtype) for a in jax.tree.leaves(pipe.states.natural["params"])}
    rounded = str(narrower_dtype(pipe) or pipe.dtype)
    return max(TOLERANCE[dtype] for dtype in {*held, rounded} & {*TOLERANCE})


def narrower_dtype(pipe: Pipeline) -> jnp.dtype | None:
    """Return the dtype narrower than that of compute that the model casts to; None: no cast."""
    rounded = rounded_dtype(pipe.stack, pipe.batch_shapes, pipe.dtype)
    return None if rounded == pipe.dtype else rounded


def compared(value: Any, reference: Any) -> Number:
    """Return the comparison of two numbers.

    >>> compared(0.5, 0).error
    0.5
    """
    value, reference = float(value), float(reference)
    return Number(value, reference, abs(value - reference) / (abs(reference) or 1.0))


def rounding_of(grads: Tree, narrower: jnp.dtype | None, library: Any = jnp) -> Any:
    """Return the absolute tolerance for gradients that cancel to 0, given all gradients.

    narrower: dtype that the model casts to (`narrower_dtype`), whose rounding the gradients have.
    library: np for arrays on the host, for which jnp would compile programs.
    """
    leaves = jax.tree.leaves(grads)
    largest = library.stack([library.abs(g).max() for g in leaves]).max()
    return ROUNDINGS * float(jnp.finfo(narrower or leaves[0].dtype).eps) * largest


def in_layers(stack: Stack, leaves: Iterable[Leaf]) -> tuple[Leaf, ...]:
    """Return the leaves, with the layer of each parameter if the model is a network."""
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

    Errors are relative to the largest entry of the array, or to `least` if that is larger: entries
    below `least` are rounding. before: for a state, its initial value. slack: changes of the state
    that rounding of gradients can cause; larger differences are errors, relative to the largest
    change since `before`.
    """
    # 1. pair the arrays; optimizers nest the same arrays differently
    flat, treedef = jax.tree.flatten_with_path(expected)
    nothing: list[Any] = [None] * len(flat)
    others = (nothing if tree is None else treedef.flatten_up_to(tree) for tree in (before, slack))
    for (path, want), got, start, moved in zip(flat, jax.tree.leaves(actual), *others, strict=True):
        # 2. differences
        is_floating = jnp.issubdtype(want.dtype, jnp.floating)
        rounding = ROUNDINGS * jnp.finfo(want.dtype).eps if is_floating else 0.0
        want, got = np.asarray(want, np.float64), np.asarray(got, np.float64)
        difference = excess = np.abs(want - got)
        change = want if start is None else want - np.asarray(start, np.float64)
        if start is not None:
            allowed = SLACKS * np.asarray(moved) + rounding * np.abs(want).max()
            excess = np.maximum(difference - allowed, 0.0)
        # 3. the largest difference and its layer
        max_abs = float(np.abs(change).max())
        is_stacked = is_layer(path) and difference.ndim > 0
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
    """Return the leaf with the largest error; NaN is larger than any number."""
    return max(leaves, key=lambda leaf: (math.isnan(leaf.error), leaf.error))
