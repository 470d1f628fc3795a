"""Checks of a job before compilation, the same for every command."""

import numpy as np

from ppctl import config as settings
from ppctl.data import DataSet
from ppctl.data.token_examples import NO_TOKEN
from ppctl.errors import ConfigError
from ppctl.executors.model_shapes import shard_bytes
from ppctl.reports.terminal_output import size_text
from ppctl.training.pipeline.job import TrainingJob, no_targets, num_eval_batches
from ppctl.training.pipeline.known_hardware import stated_bytes
from ppctl.training.pipeline.mixing import NUM_TRIED
from ppctl.training.pipeline.pipeline import Pipeline


def check_job(job: TrainingJob) -> list[str]:
    """Return notes on a job. ConfigError or DataError if it cannot run on the attached devices."""
    check_room(job.pipe)
    notes = check_evaluations(job.config.run, job.data), check_examples(job)
    return [note for note in notes if note is not None]


def check_room(pipe: Pipeline) -> None:
    """Raise ConfigError if the state, without the rest of a step, exceeds a device's memory.

    The state is parameters and optimizer state. Simulated devices share the machine's memory.
    `ppctl plan` predicts the memory of the whole step.
    """
    held, device = shard_bytes(pipe.states.staged), pipe.meshes.device
    if device.platform == "cpu":
        local = len(pipe.meshes.storage.local_devices)
        held, here = held * local, f"this machine, shared by {local} simulated devices,"
    else:
        here = f"a {device.device_kind}"
    most = stated_bytes(device)
    if most is not None and held > most:
        raise ConfigError(
            f"The state of {pipe.num_parameters:,} parameters takes {size_text(held)}, but {here} "
            f"has {size_text(most)}. Use a smaller model, or more devices (mesh.pp, mesh.fsdp); "
            "`ppctl plan` predicts the memory."
        )


def check_evaluations(run: settings.Run, data: DataSet) -> str | None:
    """Return a note if a run evaluates on fewer batches than the default, else None.

    DataError if too few examples are held out, or no token of their batches has a target.
    """
    if run.eval_every is None:
        return None
    number = num_eval_batches(run, data)
    targets = (batch["targets"] for batch in data.eval_batches(number))
    if data.vocab_size is not None and not any(np.any(each != NO_TOKEN) for each in targets):
        raise no_targets(data, number)
    if run.eval_batches is not None or number == run.EVAL_BATCHES:
        return None
    return (
        f"evaluates on {number} batch{'es' * (number > 1)} of data.batch_size={data.batch_size}, "
        f"not the usual {run.EVAL_BATCHES}: {data.num_eval_examples} of "
        f"{data.num_examples + data.num_eval_examples} examples are held out."
    )


def check_examples(job: TrainingJob) -> str | None:
    """Return a note if a custom model cannot be checked; ConfigError if it mixes examples."""
    model = job.config.model
    if not isinstance(model, settings.CustomModel):
        return None
    examples = job.data.read(np.arange(min(NUM_TRIED, job.data.num_examples)))
    return job.pipe.check_examples(f"model.target={model.target}", examples)
