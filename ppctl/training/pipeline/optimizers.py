"""Optimizers of optax, clipping by the global norm, and learning rates (warm-up, then a cosine)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ppctl.errors import ConfigError
from ppctl.model.stack import NO_DECAY


@dataclass(frozen=True)
class LrSchedule:
    """Learning rate of update k: linear up to `lr`, then a cosine to min_lr_fraction*lr at the end.

    A train step takes its numbers as arguments, so that runs of other rates share a program.
    """

    lr: float
    min_lr_fraction: float
    warmup_steps: int
    num_steps: int

    @property
    def numbers(self) -> np.ndarray:
        """The numbers that `at` takes, float [4]."""
        warmup_steps = min(self.warmup_steps, self.num_steps - 1)  # short runs reach the peak too
        numbers = self.lr, self.min_lr_fraction, warmup_steps, max(1, self.num_steps - warmup_steps)
        return np.asarray(numbers, jnp.result_type(float))

    def __call__(self, k: Any) -> jax.Array:
        return self.at(self.numbers, k)

    @staticmethod
    def at(numbers: Any, k: Any) -> jax.Array:
        """Return the learning rate of update k by these numbers."""
        lr, min_fraction, warmup_steps, decay_steps = numbers
        rising = lr * (k + 1) / (warmup_steps + 1)  # the first update is not lost on a rate of 0
        done = jnp.minimum(k - warmup_steps, decay_steps) / decay_steps
        falling = lr * (min_fraction + (1 - min_fraction) * (1 + jnp.cos(jnp.pi * done)) / 2)
        return jnp.where(k < warmup_steps, rising, falling)


def lr_numbers(schedule: optax.Schedule | None) -> np.ndarray | None:
    """Return the numbers of a schedule that a train step takes as an argument, or None."""
    return schedule.numbers if isinstance(schedule, LrSchedule) else None


def lr_of(schedule: optax.Schedule, numbers: Any, step: jax.Array) -> jax.Array:
    """Return the learning rate of a step, by `numbers` where they are not None."""
    return jnp.asarray(schedule(step)) if numbers is None else LrSchedule.at(numbers, step)


def adamw(
    schedule: optax.Schedule, *, b1: float, b2: float, eps: float, weight_decay: float
) -> optax.GradientTransformation:
    """Return AdamW (Loshchilov and Hutter 2019) decaying matrices only; state as optax.adamw."""
    decay = optax.add_decayed_weights(weight_decay, decays)
    return optax.chain(optax.scale_by_adam(b1, b2, eps), decay, scale_by_lr(schedule))


def sgd(schedule: optax.Schedule, *, momentum: float | None) -> optax.GradientTransformation:
    """Return w <- w - lr*g, or w - lr*v with v <- momentum*v + g (Polyak 1964); None keeps no v."""
    velocity = optax.identity() if momentum is None else optax.trace(momentum)
    return optax.chain(velocity, scale_by_lr(schedule))


def scale_by_lr(schedule: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """Return optax.scale_by_learning_rate with `update(..., lr=rate)` for a known rate."""

    def init(params: Any) -> optax.ScaleByScheduleState:
        del params
        return optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))

    def update(
        updates: Any, state: Any, params: Any = None, *, lr: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        del params
        rate = lr_of(schedule, None, state.count) if lr is None else lr
        scaled = jax.tree.map(lambda g: (-rate).astype(g.dtype) * g, updates)
        return scaled, optax.ScaleByScheduleState(optax.safe_increment(state.count))

    # optax's types know of no extra arguments
    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


OPTIMIZERS = {"adamw": adamw, "sgd": sgd}


def clipped(
    optimizer: optax.GradientTransformation, max_norm: float | None
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer after clipping by a global norm; None: no clipping, equal state.

    `update(..., norm=n)` takes that norm, which may be of more gradients than the tree given.
    """
    return optax.chain(optax.identity() if max_norm is None else clip_by_norm(max_norm), optimizer)


def check_separable(optimizer: optax.GradientTransformation, params: Any, *, by_rank: bool) -> None:
    """Raise ConfigError if an update depends on the grouping of parameters, as layouts differ in.

    params: {"embed_head": tree, "layers": tree of [L, ...]}, shapes. The update of small random
    numbers is compared with that of the same layers stacked as stages; with by_rank, where each
    rank updates its parameters, also with those of a separate layer and of separate embed_head.
    """
    # 1. small weights and gradients
    rng = np.random.default_rng(0)

    def small(a: Any, scale: float) -> np.ndarray:
        shape = (2, *(min(n, 2) for n in a.shape[1:])) if a.shape else ()
        return np.asarray(scale * rng.standard_normal(shape), np.float32)

    weights = jax.tree.map(lambda a: small(a, 1.0), params)
    grads = jax.tree.map(lambda a: small(a, 1e3), params)
    # 2. their updates, whole and in groups; one program: else each operation is compiled
    update = partial(_update_of, optimizer, weights, grads)
    try:
        pairs = jax.device_get(jax.jit(lambda: _equal_updates(update, by_rank=by_rank))())
    except Exception as error:  # anything that the optimizer's code raises
        raise ConfigError(
            "The optimizer fails on parameters in groups as stages hold them: "
            f"{type(error).__name__}: {error}. Use one that treats each parameter by itself."
        ) from error
    # 3. the comparison
    one, other = zip(*pairs, strict=True)
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    if not all(np.allclose(a, b, rtol=1e-4) for a, b in leaves):
        where = "executor=spmd, or " if by_rank else ""
        raise ConfigError(
            "The optimizer's update of a parameter depends on other parameters, or on how layers "
            "are stacked, so that it would differ from layout to layout. Use clip_norm=NORM for "
            f"clipping by the global norm, {where}an optimizer that treats each parameter by "
            "itself."
        )


def _update_of(optimizer: Any, weights: Any, grads: Any, part: Callable[[Any], Any]) -> Any:
    """Return the update of a part of a model."""
    update = optax.with_extra_args_support(optimizer).update
    trained = part(weights)
    return update(part(grads), optimizer.init(trained), trained, norm=jnp.asarray(1e4))[0]


def _equal_updates(update: Callable[[Callable[[Any], Any]], Any], *, by_rank: bool) -> list[Any]:
    """Return pairs of updates that must be equal."""

    def with_layers(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda tree: {**tree, "layers": jax.tree.map(change, tree["layers"])}

    whole, stacked = update(lambda tree: tree), update(with_layers(lambda a: a[None, :, None]))
    pairs = [(whole, with_layers(lambda a: a[0, :, 0])(stacked))]
    if by_rank:
        first = with_layers(lambda a: a[:1])
        for key in ("embed_head", "layers"):
            separate = lambda tree, key=key: {key: first(tree)[key]}  # noqa: E731
            pairs.append((separate(whole), update(separate)))
    return pairs


def clip_by_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Return optax.clip_by_global_norm of a known norm: g / max(1, norm / max_norm)."""

    def update(
        updates: Any, state: Any, params: Any = None, *, norm: jax.Array, **_: Any
    ) -> tuple[Any, Any]:
        del params
        clipped = lambda g: jnp.where(norm < max_norm, g, g / norm.astype(g.dtype) * max_norm)  # noqa: E731
        return jax.tree.map(clipped, updates), state

    # optax's types know of no extra arguments
    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]


def needs_no_clipping(norm: float, max_norm: float | None) -> bool:
    """Return whether clipping leaves gradients of this norm as they are; max_norm None: always."""
    return max_norm is None or norm < max_norm


def decays(params: Any) -> Any:
    """Return for each leaf whether weight decay applies: not to norms and biases."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in NO_DECAY, params)


def global_norm(tree: Any) -> jax.Array:
    """Return the 2-norm of all leaves together, in at least float32."""
    return jnp.sqrt(sum_of_squares(tree))


def sum_of_squares(tree: Any) -> jax.Array:
    """Return the sum of squares of all entries of all leaves, in at least float32."""
    wide = (a.astype(jnp.promote_types(a.dtype, jnp.float32)) for a in jax.tree.leaves(tree))
    return sum((jnp.sum(jnp.square(a)) for a in wide), start=jnp.zeros((), jnp.float32))
