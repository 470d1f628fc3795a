"""The train step: gradients by an executor, clipping and the optimizer, on donated state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ppctl.model.trainable_parameters import trained_part, with_trained
from ppctl.training.pipeline.optimizers import global_norm

Tree = Any
LossAndGrads = Callable[[Tree, Tree], tuple[jax.Array, Tree]]


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
    """Return (state, batch) -> (next state, {"loss", "grad_norm", "lr"}).

    grad_norm is of all stages, before clipping; "lr" is missing without an lr_schedule.
    """

    def step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        loss, grads = loss_and_grads(state["params"], batch)
        norm = global_norm(grads)
        metrics: dict[str, Any] = {"loss": loss, "grad_norm": norm}
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
