"""The checks of a job before anything of it is compiled or made, the same for every command that runs it."""

from __future__ import annotations

import jax
import numpy as np

from ppctl import config as settings
from ppctl.data import DataSet
from ppctl.errors import ConfigError
from ppctl.executors.spmd.memory import shard_bytes
from ppctl.reports.terminal import size_text
from ppctl.training.job import TrainingJob, num_eval_batches
from ppctl.training.known_hardware import stated_bytes
from ppctl.training.mixing import NUM_TRIED
from ppctl.training.pipeline import Pipeline


def check_job(job: TrainingJob) -> list[str]:
    """Return notes, each a line: on how it evaluates, and why a model was not tried for mixing the examples of a batch.

    Raises:
        ConfigError, DataError: The job cannot run here, or not as it was meant.
    """
    check_room(job.pipe)
    return [note for note in (check_evaluations(job.config.run, job.data), check_examples(job)) if note is not None]


def check_room(pipe: Pipeline) -> None:
    """Raise ConfigError where parameters and their moments alone are more than the devices here have.

    Simulated devices share the machine's memory. What else a step takes is not counted: `ppctl plan` predicts it.
    """
    held, device = shard_bytes(pipe.states.staged), pipe.mesh.devices.flat[0]
    if device.platform == "cpu":
        local = sum(each.process_index == jax.process_index() for each in pipe.mesh.devices.flat)
        held, here = held * local, f"this machine, whose {local} simulated devices share it,"
    else:
        here = f"a {device.device_kind}"
    most = stated_bytes(device)
    if most is not None and held > most:
        raise ConfigError(
            f"Parameters and moments of {pipe.num_parameters:,} parameters take {size_text(held)}, and {here} has "
            f"{size_text(most)}. Use a smaller model, or more devices (mesh.pp, mesh.fsdp); `ppctl plan` runs nothing."
        )


def check_evaluations(run: settings.Run, data: DataSet) -> str | None:
    """Return that a run evaluates on fewer batches than is usual, or None.

    Raises:
        DataError: It would evaluate on more examples than are held out.
    """
    if run.eval_every is None:
        return None
    number = num_eval_batches(run, data)
    data.eval_batches(number)  # refuses at the call, and reads nothing
    if run.eval_batches is not None or number == run.EVAL_BATCHES:
        return None
    return (
        f"evaluates on {number} batch{'es' * (number > 1)} of data.batch_size={data.batch_size}, not the usual "
        f"{run.EVAL_BATCHES}: {data.num_eval_examples} examples are held out."
    )


def check_examples(job: TrainingJob) -> str | None:
    """Return why a model of the user's was not tried for mixing the examples of a batch, or None; refuse one that does.

    Before anything is compiled but the trial itself. ConfigError for a model that mixes them.
    """
    model = job.config.model
    if not isinstance(model, settings.CustomModel):
        return None
    examples = job.data.read(np.arange(min(NUM_TRIED, job.data.num_examples)))
    return job.pipe.check_examples(f"model.target={model.target}", examples)
