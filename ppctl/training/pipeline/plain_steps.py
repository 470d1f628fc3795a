"""Train steps by other code than training's: un-pipelined gradients, and optax for all else.

The oracle of `ppctl verify`. It shares model, data and settings with training, but not the code of
steps, which is written here a second time, on whole trees in natural order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ppctl.executors.compiler_options import cpu_options
from ppctl.executors.reference import reference
from ppctl.model.stack import init
from ppctl.model.trainable_parameters import trained_part, with_trained
from ppctl.training.pipeline.job import TrainingJob, make_optimizer

Tree = Any
SHIFTS = (0.0, -1.0, 1.0)  # of the gradients, in tolerances; the first is the oracle
ROUNDINGS = 8.0  # roundings of the largest number by which another order of sums may differ


class StepNumbers(NamedTuple):
    """The numbers that a train step reports."""

    loss: float
    grad_norm: float  # before clipping
    lr: float


@dataclass(frozen=True)
class PlainSteps:
    """The expected first train steps. Trees: {"params", "optimizer"}, natural, on the host."""

    clip_norm: float | None
    numbers: tuple[StepNumbers, ...]  # of each step
    before: Tree
    after: Tree
    slack: Tree  # changes of the numbers of `after` by the tolerance of gradients
    eval_loss: float | None  # None: the request evaluates nothing

    @property
    def clipped(self) -> tuple[bool, ...]:
        """Return for each step whether its gradients are clipped."""
        norm = math.inf if self.clip_norm is None else self.clip_norm
        return tuple(each.grad_norm >= norm for each in self.numbers)


@dataclass(frozen=True)
class PlainModel:
    """The un-pipelined model of a job.

    Batches are divided into mesh.dp*mesh.fsdp*num_microbatches parts as on devices, so that models
    that mix the examples of a microbatch on purpose can be compared too.
    """

    job: TrainingJob
    params: Tree
    loss_and_grads: Callable[[Tree, Tree], tuple[jax.Array, Tree]]  # of (params, batch)
    losses: Callable[[Tree, Tree], tuple[jax.Array, jax.Array]]  # (sum, number) of the same

    def run(self, num_steps: int, clip_norm: float | None, tolerance: float) -> PlainSteps:
        """Return the first train steps, clipped at this norm.

        tolerance: of a gradient, relative to the largest of its array. Adam divides gradients by
        their size, so that rounding noise may move a parameter as far as any gradient. So the
        updates are repeated with gradients that are a tolerance larger and smaller.
        """
        # 1. the update of a state
        config, data = self.job.config, self.job.data
        optimizer, lr_schedule = make_optimizer(config)
        max_norm = math.inf if clip_norm is None else clip_norm
        trained_of = partial(trained_part, trainable=self.job.pipe.stack.trainable)

        def update(state: Tree, grads: Tree, max_norm: jax.Array, shift: jax.Array) -> Tree:
            clipping = optax.clip_by_global_norm(max_norm)
            grads, _ = clipping.update(grads, clipping.init(grads))
            least = rounding_of(grads)  # where an array of gradients is 0 but for rounding
            size = lambda g: jnp.maximum(tolerance * jnp.abs(g).max(), least)  # noqa: E731
            grads = jax.tree.map(lambda g: g + (shift * size(g)).astype(g.dtype), grads)
            trained = trained_of(state["params"])
            updates, optimizer_state = optimizer.update(grads, state["optimizer"], trained)
            params = with_trained(optax.apply_updates(trained, updates), state["params"])
            return {"params": params, "optimizer": optimizer_state}

        # 2. the steps
        trained = trained_of(self.params)
        before = {"params": self.params, "optimizer": jax.device_get(optimizer.init(trained))}
        states, numbers = [before] * len(SHIFTS), []
        compiled_update = _compiled(update)
        for k, batch in enumerate(islice(data.batches(), num_steps)):
            loss, grads = jax.device_get(self.loss_and_grads(states[0]["params"], batch))
            numbers.append(
                StepNumbers(float(loss), _norm(grads), float(jnp.asarray(lr_schedule(k))))
            )
            pairs = zip(states, SHIFTS, strict=True)
            updated = [compiled_update(state, grads, max_norm, shift) for state, shift in pairs]
            states = jax.device_get(updated)
        # 3. what they leave
        after, *shifted = states
        largest = lambda a, *others: np.max([np.abs(b - a) for b in others], axis=0)  # noqa: E731
        slack, eval_loss = jax.tree.map(largest, after, *shifted), None
        if config.run.eval_every is not None:
            batches = data.eval_batches(self.job.num_eval_batches)
            pairs = (jax.device_get(self.losses(after["params"], batch)) for batch in batches)
            total, number = map(sum, zip(*pairs, strict=True))
            eval_loss = float(total) / max(1.0, float(number))
        return PlainSteps(clip_norm, tuple(numbers), before, after, slack, eval_loss)


def rounding_of(grads: Tree) -> Any:
    """Return the largest rounding of a gradient that sums to 0, by the largest of all."""
    leaves = jax.tree.leaves(grads)
    largest = jnp.stack([jnp.abs(g).max() for g in leaves]).max()
    return ROUNDINGS * jnp.finfo(leaves[0].dtype).eps * largest


def plain_model(job: TrainingJob) -> PlainModel:
    """Return the un-pipelined model of a job."""
    config, pipe = job.config, job.pipe
    params = jax.device_get(_compiled(lambda: init(pipe.stack, config.run.seed))())
    num_parts = config.schedule.num_microbatches * config.mesh.dp * config.mesh.fsdp
    of_parts = partial(reference, pipe.stack, remat="none", dtype=pipe.dtype)
    mean_loss = of_parts(num_microbatches=1, with_grads=False)

    def losses(params: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        parts = jax.tree.map(lambda a: a.reshape(num_parts, -1, *a.shape[1:]), batch)
        means, numbers = jax.lax.map(partial(mean_loss, params), parts)
        return (means * numbers).sum(), numbers.sum()

    functions = of_parts(num_microbatches=num_parts), losses
    return PlainModel(job, params, *map(_compiled, functions))


def _norm(tree: Tree) -> float:
    squares = (np.square(a, dtype=np.float64).sum() for a in jax.tree.leaves(tree))
    return math.sqrt(sum(map(float, squares)))


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function to be compiled quickly, since it runs a few times."""
    options = cpu_options("once") if jax.default_backend() == "cpu" else None
    return jax.jit(function, compiler_options=options)
