"""Adapters in checkpoints."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from ppctl.model.lora import Lora, merged
from ppctl.training.checkpoint.stored_checkpoints import StoredCheckpoints


def stored_lora(checkpoints: StoredCheckpoints, step: int) -> Lora | None:
    """Return the adapters of a checkpoint, from its run's settings; None if it has no adapters."""
    optim = checkpoints.meta(step).get("config", {}).get("optim", {})
    if not isinstance(optim, Mapping) or optim.get("train") != "lora":
        return None
    targets = None if optim["lora_targets"] is None else tuple(optim["lora_targets"])
    return Lora(optim["lora_rank"], optim["lora_alpha"], targets, optim["lora_dropout"])


def merged_params(checkpoints: StoredCheckpoints, step: int, device: Any) -> Any:
    """Return a checkpoint's parameters on one device, in natural order, with adapters merged."""
    lora = stored_lora(checkpoints, step)
    params = checkpoints.restore_params(step, device)
    return params if lora is None else jax.jit(partial(merged, scale=lora.scale))(params)
