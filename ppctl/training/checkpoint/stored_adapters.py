"""Adapters of a checkpoint (optim.train=lora), and its parameters with them merged in."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from ppctl.model.lora import Lora, merged
from ppctl.training.checkpoint.checkpoint import Checkpoints

Tree = Any


def stored_lora(checkpoints: Checkpoints, step: int) -> Lora | None:
    """Return the adapters of a checkpoint by its run's settings, or None."""
    optim = checkpoints.meta(step).get("config", {}).get("optim", {})
    if not isinstance(optim, Mapping) or optim.get("train") != "lora":
        return None
    targets = None if optim["lora_targets"] is None else tuple(optim["lora_targets"])
    return Lora(optim["lora_rank"], optim["lora_alpha"], targets)


def merged_params(checkpoints: Checkpoints, step: int, device: Any) -> Tree:
    """Return the parameters of a checkpoint on one device, in natural order, adapters merged in.

    Raises as `Checkpoints.restore_params`.
    """
    lora = stored_lora(checkpoints, step)
    params = checkpoints.restore_params(step, device)
    return params if lora is None else jax.jit(partial(merged, scale=lora.scale))(params)
