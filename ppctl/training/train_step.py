"""The train step: gradients by an executor, clipping and the optimizer, on donated state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ppctl.training.optim import global_norm, lr_of

Tree = Any
LossAndGrads = Callable[[Tree, Tree], tuple[jax.Array, Tree]]


def init_state(params: Tree, optimizer: optax.GradientTransformation) -> Tree:
    """Return {"params", "optimizer", "step"}: all that a checkpoint must hold."""
    return {"params": params, "optimizer": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}


def train_step(
    loss_and_grads: LossAndGrads, optimizer: optax.GradientTransformation, lr_schedule: optax.Schedule | None = None
) -> Callable[..., tuple[Tree, dict[str, jax.Array]]]:
    """Return (state, batch) -> (next state, {"loss", "grad_norm", "lr"}); grad_norm is before clipping, of all stages.

    Without an lr_schedule there is no "lr". The function takes `optim.lr_numbers` of the schedule as a third argument;
    without it they are constants.
    """

    def step(state: Tree, batch: Tree, numbers: Any = None) -> tuple[Tree, dict[str, jax.Array]]:
        loss, grads = loss_and_grads(state["params"], batch)
        norm = global_norm(grads)
        metrics: dict[str, Any] = {"loss": loss, "grad_norm": norm}
        if lr_schedule is not None:
            metrics["lr"] = lr_of(lr_schedule, numbers, state["step"])
        return apply_gradients(optimizer, state, grads, norm, metrics.get("lr")), metrics

    return step


def apply_gradients(
    optimizer: optax.GradientTransformation, state: Tree, grads: Tree, norm: jax.Array, lr: jax.Array | None = None
) -> Tree:
    """Return the next state of a model or of a part of it.

    norm: of the whole model's gradients. lr: for optimizers of `optim`; None: by their own schedule.
    """
    update = optax.with_extra_args_support(optimizer).update
    extra = {"norm": norm} if lr is None else {"norm": norm, "lr": lr}
    updates, optimizer_state = update(grads, state["optimizer"], state["params"], **extra)
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "optimizer": optimizer_state, "step": state["step"] + 1}
