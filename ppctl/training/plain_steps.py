"""Train steps without ppctl's own: un-pipelined gradients, and clipping, optimizer and learning rates of optax alone.

The oracle of `ppctl verify`. It shares model, data and settings with training, and none of the code that makes steps
of them: that is written here a second time, on whole trees in natural order.
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
from ppctl.executors.compiler_preset import cpu_options
from ppctl.executors.reference import reference
from ppctl.model.stack import NO_DECAY, init
from ppctl.model.trainable import trained_part, with_trained
from ppctl.training.evaluation import mean_of
from ppctl.training.job import TrainingJob

Tree = Any
SHIFTS = (0.0, -1.0, 1.0)  # of the gradients, in tolerances; the first is the oracle
ROUNDINGS = 8.0  # of the largest number, that another order of sums may make of one


class StepNumbers(NamedTuple):
    """The numbers that a train step reports."""

    loss: float
    grad_norm: float  # before clipping
    lr: float


@dataclass(frozen=True)
class PlainSteps:
    """The first train steps as they should be. Trees are on the host: {"params", "optimizer"} in natural order."""

    clip_norm: float | None
    numbers: tuple[StepNumbers, ...]  # of each step
    before: Tree
    after: Tree
    slack: Tree  # for each number of `after`, how far it moves when gradients are off by their tolerance
    eval_loss: float | None  # None: the request evaluates nothing

    @property
    def clipped(self) -> tuple[bool, ...]:
        """Return for each step whether its gradients are clipped."""
        return tuple(self.clip_norm is not None and each.grad_norm >= self.clip_norm for each in self.numbers)


@dataclass(frozen=True)
class PlainModel:
    """The un-pipelined model of a job: initial parameters on the host, and a function (params, batch) -> (loss, grads).

    Batches are divided as devices divide them, mesh.dp*mesh.fsdp*num_microbatches times, so that a model which is meant
    to mix the examples of a microbatch is compared too.
    """

    job: TrainingJob
    params: Tree
    loss_and_grads: Callable[[Tree, Tree], tuple[jax.Array, Tree]]

    def number_of(self, batch: Tree) -> float:
        """Return how many losses a batch has the mean of."""
        return float(self._number(self.params, batch))

    @cached_property
    def _number(self) -> Callable[[Tree, Tree], jax.Array]:
        pipe, unroll = self.job.pipe, self.job.config.executor.unroll
        of = reference(pipe.stack, num_microbatches=1, remat="none", unroll=unroll, dtype=pipe.dtype, with_grads=False)
        return _compiled(lambda params, batch: of(params, batch)[1], self.params, next(self.job.data.batches()))

    def run(self, num_steps: int, clip_norm: float | None, tolerance: float) -> PlainSteps:
        """Return the first train steps, clipped at this norm; tolerance: of gradients, of the largest of their array.

        Adam divides a gradient by its own size, so that one that is nothing but rounding may move its parameter as far
        as any other. So the same updates are also made of gradients that are a tolerance larger and smaller.
        """
        config, data = self.job.config, self.job.data
        optimizer, lr_schedule = plain_optimizer(config), plain_lr_schedule(config)
        max_norm = math.inf if clip_norm is None else clip_norm
        own = partial(trained_part, trainable=self.job.pipe.stack.trainable)

        def update(state: Tree, grads: Tree, max_norm: jax.Array, shift: jax.Array) -> Tree:
            clipping = optax.clip_by_global_norm(max_norm)
            grads, _ = clipping.update(grads, clipping.init(grads))
            least = rounding_of(grads)  # a gradient that is 0 is rounding, in which its own size means nothing
            size = lambda g: jnp.maximum(tolerance * jnp.abs(g).max(), least)  # noqa: E731
            grads = jax.tree.map(lambda g: g + (shift * size(g)).astype(g.dtype), grads)
            trained = own(state["params"])
            updates, optimizer_state = optimizer.update(grads, state["optimizer"], trained)
            params = with_trained(optax.apply_updates(trained, updates), state["params"])
            return {"params": params, "optimizer": optimizer_state}

        before = {"params": self.params, "optimizer": jax.device_get(optimizer.init(own(self.params)))}
        states, numbers = [before] * len(SHIFTS), []
        compiled_update = _compiled(update, before, own(self.params), max_norm, 0.0)
        for k, batch in enumerate(islice(data.batches(), num_steps)):
            loss, grads = jax.device_get(self.loss_and_grads(states[0]["params"], batch))
            numbers.append(StepNumbers(float(loss), _norm(grads), float(jnp.asarray(lr_schedule(k)))))
            states = [
                jax.device_get(compiled_update(state, grads, max_norm, shift))
                for state, shift in zip(states, SHIFTS, strict=True)
            ]
        after, *shifted = states
        slack = jax.tree.map(lambda a, *others: np.max([np.abs(b - a) for b in others], axis=0), after, *shifted)
        eval_loss = None
        if config.run.eval_every is not None:
            batches = data.eval_batches(self.job.num_eval_batches)
            found = [(self.loss_and_grads(after["params"], each)[0], self.number_of(each)) for each in batches]
            eval_loss = mean_of([(float(loss), number) for loss, number in found], data.name)
        return PlainSteps(clip_norm, tuple(numbers), before, after, slack, eval_loss)


def rounding_of(grads: Tree) -> Any:
    """Return how far rounding may move a gradient that sums to 0, by the largest of all."""
    leaves = jax.tree.leaves(grads)
    return ROUNDINGS * jnp.finfo(leaves[0].dtype).eps * jnp.stack([jnp.abs(g).max() for g in leaves]).max()


def plain_model(job: TrainingJob) -> PlainModel:
    """Return the un-pipelined model of a job."""
    config, pipe = job.config, job.pipe
    params = jax.device_get(_compiled(lambda: init(pipe.stack, config.run.seed))())
    function = reference(
        pipe.stack,
        num_microbatches=config.schedule.num_microbatches * config.mesh.dp * config.mesh.fsdp,
        remat="none",
        unroll=config.executor.unroll,
        dtype=pipe.dtype,
    )
    return PlainModel(job, params, _compiled(function, params, next(job.data.batches())))


def plain_optimizer(config: Config) -> optax.GradientTransformation:
    """Return the optimizer that the config asks for, as optax alone has it, without clipping."""
    lr_schedule, optim = plain_lr_schedule(config), config.optim
    if isinstance(optim, SGD):
        return optax.sgd(lr_schedule, momentum=optim.momentum)
    assert isinstance(optim, AdamW), optim
    is_decayed = lambda path, _: path[-1].key not in NO_DECAY  # noqa: E731
    mask = lambda params: jax.tree_util.tree_map_with_path(is_decayed, params)  # noqa: E731
    sizes = {key: asdict(optim)[key] for key in ("b1", "b2", "eps", "weight_decay")}
    return optax.adamw(lr_schedule, **sizes, mask=mask)


def plain_lr_schedule(config: Config) -> optax.Schedule:
    """Return optax's linear warm-up and cosine decay: lr/(w+1) in the first step, lr after w, a share of it at the end.

    w is warmup_steps, but less than the steps of the run.
    """
    optim, num_steps = config.optim, config.run.num_steps
    w = min(optim.warmup_steps, num_steps - 1)
    rates = optax.warmup_cosine_decay_schedule(
        optim.lr / (w + 1), optim.lr, w, max(num_steps, w + 1), optim.lr * optim.min_lr_fraction
    )
    return lambda step: rates(jnp.asarray(step, float))  # of an int32, optax's line is computed in float32


def _norm(tree: Tree) -> float:
    return math.sqrt(sum(float(np.square(a, dtype=np.float64).sum()) for a in jax.tree.leaves(tree)))


def _compiled(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Return a function compiled for these arguments; it runs a few times, so it is compiled by the quickest means."""
    options = cpu_options("once") if jax.default_backend() == "cpu" else None
    return jax.jit(function).lower(*args).compile(options)
