"""The optimizers of optax, clipping by the global norm, and learning rates that warm up and fall as a cosine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ppctl.errors import ConfigError
from ppctl.model.stack import NO_DECAY


@dataclass(frozen=True)
class LrSchedule:
    """Learning rate of update k = 0, 1, ...: linear up to `lr`, then a cosine to min_lr_fraction*lr at num_steps.

    A train step takes its numbers as arguments, so that runs which differ in them alone share a compiled program.
    """

    lr: float
    min_lr_fraction: float
    warmup_steps: int
    num_steps: int

    @property
    def numbers(self) -> np.ndarray:
        """The numbers that `at` takes, float [4]."""
        warmup_steps = min(self.warmup_steps, self.num_steps - 1)  # a short run still reaches its peak
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


def lr_schedule(*, lr: float, min_lr_fraction: float, warmup_steps: int, num_steps: int) -> optax.Schedule:
    """Return the learning rates that a config asks for."""
    return LrSchedule(lr, min_lr_fraction, warmup_steps, num_steps)


def lr_numbers(schedule: optax.Schedule | None) -> np.ndarray | None:
    """Return the numbers of a schedule that a train step takes as an argument; None: it has none."""
    return schedule.numbers if isinstance(schedule, LrSchedule) else None


def lr_of(schedule: optax.Schedule, numbers: Any, step: jax.Array) -> jax.Array:
    """Return the learning rate of a step, by `numbers` where they are not None."""
    return jnp.asarray(schedule(step)) if numbers is None else LrSchedule.at(numbers, step)


def adamw(
    schedule: optax.Schedule,
    *,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
) -> optax.GradientTransformation:
    """Return AdamW (Loshchilov and Hutter 2019) with decay on matrices only; its state is that of optax.adamw."""
    decay = optax.add_decayed_weights(weight_decay, decays)
    return optax.chain(optax.scale_by_adam(b1, b2, eps), decay, scale_by_lr(schedule))


def sgd(schedule: optax.Schedule, *, momentum: float | None) -> optax.GradientTransformation:
    """Return w <- w - lr*g, or w - lr*v with v <- momentum*v + g (Polyak 1964); None keeps no v."""
    return optax.chain(optax.identity() if momentum is None else optax.trace(momentum), scale_by_lr(schedule))


def scale_by_lr(schedule: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """optax.scale_by_learning_rate, of which `update(..., lr=rate)` takes a rate that is known."""

    def init(params: Any) -> optax.ScaleByScheduleState:
        del params
        return optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))

    def update(updates: Any, state: Any, params: Any = None, *, lr: Any = None, **_: Any) -> tuple[Any, Any]:
        del params
        rate = lr_of(schedule, None, state.count) if lr is None else lr
        scaled = jax.tree.map(lambda g: (-rate).astype(g.dtype) * g, updates)
        return scaled, optax.ScaleByScheduleState(optax.safe_increment(state.count))

    # optax's types know of no extra arguments
    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


OPTIMIZERS = {"adamw": adamw, "sgd": sgd}


def clipped(optimizer: optax.GradientTransformation, max_norm: float | None) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer behind clipping by a global norm; None: without clipping, with a state of the same form.

    `update(..., norm=n)` takes that norm, which may be of more gradients than the tree it is given.
    """
    return optax.chain(optax.identity() if max_norm is None else clip_by_norm(max_norm), optimizer)


def check_separable(optimizer: optax.GradientTransformation, params: Any, *, by_rank: bool) -> None:
    """Raise ConfigError where an update depends on how parameters are grouped, which differs with the layout.

    params: {"ends": tree, "layers": tree of [L, ...]}, shapes. The update of small random numbers is compared with that
    of the same layers stacked otherwise, as stages are; and with by_rank, where each rank updates its own parameters,
    with the updates of a layer alone and of embedding and head alone.
    """
    rng = np.random.default_rng(0)

    def small(a: Any, scale: float) -> np.ndarray:
        shape = (2, *(min(n, 2) for n in a.shape[1:])) if a.shape else ()
        return np.asarray(scale * rng.standard_normal(shape), np.float32)

    weights = jax.tree.map(lambda a: small(a, 1.0), params)
    grads = jax.tree.map(lambda a: small(a, 1e3), params)

    def update(part: Any) -> Any:
        own, given = part(weights), part(grads)
        norm = jnp.asarray(1e4)
        return optax.with_extra_args_support(optimizer).update(given, optimizer.init(own), own, norm=norm)[0]

    def in_groups() -> list[tuple[Any, Any]]:
        """Return pairs of updates that must be equal."""
        whole = update(lambda tree: tree)
        stacked = update(lambda tree: tree | {"layers": jax.tree.map(lambda a: a[None, :, None], tree["layers"])})
        pairs = [(whole["ends"], stacked["ends"])]
        pairs.append((whole["layers"], jax.tree.map(lambda a: a[0, :, 0], stacked["layers"])))
        if by_rank:
            first = update(lambda tree: {"layers": jax.tree.map(lambda a: a[:1], tree["layers"])})
            pairs.append((jax.tree.map(lambda a: a[:1], whole["layers"]), first["layers"]))
            pairs.append((whole["ends"], update(lambda tree: {"ends": tree["ends"]})["ends"]))
        return pairs

    try:
        pairs = jax.device_get(jax.jit(in_groups)())  # one program: each operation by itself would be compiled, too
    except Exception as error:  # whatever the optimizer's own lines raise
        raise ConfigError(
            f"The optimizer fails on parameters in groups as stages hold them: {type(error).__name__}: {error}. "
            "Use one that treats each parameter by itself."
        ) from error
    leaves = [pair for one, other in pairs for pair in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)]
    if not all(np.allclose(a, b, rtol=1e-4) for a, b in leaves):
        where = "executor=spmd, or " if by_rank else ""
        raise ConfigError(
            "The optimizer's update of a parameter depends on other parameters, or on how layers are stacked, so that "
            f"it would differ from layout to layout. Use clip_norm=NORM for clipping by the global norm, {where}an "
            "optimizer that treats each parameter by itself."
        )


def clip_by_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """optax.clip_by_global_norm of a norm that is known: g where norm < max_norm, else g / norm * max_norm."""

    def update(updates: Any, state: Any, params: Any = None, *, norm: jax.Array, **_: Any) -> tuple[Any, Any]:
        del params
        clipped = lambda g: jnp.where(norm < max_norm, g, g / norm.astype(g.dtype) * max_norm)  # noqa: E731
        return jax.tree.map(clipped, updates), state

    # optax's types know of no extra arguments
    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]


def needs_no_clipping(norm: float, max_norm: float | None) -> bool:
    """Return whether `clip_by_norm` leaves gradients of this norm as they are. None: there is no clipping."""
    return max_norm is None or norm < max_norm


def decays(params: Any) -> Any:
    """For each leaf, whether weight decay applies: not to norms and biases."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in NO_DECAY, params)


def global_norm(tree: Any) -> jax.Array:
    """The 2-norm of all leaves together, in at least float32."""
    return jnp.sqrt(sum_of_squares(tree))


def sum_of_squares(tree: Any) -> jax.Array:
    """Of all entries of all leaves, in at least float32."""
    return sum(
        (jnp.sum(jnp.square(a.astype(jnp.promote_types(a.dtype, jnp.float32)))) for a in jax.tree.leaves(tree)),
        start=jnp.zeros((), jnp.float32),
    )
