"""Bounds on sizes that no machine can lay out or hold, refused before any work begins."""

from __future__ import annotations

from typing import Any

from ppctl.config.groups.mesh_settings import Mesh
from ppctl.config.groups.model_settings import AnyModel, CustomModel, Transformer
from ppctl.config.groups.schedule_settings import Schedule
from ppctl.errors import ConfigError
from ppctl.schedule.mesh_axes import AXES

MOST_TASKS = 500_000  # of a step: each takes 10 to 100 microseconds to lay out and simulate
MOST_PARAMETERS = 10**15  # with their moments 12 petabytes: more than the largest machines hold
DEVICES = (2**17, "the largest machines have about 100,000 accelerators")
LOGITS = (2**24, "a head of that many logits fits no device")
EXAMPLE = (2**20, "an example is read whole")
CHUNKS = (64, "each number of chunks is searched")
BOUNDS = {  # (maximum, reason) of each setting by itself
    "model.num_layers": (4096, "each is given to a stage by itself"),
    "model.head_dim": (2**16, "each head is on one device"),
    "model.mlp_width": (2**30, "no device holds a column of it"),
    "model.seq_len": (2**20, "a sequence is read whole"),
    "model.vocab_size": LOGITS,
    "data.vocab_size": LOGITS,
    "data.num_features": EXAMPLE,
    "data.num_targets": EXAMPLE,
    "data.batch_size": (2**24, "a batch is put together on a host"),
    **{f"mesh.{axis}": DEVICES for axis in AXES},
    "mesh.tp": (2**10, "each head is on one device"),
    "tune.devices": DEVICES,
    "tune.best": (1000, "each is built to be predicted"),
    "schedule.num_chunks": (1024, "each is a stage of a rank, with a layer at least"),
    "schedule.num_waves": (512, "each is two stages of a rank, with a layer at least"),
    "schedule.max_chunks": CHUNKS,
    "tune.max_chunks": CHUNKS,
}


def check_bounds(parts: Any) -> None:
    """Raise ConfigError for the first setting of a request that is above its bound."""
    for key, (most, why) in BOUNDS.items():
        part, _, name = key.partition(".")
        value = getattr(getattr(parts, part, None), name, None)
        if value is not None and value > most:
            raise ConfigError(f"{key}={value} is out of reach: {most} at most, because {why}.")


def check_tasks(schedule: Schedule, mesh: Mesh) -> None:
    """Raise ConfigError for too many tasks of a step: a forward and a backward of each stage."""
    knobs = schedule.knobs()
    chunks = knobs.get("num_chunks", 2 * knobs.get("num_waves", 0) or 1)
    number = 2 * mesh.pp * chunks * schedule.num_microbatches
    if number > MOST_TASKS:
        raise ConfigError(
            f"2*mesh.pp*stages of a rank*schedule.num_microbatches = 2*{mesh.pp}*{chunks}*"
            f"{schedule.num_microbatches} = {number} tasks of a step, more than the {MOST_TASKS} "
            "that are laid out. Use fewer and larger microbatches."
        )


def check_parameters(model: AnyModel) -> None:
    """Raise ConfigError for a built-in model of more parameters than any machine holds."""
    if isinstance(model, CustomModel):
        return
    of_layer = model.d_model**2
    if isinstance(model, Transformer):
        heads = 2 * (model.num_heads + model.kv_heads) * model.head_width
        matrices = 3 if model.activation in model.GATED else 2
        of_layer = model.d_model * (heads + matrices * model.hidden_width)
    number = model.num_layers * of_layer
    if number > MOST_PARAMETERS:
        raise ConfigError(
            f"model.num_layers={model.num_layers} of model.d_model={model.d_model} have "
            f"{number:.3g} parameters, more than the {MOST_PARAMETERS:.0e} that any machine holds. "
            "Use fewer or narrower layers."
        )
