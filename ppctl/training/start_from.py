"""The parameters of another run, such as an imported model, as the start of a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from ppctl.config import Config
from ppctl.errors import CheckpointError
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.checkpoint.manifest import array_types, differences
from ppctl.training.engines.states import shardings_of
from ppctl.training.job import TrainingJob
from ppctl.training.train_step import init_state

Tree = Any


def state_from(config: Config, job: TrainingJob) -> Tree | None:
    """Return the state before step 1 with the newest parameters of run.start_from, in natural order; None without.

    Moments of the optimizer begin at zero. CheckpointError where there are no such parameters, or others.
    """
    directory = config.run.start_from
    if directory is None:
        return None
    natural = job.pipe.states.natural
    with Checkpoints(Path(directory) / "checkpoints", keep=None) as checkpoints:
        step = checkpoints.latest()
        if step is None:
            raise CheckpointError(
                f"run.start_from={directory} has no checkpoint. Name a run directory, as `ppctl import` writes one."
            )
        unlike = differences(checkpoints.param_types(step), array_types(natural["params"]))
        if unlike:
            raise CheckpointError(
                f"run.start_from={directory} is of another model: {unlike[0]} (the first of {len(unlike)}). Use its "
                "recipe, or the model settings in its config.yaml."
            )
        params = checkpoints.restore_params(step, natural["params"])
    fresh = jax.jit(lambda params: init_state(params, job.pipe.optimizer), out_shardings=shardings_of(natural))
    return fresh(params)
