"""Training compared with the un-pipelined model: gradients of a batch, train steps, their state.

`ppctl verify` prints it. The other side is `ppctl.training.pipeline.plain_steps`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppctl.config import Config
from ppctl.model.stack import Stack
from ppctl.training.pipeline.job import TrainingJob, evaluate
from ppctl.training.pipeline.plain_steps import ROUNDINGS, PlainModel, PlainSteps, rounding_of

Tree = Any
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 5e-2}  # max|difference|/max|reference|
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
class GradientComparison:
    """Loss and gradients of the first batch, in natural order."""

    loss: Number
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True)
class StepComparison:
    """The numbers of a train step."""

    step: int  # 1, 2, ...
    loss: Number
    grad_norm: Number  # before clipping
    lr: Number
    is_clipped: bool


@dataclass(frozen=True)
class TrainingComparison:
    """Train steps, their final state, and an evaluation of it."""

    clip_norm: float | None
    is_clip_norm_requested: bool  # False: chosen so that some steps are clipped and some are not
    steps: tuple[StepComparison, ...]
    state: tuple[Leaf, ...]  # parameters, the optimizer's numbers and the count of steps
    eval_loss: Number | None  # None: the request evaluates nothing


def tolerance_of(job: TrainingJob) -> float:
    """Return the largest error of a job's dtype that counts as rounding."""
    return TOLERANCE[str(job.pipe.dtype)]


def compared(value: Any, reference: Any) -> Number:
    """Return the comparison of two numbers.

    >>> compared(0.5, 0).error
    0.5
    """
    value, reference = float(value), float(reference)
    return Number(value, reference, abs(value - reference) / (abs(reference) or 1.0))


def compare_gradients(job: TrainingJob, plain: PlainModel, state: Tree) -> GradientComparison:
    """Return loss and gradients of the first batch, compared; state: the initial one, kept."""
    batch = next(job.data.batches())
    loss, grads = job.pipe.loss_and_grads(state, batch)
    expected_loss, expected = jax.device_get(plain.loss_and_grads(plain.params, batch))
    least = float(rounding_of(expected)) / tolerance_of(job)
    expected, grads = (of_author(job.pipe.stack, tree) for tree in (expected, grads))
    leaves = in_layers(job.pipe.stack, compare_trees(expected, grads, least=least))
    return GradientComparison(compared(loss, expected_loss), leaves)


def compare_training(
    job: TrainingJob, plain: PlainSteps, state: Tree, requested: Config
) -> TrainingComparison:
    """Return train steps compared, which take the memory of `state`, the initial one.

    job: the request with the clipping norm of these steps; requested: the original request.
    """
    # 1. the steps
    engine, data, stack = job.pipe.engine, job.data, job.pipe.stack
    engine.compile(evaluate=job.config.run.eval_every is not None)
    steps, num_steps = [], len(plain.numbers)
    batches = islice(data.batches(0, engine.examples), num_steps)
    both = zip(batches, plain.numbers, plain.clipped, strict=True)
    for step, (batch, wanted, is_clipped) in enumerate(both, 1):
        state, numbers = engine.step(state, engine.put(batch))
        pairs = {name: compared(numbers[name], each) for name, each in wanted._asdict().items()}
        steps.append(StepComparison(step, **pairs, is_clipped=is_clipped))
    # 2. their state, and its evaluation
    eval_loss = None
    if plain.eval_loss is not None:
        eval_loss = compared(evaluate(engine, data, job.num_eval_batches, state), plain.eval_loss)
    counts = {"step": np.int32(0)}, {"step": np.int32(num_steps)}
    trees = plain.after | counts[1], engine.to_natural(state)
    trees += plain.before | counts[0], plain.slack | counts[0]
    leaves = in_layers(stack, compare_trees(*(of_author(stack, tree) for tree in trees)))
    is_requested = plain.clip_norm == requested.optim.clip_norm
    return TrainingComparison(plain.clip_norm, is_requested, tuple(steps), leaves, eval_loss)


def of_author(stack: Stack, tree: Tree) -> Tree:
    """Return a tree with each subtree of parameters' form by the names of a network's author.

    Trees of other models stay as they are.
    """
    export = stack.export
    if export is None:
        return tree
    is_form = lambda node: isinstance(node, dict) and {*node} == {"embed_head", "layers"}  # noqa: E731
    whole = lambda node: export(jax.tree.map(jnp.asarray, node)) if is_form(node) else node  # noqa: E731
    return jax.tree.map(whole, tree, is_leaf=is_form)


def in_layers(stack: Stack, leaves: Iterable[Leaf]) -> tuple[Leaf, ...]:
    """Return the leaves with the layers of a network's parameters; of other models as they are."""
    layer_of = {f"/{name}": int(held.name) for held in stack.contents[1:-1] for name in held.params}

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


def steps_with_clipping(plain: PlainModel, num_steps: int, tolerance: float) -> PlainSteps:
    """Return train steps some of which are clipped and some not, if possible.

    They are clipped at optim.clip_norm if it does that, else at a norm between two of theirs: so
    both branches of clipping run, and those of executor.post_validation. optim.clip_norm=null
    stays: such training clips nothing.
    """
    requested = plain.run(num_steps, plain.job.config.optim.clip_norm, tolerance)
    norms = [each.grad_norm for each in requested.numbers]
    is_finite = all(0 < n < math.inf for n in norms)
    is_enough = len({*requested.clipped}) == 2 or requested.clipped == (True,)
    if requested.clip_norm is None or is_enough or not is_finite:
        return requested

    # in the widest gap, preferably with a step after one that is clipped; of one step, below it
    def worth(gap: tuple[float, float]) -> tuple[bool, float]:
        return any(n >= sum(gap) / 2 for n in norms[:-1]), gap[1] - gap[0]

    gap = max(pairwise(sorted(norms)), key=worth, default=(0.0, norms[0]))
    return plain.run(num_steps, sum(gap) / 2, tolerance)


def _key(entry: Any) -> Any:
    return getattr(entry, "key", None)
