"""Compare train steps and their state with those of the un-pipelined model, updated by optax.

`ppctl verify` prints the comparison. The oracle, `PlainModel`, shares model, data and settings with
training, but not the code of a step: this file implements steps a second time, on whole trees in
natural order.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ppctl.executors.compiler_options import compiled_quickly
from ppctl.model.layer_inputs import LOSS
from ppctl.model.layer_reports import with_updated, without_counted
from ppctl.model.trainable_parameters import trained_part, with_trained
from ppctl.training.pipeline.job import TrainingJob, evaluate, num_eval_batches
from ppctl.training.pipeline.optimizers import make_optimizer
from ppctl.training.pipeline.whole_model import initial_params, of_author, plain_functions
from ppctl.training.verification.verify_pipeline import (
    Leaf,
    Number,
    compare_trees,
    compared,
    in_layers,
    narrower_dtype,
    rounding_of,
)

Tree = Any
MOST_EVAL_BATCHES = 2  # batches of a default evaluation: two show that it is a weighted mean
SHIFTS = (0.0, -1.0, 1.0)  # shifts of the gradients, in tolerances; the first is the oracle


@dataclass(frozen=True)
class PlainSteps:
    """The expected first train steps. Trees: {"params", "optimizer", "average" with optim.ema}."""

    clip_norm: float | None
    numbers: tuple[dict[str, float], ...]  # metrics of each step, by name
    before: Tree
    after: Tree
    slack: Tree  # largest change of `after` if gradients change by the tolerance
    eval_loss: float | None  # None: the request evaluates nothing

    @property
    def clipped(self) -> tuple[bool, ...]:
        """Whether the gradients of each step are clipped."""
        norm = math.inf if self.clip_norm is None else self.clip_norm
        return tuple(each["grad_norm"] >= norm for each in self.numbers)


@dataclass(frozen=True)
class PlainModel:
    """The un-pipelined model of a job.

    Batches are divided into mesh.dp*mesh.fsdp*num_microbatches parts, as on devices, so that
    models that mix the examples of a microbatch on purpose can be compared, too.
    """

    job: TrainingJob
    params: Tree
    loss_and_grads: Callable[[Tree, Tree, int], tuple[dict[str, jax.Array], Tree]]
    losses: Callable[[Tree, Tree], tuple[jax.Array, jax.Array]]  # (params, batch) -> (sum, number)

    @cached_property
    def first(self) -> tuple[dict[str, np.ndarray], Tree]:
        """Loss and gradients of the first batch at the initial parameters, on the host."""
        return jax.device_get(self.loss_and_grads(self.params, next(self.job.data.batches()), 0))

    def run(self, num_steps: int, tolerance: float) -> PlainSteps:
        """Return the first train steps.

        tolerance: error of a gradient, relative to the largest of its array. Adam divides gradients
        by their size, so rounding noise can move a parameter as far as any gradient. Therefore the
        updates are repeated with gradients one tolerance larger and one smaller.
        """
        # 1. the update of a state, with gradients shifted by `shift` tolerances
        config, data, options = self.job.config, self.job.data, self.job.pipe.stack.options
        rule, counted = config.run.on_nonfinite, options.updates
        request = config.optim, config.run.num_steps
        optimizer, lr_schedule = make_optimizer(*request, on_nonfinite=rule)
        clip_norm = config.optim.clip_norm
        max_norm = math.inf if clip_norm is None else clip_norm

        def trained_of(params: Tree) -> Tree:
            return by_layer(without_counted(trained_part(params, options.trainable), counted))

        def update(state: Tree, grads: Tree, max_norm: jax.Array, shift: jax.Array) -> Tree:
            given, grads = grads, without_counted(grads, counted)
            norm = optax.tree.norm(grads)
            clipping = optax.clip_by_global_norm(max_norm)
            grads, _ = clipping.update(grads, clipping.init(grads))
            least = rounding_of(grads, narrower_dtype(self.job.pipe))  # some cancel to about 0
            sizes = jax.tree.map(lambda g: jnp.maximum(tolerance * jnp.abs(g).max(), least), grads)
            grads = jax.tree.map(lambda g, size: g + (shift * size).astype(g.dtype), grads, sizes)
            trained, grads = trained_of(state["params"]), by_layer(grads)
            apply = optax.with_extra_args_support(optimizer).update
            updates, optimizer_state = apply(grads, state["optimizer"], trained, norm=norm)
            params = with_trained(stacked(optax.apply_updates(trained, updates)), state["params"])
            is_applied = jnp.isfinite(norm) if rule == "skip" else True
            params = with_updated(params, given, counted, 1, is_applied=is_applied)
            average = self._average(params, state, is_applied)
            return {"params": params, "optimizer": optimizer_state, **average}

        # 2. the steps, for each shift
        optimizer_state = compiled_quickly(optimizer.init)(trained_of(self.params))
        optimizer_state = jax.device_get(optimizer_state)
        before = {"params": self.params, "optimizer": optimizer_state, **self._average(self.params)}
        states, numbers = [before] * len(SHIFTS), []
        compiled_update, lr_of = compiled_quickly(update), compiled_quickly(lr_schedule)
        for k, batch in enumerate(islice(data.batches(), num_steps)):
            losses, grads = self.first
            if k > 0:
                losses, grads = jax.device_get(self.loss_and_grads(states[0]["params"], batch, k))
            others = {"grad_norm": _norm(without_counted(grads, counted)), "lr": lr_of(k)}
            numbers.append({name: float(a) for name, a in (losses | others).items()})
            pairs = zip(states, SHIFTS, strict=True)
            updated = [compiled_update(state, grads, max_norm, shift) for state, shift in pairs]
            states = jax.device_get(updated)
        # 3. the final states, their difference, and an evaluation
        before, after, *shifted = map(stacked, (before, *states))
        changes = (jax.tree.map(lambda a, b: np.abs(b - a), after, each) for each in shifted)
        slack, eval_loss = jax.tree.map(np.maximum, *changes), None
        if config.run.eval_every is not None:
            eval_loss = self._eval_loss(after)
        return PlainSteps(clip_norm, tuple(numbers), before, after, slack, eval_loss)

    def _average(self, params: Tree, before: Tree = None, is_applied: Any = True) -> Tree:
        """Return {"average": average after a step}, {} without optim.ema; before: state before."""
        ema, trainable = self.job.config.optim.ema, self.job.pipe.stack.options.trainable
        if ema is None:
            return {}
        trained = trained_part(params, trainable)
        if before is None:
            return {"average": trained}

        def mean(a: jax.Array, p: jax.Array) -> jax.Array:
            return jnp.where(is_applied, ema * a + (1 - ema) * p, a)

        return {"average": jax.tree.map(mean, before["average"], trained)}

    def _eval_loss(self, state: Tree) -> float:
        """Return the mean loss of the held-out batches by the average, if the state has one."""
        params = with_trained(state.get("average", state["params"]), state["params"])
        batches = self.job.data.eval_batches(num_compared_batches(self.job))
        pairs = (jax.device_get(self.losses(params, batch)) for batch in batches)
        total, number = map(sum, zip(*pairs, strict=True))
        return float(total) / max(1.0, float(number))


def by_layer(params: Tree) -> Tree:
    """Return {"embed_head", "layers"} with a list of layers: the tree that optimizers get."""
    number = next((len(a) for a in jax.tree.leaves(params["layers"])), 0)
    layers = [jax.tree.map(lambda a, l=l: a[l], params["layers"]) for l in range(number)]
    return {**params, "layers": layers}


def stacked(tree: Tree) -> Tree:
    """Return a tree in natural order from a result of `by_layer`, or a state with such trees.

    >>> jax.tree.map(len, stacked(({"layers": [{"w": 1.0}, {"w": 2.0}]},)))
    ({'layers': {'w': 2}},)
    """

    def is_listed(node: Tree) -> bool:
        return isinstance(node, dict) and isinstance(node.get("layers"), list)

    def stack(*arrays: Any) -> Any:  # numpy compiles nothing
        return (jnp if isinstance(arrays[0], jax.Array) else np).stack(arrays)

    def join(node: Tree) -> Tree:
        return {**node, "layers": jax.tree.map(stack, *node["layers"])} if is_listed(node) else node

    return jax.tree.map(join, tree, is_leaf=is_listed)


def plain_model(job: TrainingJob) -> PlainModel:
    params = initial_params(job.pipe.stack, job.config.run.seed)
    return PlainModel(job, params, *plain_functions(*job.pipe.plain))


def num_compared_batches(job: TrainingJob) -> int:
    """Return the number of held-out batches to compare: run.eval_batches, by default up to 2."""
    number = num_eval_batches(job.config.run, job.data)
    return min(number, MOST_EVAL_BATCHES) if job.config.run.eval_batches is None else number


def _norm(tree: Tree) -> float:
    squares = (np.square(a, dtype=np.float64).sum() for a in jax.tree.leaves(tree))
    return math.sqrt(sum(map(float, squares)))


@dataclass(frozen=True)
class StepComparison:
    """The compared numbers of a train step."""

    step: int  # 1, 2, ...
    loss: Number
    grad_norm: Number  # norm before clipping
    lr: Number
    attached: dict[str, Number]  # losses that layers attach
    is_clipped: bool


@dataclass(frozen=True)
class TrainingComparison:
    """The comparison of train steps, their final state, and its evaluation."""

    clip_norm: float | None
    steps: tuple[StepComparison, ...]
    state: tuple[Leaf, ...]  # parameters, the optimizer's numbers and the count of steps
    eval_loss: Number | None  # None: the request evaluates nothing


def compare_training(job: TrainingJob, plain: PlainSteps, state: Tree) -> TrainingComparison:
    """Return the comparison of train steps from the initial `state`, whose memory is reused."""
    # 1. the steps
    engine, data, stack = job.pipe.engine, job.data, job.pipe.stack
    engine.compile(evaluate=job.config.run.eval_every is not None)
    steps, num_steps = [], len(plain.numbers)
    batches = islice(data.batches(0, engine.batches.examples), num_steps)
    both = zip(batches, plain.numbers, plain.clipped, strict=True)
    for step, (batch, wanted, is_clipped) in enumerate(both, 1):
        state, numbers = engine.step(state, engine.batches.put(batch))
        found = {name: compared(numbers[name], each) for name, each in wanted.items()}
        of_step = (found.pop(name) for name in (LOSS, "grad_norm", "lr"))
        steps.append(StepComparison(step, *of_step, attached=found, is_clipped=is_clipped))
    # 2. the final state, and its evaluation
    eval_loss = None
    if plain.eval_loss is not None:
        found = evaluate(engine, data, num_compared_batches(job), state)
        eval_loss = compared(found, plain.eval_loss)
    counts = {"step": np.int32(0)}, {"step": np.int32(num_steps)}
    trees = plain.after | counts[1], engine.to_natural(state)
    trees += plain.before | counts[0], plain.slack | counts[0]
    leaves = in_layers(stack, compare_trees(*(of_author(stack, tree) for tree in trees)))
    return TrainingComparison(plain.clip_norm, tuple(steps), leaves, eval_loss)
