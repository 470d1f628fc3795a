"""Optimizers of optax, clipping by the global norm, and learning rates (warm-up, then a cosine)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ppctl.errors import ConfigError
from ppctl.model.random_keys import with_example_keys
from ppctl.model.stack import NO_DECAY
from ppctl.model.trainable_parameters import trained_part, with_trained


def warmup_cosine(
    lr: float, min_lr_fraction: float, warmup_steps: int, num_steps: int
) -> optax.Schedule:
    """Return the learning rate of update k: linear up to `lr`, then a cosine to its fraction.

    The first update has lr/(warmup_steps + 1), not 0; runs shorter than the warm-up reach `lr` too.
    """
    steps = min(warmup_steps, num_steps - 1)
    sizes = lr / (steps + 1), lr, steps, max(num_steps, steps + 1), lr * min_lr_fraction
    rates = optax.warmup_cosine_decay_schedule(*sizes)
    return lambda k: jnp.asarray(rates(jnp.asarray(k, float)))  # of an int32, float32 with x64 too


def decays(params: Any) -> Any:
    """Return for each leaf whether weight decay applies: not to norms and biases."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in NO_DECAY, params)


adamw = partial(optax.adamw, mask=decays)
OPTIMIZERS = {"adamw": adamw, "sgd": optax.sgd}


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


def global_norm(tree: Any) -> jax.Array:
    """Return the 2-norm of all leaves together, in at least float32."""
    return jnp.sqrt(sum_of_squares(tree))


def sum_of_squares(tree: Any) -> jax.Array:
    """Return the sum of squares of all entries of all leaves, in at least float32."""
    wide = (a.astype(jnp.promote_types(a.dtype, jnp.float32)) for a in jax.tree.leaves(tree))
    return sum((jnp.sum(jnp.square(a)) for a in wide), start=jnp.zeros((), jnp.float32))


Tree = Any
LossAndGrads = Callable[[Tree, Tree], tuple[dict[str, jax.Array], Tree]]  # params, batch -> losses


def init_state(
    params: Tree, optimizer: optax.GradientTransformation, trainable: Tree = True
) -> Tree:
    """Return {"params", "optimizer", "step"}, the state in a checkpoint.

    trainable: as of a `Stack`; the optimizer has no state for frozen parameters.
    """
    state = optimizer.init(trained_part(params, trainable))
    return {"params": params, "optimizer": state, "step": jnp.zeros((), jnp.int32)}


def train_step(
    loss_and_grads: LossAndGrads,
    optimizer: optax.GradientTransformation,
    lr_schedule: optax.Schedule | None = None,
) -> Callable[..., tuple[Tree, dict[str, jax.Array]]]:
    """Return (state, batch) -> (next state, {"loss", attached losses, "grad_norm", "lr"}).

    batch: as in `with_example_keys`. grad_norm is of all stages, before clipping; "lr" is missing
    without an lr_schedule.
    """

    def step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        losses, grads = loss_and_grads(state["params"], with_example_keys(batch, state["step"]))
        norm = global_norm(grads)
        metrics: dict[str, Any] = losses | {"grad_norm": norm}
        if lr_schedule is not None:
            metrics["lr"] = lr_schedule(state["step"])
        return apply_gradients(optimizer, state, grads, norm), metrics

    return step


def apply_gradients(
    optimizer: optax.GradientTransformation, state: Tree, grads: Tree, norm: jax.Array
) -> Tree:
    """Return the next state of a model or of a part of it; gradients of None: frozen parameters.

    norm: of the whole model's gradients.
    """
    update = optax.with_extra_args_support(optimizer).update
    trained = jax.tree.map(lambda p, g: None if g is None else p, state["params"], grads)
    updates, optimizer_state = update(grads, state["optimizer"], trained, norm=norm)
    params = with_trained(optax.apply_updates(trained, updates), state["params"])
    return {"params": params, "optimizer": optimizer_state, "step": state["step"] + 1}
