"""Training compared with the un-pipelined model: gradients of a batch, then whole train steps and what they leave.

`ppctl verify` prints it. The other side is `ppctl.training.plain_steps`.
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
from ppctl.training.evaluation import evaluate
from ppctl.training.job import TrainingJob
from ppctl.training.plain_steps import ROUNDINGS, PlainModel, PlainSteps, plain_lr_schedule, rounding_of

Tree = Any
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 5e-2}  # of max|difference| / max|reference|
MOST_RATES = 1000  # learning rates that are compared, spread over the steps of the run
SLACKS = 2.0  # times what a number of the state moves when gradients are off by their tolerance


@dataclass(frozen=True)
class Number:
    """The comparison of a number. error: |difference| / |reference|; of a reference of 0 the difference itself."""

    value: float
    reference: float
    error: float


@dataclass(frozen=True)
class Leaf:
    """The comparison of an array. error: of max_abs; layer: where it is worst."""

    name: str
    shape: tuple[int, ...]
    norm: float  # of all entries
    max_abs: float  # of the reference: of a gradient its largest entry, of a state its largest change in all steps
    max_difference: float  # largest |difference|
    error: float
    layer: int | None  # of a stack of layers the worst, of a network the one that uses it; None: it is of neither


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
    """Train steps, the state that they leave, an evaluation of it, and the learning rates of the whole run."""

    clip_norm: float | None
    is_clip_norm_requested: bool  # False: chosen so that some steps are clipped and some are not
    steps: tuple[StepComparison, ...]
    state: tuple[Leaf, ...]  # parameters, the optimizer's numbers and the count of steps
    eval_loss: Number | None  # None: the request evaluates nothing
    rates_error: float  # largest |difference| of MOST_RATES learning rates, of the largest rate
    rates_tolerance: float


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
    """Return loss and gradients of the first batch, compared; state: the job's initial one, which stays."""
    batch = next(job.data.batches())
    loss, grads = job.pipe.loss_and_grads(state, batch)
    expected_loss, expected = jax.device_get(plain.loss_and_grads(plain.params, batch))
    least = float(rounding_of(expected)) / tolerance_of(job)
    expected, grads = (of_author(job.pipe.stack, tree) for tree in (expected, grads))
    leaves = in_layers(job.pipe.stack, compare_trees(expected, grads, least=least))
    return GradientComparison(compared(loss, expected_loss), leaves)


def compare_training(job: TrainingJob, plain: PlainSteps, state: Tree, requested: Config) -> TrainingComparison:
    """Return train steps compared, which take the memory of `state`, the initial one.

    job: the request, but with the norm of clipping of these steps; requested: as it was.
    """
    engine, data, run = job.pipe.engine, job.data, job.config.run
    engine.compile(evaluate=run.eval_every is not None)
    steps, num_steps = [], len(plain.numbers)
    batches = islice(data.batches(0, engine.examples), num_steps)
    for step, (batch, wanted, is_clipped) in enumerate(zip(batches, plain.numbers, plain.clipped, strict=True), 1):
        state, numbers = engine.step(state, engine.put(batch))
        pairs = {name: compared(numbers[name], reference) for name, reference in wanted._asdict().items()}
        steps.append(StepComparison(step, **pairs, is_clipped=is_clipped))
    eval_loss = None
    if plain.eval_loss is not None:
        eval_loss = compared(evaluate(engine, data, job.num_eval_batches, state), plain.eval_loss)
    before, after = plain.before | {"step": np.int32(0)}, plain.after | {"step": np.int32(num_steps)}
    slack = plain.slack | {"step": np.int32(0)}
    trees = (after, engine.to_natural(state), before, slack)
    leaves = in_layers(job.pipe.stack, compare_trees(*(of_author(job.pipe.stack, tree) for tree in trees)))
    rates_error, rates_tolerance = _compare_rates(job)
    is_requested = plain.clip_norm == requested.optim.clip_norm
    return TrainingComparison(
        plain.clip_norm, is_requested, tuple(steps), leaves, eval_loss, rates_error, rates_tolerance
    )


def of_author(stack: Stack, tree: Tree) -> Tree:
    """Return a tree with the parameters in it, or what has their form, by the names that a network's author gave them.

    Anything of a model that is no network stays as it is.
    """
    export = stack.export
    if export is None:
        return tree
    is_form = lambda node: isinstance(node, dict) and {*node} == {"ends", "layers"}  # noqa: E731
    whole = lambda node: export(jax.tree.map(jnp.asarray, node)) if is_form(node) else node  # noqa: E731
    return jax.tree.map(whole, tree, is_leaf=is_form)


def in_layers(stack: Stack, leaves: Iterable[Leaf]) -> tuple[Leaf, ...]:
    """Return the leaves with the layers that a network's parameters are of; those of other models as they are."""
    layer_of = {f"/{name}": int(held.name) for held in stack.contents[1:-1] for name in held.params}

    def placed(leaf: Leaf) -> Leaf:
        endings = [ending for ending in layer_of if f"/{leaf.name}".endswith(ending)]
        return replace(leaf, layer=layer_of[max(endings, key=len)]) if endings else leaf

    return tuple(map(placed, leaves))


def compare_trees(
    expected: Tree, actual: Tree, before: Tree = None, slack: Tree = None, *, least: float = 0.0
) -> Iterator[Leaf]:
    """Yield the comparison of each array of two trees in natural order.

    before, slack: of a state, what it started from, and how far rounding of the gradients may have moved each number.
    An error is then what is beyond that, of the largest change; else it is of the largest entry, or of `least` where
    that is more: below it an array is nothing but rounding.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(expected)
    nothing: list[Any] = [None] * len(flat)
    others = (nothing if tree is None else treedef.flatten_up_to(tree) for tree in (before, slack))
    found = jax.tree.leaves(actual)  # not by the structure of `expected`: optimizers nest the same arrays otherwise
    for (path, want), got, start, moved in zip(flat, found, *others, strict=True):
        rounding = ROUNDINGS * jnp.finfo(want.dtype).eps if jnp.issubdtype(want.dtype, jnp.floating) else 0.0
        want, got = np.asarray(want, np.float64), np.asarray(got, np.float64)
        difference = excess = np.abs(want - got)
        change = want
        if start is not None:
            change = want - np.asarray(start, np.float64)
            excess = np.maximum(difference - SLACKS * np.asarray(moved) - rounding * np.abs(want).max(), 0.0)
        max_abs = float(np.abs(change).max())
        part = next((key for key in map(_key, path) if key in ("ends", "layers")), None)
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
    """Return train steps of which some are clipped and some are not, where that can be.

    They are those of optim.clip_norm if it does that, and of a norm between two of theirs otherwise, so that both
    branches of clipping run, and with executor.post_validation what undoes a step and what lets it stand.
    optim.clip_norm=null stays: such training clips nothing.
    """
    requested = plain.run(num_steps, plain.job.config.optim.clip_norm, tolerance)
    norms = [each.grad_norm for each in requested.numbers]
    if requested.clip_norm is None or len({*requested.clipped}) == 2 or not all(0 < n < math.inf for n in norms):
        return requested
    tried = [requested]
    between = [(high - low, (low + high) / 2) for low, high in pairwise(sorted(norms)) if high > low]
    if between:
        goes_on = lambda norm: any(n >= norm for n in norms[:-1])  # noqa: E731  a step follows one that is clipped
        _, norm = max(between, key=lambda gap: (goes_on(gap[1]), gap[0]))
        tried.append(plain.run(num_steps, norm, tolerance))
        if len({*tried[-1].clipped}) == 2:
            return tried[-1]
    found = next((each for each in tried if any(each.clipped)), None)
    return plain.run(num_steps, norms[0] / 2, tolerance) if found is None else found


def with_clip_norm(config: Config, clip_norm: float | None) -> Config:
    """Return the same request with another norm of clipping."""
    return replace(config, optim=replace(config.optim, clip_norm=clip_norm))


def _compare_rates(job: TrainingJob) -> tuple[float, float]:
    """Return (error, tolerance) of learning rates of the whole run, the first and the last step's included."""
    config, lr_schedule = job.config, job.pipe.lr_schedule
    assert lr_schedule is not None, "every job has one"
    last = config.run.num_steps - 1
    steps = jnp.asarray(np.unique(np.linspace(0, last, MOST_RATES).round()), jnp.int32)
    found, expected = (jnp.asarray(jax.vmap(each)(steps)) for each in (lr_schedule, plain_lr_schedule(config)))
    error = float(jnp.abs(found - expected).max()) / (float(expected.max()) or 1.0)
    return error, TOLERANCE[str(expected.dtype)]


def _key(entry: Any) -> Any:
    return getattr(entry, "key", None)
