"""The parameters of another run, such as an imported model, as the start of a new one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from ppctl.config import Config
from ppctl.errors import CheckpointError
from ppctl.model.lora import A, with_base, without_adapters
from ppctl.model.stack import init
from ppctl.training.adapters import stored_lora
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.checkpoint.manifest import array_types, differences
from ppctl.training.engines.states import shardings_of
from ppctl.training.job import TrainingJob
from ppctl.training.models import lora_of
from ppctl.training.train_step import init_state

Tree = Any


def state_from(config: Config, job: TrainingJob) -> Tree | None:
    """Return the state before step 1 with the newest parameters of run.start_from, in natural order; None without.

    Moments of the optimizer begin at zero. With optim.train=lora the parameters are the base, beside which adapters
    begin, unless they come with adapters. CheckpointError where there are no such parameters, or others.
    """
    directory = config.run.start_from
    if directory is None:
        return None
    natural, stack = job.pipe.states.natural, job.pipe.stack
    with Checkpoints(Path(directory) / "checkpoints", keep=None) as checkpoints:
        step = checkpoints.latest()
        if step is None:
            raise CheckpointError(
                f"run.start_from={directory} has no checkpoint. Name a run directory, as `ppctl import` writes one."
            )
        found, theirs, own = checkpoints.param_types(step), stored_lora(checkpoints, step), lora_of(config.optim)
        has_adapters, trains_adapters = any(name.endswith(A) for name in found), own is not None
        if has_adapters and not trains_adapters:
            raise CheckpointError(
                f"run.start_from={directory} has adapters, and optim.train=all trains none. Use optim.train=lora, or "
                f"merge them: ppctl export {directory} --out MODEL, ppctl import MODEL --out RUN_DIR."
            )
        if theirs is not None and own is not None and theirs != own:
            unlike = [
                f"optim.lora_{key}: {_shown(old)} there, {_shown(new)} here"
                for (key, old), new in zip(asdict(theirs).items(), asdict(own).values(), strict=True)
                if old != new
            ]
            raise CheckpointError(
                f"run.start_from={directory} has other adapters: {', '.join(unlike)}. Use those, or merge them: ppctl "
                f"export {directory} --out MODEL, ppctl import MODEL --out RUN_DIR."
            )
        are_base = trains_adapters and not has_adapters
        wanted = without_adapters(natural["params"]) if are_base else natural["params"]
        unlike = differences(found, array_types(wanted))
        if unlike:
            raise CheckpointError(
                f"run.start_from={directory} is of another model: {unlike[0]} (the first of {len(unlike)}). Use its "
                "recipe, or the model settings in its config.yaml."
            )
        params = checkpoints.restore_params(step, wanted)

    def fresh(params: Tree) -> Tree:
        whole = with_base(init(stack, config.run.seed), params) if are_base else params
        return init_state(whole, job.pipe.optimizer, stack.trainable)

    return jax.jit(fresh, out_shardings=shardings_of(natural))(params)


def _shown(setting: Any) -> str:
    return "null" if setting is None else str([*setting] if isinstance(setting, tuple) else setting)
