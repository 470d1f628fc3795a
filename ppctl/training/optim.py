"""The optimizers of optax, clipping by the global norm, and a warm-up and cosine lr_schedule."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ppctl.errors import ConfigError
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
) -> optax.GradientTransformation:
    """Return AdamW (Loshchilov and Hutter 2019) with decay on matrices only."""
    return optax.adamw(schedule, b1, b2, eps, weight_decay=weight_decay, mask=decays)


def sgd(schedule: optax.Schedule, *, momentum: float | None) -> optax.GradientTransformation:
    """Return w <- w - lr*g, or w - lr*v with v <- momentum*v + g (Polyak 1964); None keeps no v."""
    return optax.sgd(schedule, momentum)


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
