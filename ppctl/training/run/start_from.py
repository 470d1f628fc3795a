"""The parameters of another run, such as an imported model, as the start of a new one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from ppctl.config import Config
from ppctl.errors import CheckpointError
from ppctl.model.lora import A, Lora, with_base, without_adapters
from ppctl.model.stack import init
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.checkpoint.manifest import array_types, differences
from ppctl.training.checkpoint.stored_adapters import stored_lora
from ppctl.training.pipeline.built_in_models import lora_of
from ppctl.training.pipeline.engines.train_states import shardings_of
from ppctl.training.pipeline.job import TrainingJob
from ppctl.training.pipeline.train_step import init_state

Tree = Any


def state_from(config: Config, job: TrainingJob) -> Tree | None:
    """Return the state before step 1 with the newest parameters of run.start_from; None without.

    In natural order; the optimizer starts anew. With optim.train=lora they are the base of new
    adapters, unless they come with adapters. CheckpointError if they are missing or do not fit.
    """
    # 1. the parameters
    directory, lora = config.run.start_from, lora_of(config.optim)
    if directory is None:
        return None
    natural, stack = job.pipe.states.natural, job.pipe.stack
    with Checkpoints(Path(directory) / "checkpoints", keep=None) as checkpoints:
        step = checkpoints.latest()
        if step is None:
            raise CheckpointError(
                f"run.start_from={directory} has no checkpoint. Name a run directory, as `ppctl "
                "import` writes one."
            )
        types = checkpoints.param_types(step)
        has_adapters = any(name.endswith(A) for name in types)
        _check_adapters(directory, lora, stored_lora(checkpoints, step), has_adapters=has_adapters)
        is_base = lora is not None and not has_adapters
        wanted = without_adapters(natural["params"]) if is_base else natural["params"]
        unlike = differences(types, array_types(wanted))
        if unlike:
            raise CheckpointError(
                f"run.start_from={directory} is of another model: {unlike[0]} (the first of "
                f"{len(unlike)}). Use its recipe, or the model settings in its config.yaml."
            )
        params = checkpoints.restore_params(step, wanted)

    # 2. the state that starts with them
    def fresh(params: Tree) -> Tree:
        params = with_base(init(stack, config.run.seed), params) if is_base else params
        return init_state(params, job.pipe.optimizer, stack.trainable)

    return jax.jit(fresh, out_shardings=shardings_of(natural))(params)


def _check_adapters(
    directory: str, lora: Lora | None, stored: Lora | None, *, has_adapters: bool
) -> None:
    """Raise CheckpointError where a run's adapters are not those that this run trains."""
    merge = f"merge them: ppctl export {directory} --out MODEL, ppctl import MODEL --out RUN_DIR."
    if has_adapters and lora is None:
        raise CheckpointError(
            f"run.start_from={directory} has adapters, and optim.train=all trains none. Use "
            f"optim.train=lora, or {merge}"
        )
    if lora is not None and stored not in (None, lora):
        unlike = [
            f"optim.lora_{key}: {_shown(old)} there, {_shown(new)} here"
            for key, new in asdict(lora).items()
            if (old := getattr(stored, key)) != new
        ]
        what = f"run.start_from={directory} has other adapters: {', '.join(unlike)}"
        raise CheckpointError(f"{what}. Use those, or {merge}")


def _shown(setting: Any) -> str:
    return "null" if setting is None else str([*setting] if isinstance(setting, tuple) else setting)
