"""The optimizers of optax behind global-norm clipping, with a warm-up and cosine lr_schedule."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ppctl.model.stack import NO_DECAY


def lr_schedule(*, lr: float, min_lr_fraction: float, warmup_steps: int, num_steps: int) -> optax.Schedule:
    """Learning rate of update k = 0, 1, ...: linear up to `lr`, then a cosine to min_lr_fraction*lr at num_steps."""
    warmup_steps = min(warmup_steps, num_steps - 1)  # a short run still reaches its peak
    warmup = lambda k: lr * (k + 1) / (warmup_steps + 1)  # noqa: E731  the first update is not lost on a rate of 0
    cosine = optax.cosine_decay_schedule(lr, max(1, num_steps - warmup_steps), alpha=min_lr_fraction)
    return optax.join_schedules([warmup, cosine], [warmup_steps])


def adamw(
    schedule: optax.Schedule,
    *,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    clip_norm: float | None,
) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019) with decay on matrices only, behind clipping.

    `update(..., norm=n)` takes the global norm of the gradients, which may be over more than the tree it is given.
    """
    return optax.chain(_clip(clip_norm), optax.adamw(schedule, b1, b2, eps, weight_decay=weight_decay, mask=decays))


def sgd(schedule: optax.Schedule, *, momentum: float | None, clip_norm: float | None) -> optax.GradientTransformation:
    """w <- w - lr*g behind clipping, or w - lr*v with v <- momentum*v + g (Polyak 1964); None keeps no v."""
    return optax.chain(_clip(clip_norm), optax.sgd(schedule, momentum))


OPTIMIZERS = {"adamw": adamw, "sgd": sgd}


def _clip(max_norm: float | None) -> optax.GradientTransformation:
    return optax.identity() if max_norm is None else clip_by_norm(max_norm)


def clip_by_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """optax.clip_by_global_norm of a norm that is known: g where norm < max_norm, else g / norm * max_norm."""

    def update(updates: Any, state: Any, params: Any = None, *, norm: jax.Array, **_: Any) -> tuple[Any, Any]:
        del params
        clipped = lambda g: jnp.where(norm < max_norm, g, g / norm.astype(g.dtype) * max_norm)  # noqa: E731
        return jax.tree.map(clipped, updates), state

    # optax's types know of no extra arguments
    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]


def needs_no_clipping(norm: float, max_norm: float | None) -> bool:
    """Whether `clip_by_norm` leaves gradients of this norm as they are. None: there is no clipping."""
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
