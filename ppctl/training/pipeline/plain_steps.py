"""Train steps by other code than training's: un-pipelined gradients, and optax for all else.

The oracle of `ppctl verify`. It shares model, data and settings with training, but not the code of
steps, which is written here a second time, on whole trees in natural order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ppctl.config import SGD, AdamW, Config
from ppctl.executors.compiler_options import cpu_options
from ppctl.executors.reference import reference
from ppctl.model.stack import NO_DECAY, init
from ppctl.model.trainable_parameters import trained_part, with_trained
from ppctl.training.pipeline.evaluation import mean_of
from ppctl.training.pipeline.job import TrainingJob

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
    """The un-pipelined model of a job; loss_and_grads: (params, batch) -> (loss, grads).

    Batches are divided into mesh.dp*mesh.fsdp*num_microbatches parts as on devices, so that models
    that mix the examples of a microbatch on purpose can be compared too.
    """

    job: TrainingJob
    params: Tree
    loss_and_grads: Callable[[Tree, Tree], tuple[jax.Array, Tree]]

    def number_of(self, batch: Tree) -> float:
        """Return the number of losses of a batch."""
        return float(self._number(self.params, batch))

    @cached_property
    def _number(self) -> Callable[[Tree, Tree], jax.Array]:
        pipe, how = self.job.pipe, {"num_microbatches": 1, "remat": "none", "with_grads": False}
        losses = reference(pipe.stack, dtype=pipe.dtype, **how)
        args = self.params, next(self.job.data.batches())
        return _compiled(lambda params, batch: losses(params, batch)[1], *args)

    def run(self, num_steps: int, clip_norm: float | None, tolerance: float) -> PlainSteps:
        """Return the first train steps, clipped at this norm.

        tolerance: of a gradient, relative to the largest of its array. Adam divides gradients by
        their size, so that rounding noise may move a parameter as far as any gradient. So the
        updates are repeated with gradients that are a tolerance larger and smaller.
        """
        # 1. the update of a state
        config, data = self.job.config, self.job.data
        optimizer, lr_schedule = plain_optimizer(config), plain_lr_schedule(config)
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
        compiled_update = _compiled(update, before, trained, max_norm, 0.0)
        for k, batch in enumerate(islice(data.batches(), num_steps)):
            loss, grads = jax.device_get(self.loss_and_grads(states[0]["params"], batch))
            lr = float(jnp.asarray(lr_schedule(k)))
            numbers.append(StepNumbers(float(loss), _norm(grads), lr))
            pairs = zip(states, SHIFTS, strict=True)
            updated = [compiled_update(state, grads, max_norm, shift) for state, shift in pairs]
            states = jax.device_get(updated)
        # 3. what they leave
        after, *shifted = states
        largest = lambda a, *others: np.max([np.abs(b - a) for b in others], axis=0)  # noqa: E731
        slack, eval_loss = jax.tree.map(largest, after, *shifted), None
        if config.run.eval_every is not None:
            loss_of = lambda batch: float(self.loss_and_grads(after["params"], batch)[0])  # noqa: E731
            batches = data.eval_batches(self.job.num_eval_batches)
            means = [(loss_of(batch), self.number_of(batch)) for batch in batches]
            eval_loss = mean_of(means, data.name)
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
    how = {"num_microbatches": num_parts, "remat": "none", "dtype": pipe.dtype}
    function = reference(pipe.stack, **how)
    return PlainModel(job, params, _compiled(function, params, next(job.data.batches())))


def plain_optimizer(config: Config) -> optax.GradientTransformation:
    """Return the config's optimizer from optax, without clipping."""
    lr_schedule, optim = plain_lr_schedule(config), config.optim
    if isinstance(optim, SGD):
        return optax.sgd(lr_schedule, momentum=optim.momentum)
    assert isinstance(optim, AdamW), optim
    is_decayed = lambda path, _: path[-1].key not in NO_DECAY  # noqa: E731
    mask = lambda params: jax.tree_util.tree_map_with_path(is_decayed, params)  # noqa: E731
    sizes = {key: asdict(optim)[key] for key in ("b1", "b2", "eps", "weight_decay")}
    return optax.adamw(lr_schedule, **sizes, mask=mask)


def plain_lr_schedule(config: Config) -> optax.Schedule:
    """Return optax's linear warm-up, from lr/(w+1) to lr after w steps, and cosine decay.

    w is warmup_steps, but less than the steps of the run.
    """
    optim, num_steps = config.optim, config.run.num_steps
    w = min(optim.warmup_steps, num_steps - 1)
    steps, last = (w, max(num_steps, w + 1)), optim.lr * optim.min_lr_fraction
    rates = optax.warmup_cosine_decay_schedule(optim.lr / (w + 1), optim.lr, *steps, last)
    return lambda step: rates(jnp.asarray(step, float))  # of an int32 optax computes in float32


def _norm(tree: Tree) -> float:
    squares = (np.square(a, dtype=np.float64).sum() for a in jax.tree.leaves(tree))
    return math.sqrt(sum(map(float, squares)))


def _compiled(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Return a function compiled for these arguments, quickly, since it runs a few times."""
    options = cpu_options("once") if jax.default_backend() == "cpu" else None
    return jax.jit(function).lower(*args).compile(options)
