"""Bounds on numbers that can be counted, but neither laid out nor held: refused in a line, before any work begins."""

from __future__ import annotations

from typing import Any

from ppctl.config.mesh import Mesh
from ppctl.config.model import MLP, CustomModel, Transformer
from ppctl.config.schedule import Schedule
from ppctl.errors import ConfigError

MOST_TASKS = 500_000  # of a step: each is laid out and simulated, which takes 10 to 100 microseconds
MOST_PARAMETERS = 10**15  # with their moments 12 petabytes: more than the largest machines hold
BOUNDS = {  # of settings by themselves, and why
    "model.num_layers": (4096, "each is given to a stage by itself"),
    "model.head_dim": (2**16, "each head is on one device"),
    "model.mlp_width": (2**30, "no device holds a column of it"),
    "model.seq_len": (2**20, "a sequence is read whole"),
    "model.vocab_size": (2**24, "a head of that many logits fits no device"),
    "data.vocab_size": (2**24, "a head of that many logits fits no device"),
    "data.num_features": (2**20, "an example is read whole"),
    "data.num_targets": (2**20, "an example is read whole"),
    "data.batch_size": (2**24, "a batch is put together on a host"),
    "mesh.dp": (2**17, "the largest machines have about 100,000 accelerators"),
    "mesh.pp": (2**17, "the largest machines have about 100,000 accelerators"),
    "mesh.fsdp": (2**17, "the largest machines have about 100,000 accelerators"),
    "mesh.tp": (2**10, "each head is on one device"),
    "mesh.cp": (2**17, "the largest machines have about 100,000 accelerators"),
    "tune.devices": (2**17, "the largest machines have about 100,000 accelerators"),
    "tune.best": (1000, "each is built to be predicted"),
    "schedule.num_chunks": (1024, "each is a stage of a rank, with a layer at least"),
    "schedule.num_waves": (512, "each is two stages of a rank, with a layer at least"),
    "schedule.max_chunks": (64, "each number of chunks is searched"),
    "tune.max_chunks": (64, "each number of chunks is searched"),
}


def check_bounds(parts: Any) -> None:
    """Raise ConfigError for the first setting of a request that is above its bound."""
    for key, (most, why) in BOUNDS.items():
        part, _, name = key.partition(".")
        value = getattr(getattr(parts, part, None), name, None)
        if value is not None and value > most:
            raise ConfigError(f"{key}={value} is out of reach: {most} at most, because {why}.")


def check_tasks(schedule: Schedule, mesh: Mesh) -> None:
    """Raise ConfigError for a step of more tasks than can be laid out: a forward and a backward of each stage."""
    knobs = schedule.knobs()
    chunks = knobs.get("num_chunks", 2 * knobs["num_waves"] if "num_waves" in knobs else 1)
    number = 2 * mesh.pp * chunks * schedule.num_microbatches
    if number > MOST_TASKS:
        raise ConfigError(
            f"2*mesh.pp*stages of a rank*schedule.num_microbatches = 2*{mesh.pp}*{chunks}*"
            f"{schedule.num_microbatches} = {number} tasks of a step, more than the {MOST_TASKS} that are laid out. "
            "Use fewer and larger microbatches; `ppctl schedule show` extrapolates larger schedules."
        )


def check_parameters(model: Transformer | MLP | CustomModel) -> None:
    """Raise ConfigError for a built-in model of more parameters than any machine holds."""
    if isinstance(model, CustomModel):
        return
    square, terms = model.d_model**2, f"model.num_layers={model.num_layers} of model.d_model={model.d_model}"
    of_layer: float = square
    if isinstance(model, Transformer):
        matrices = 3 if model.activation in model.GATED else 2
        widths = 2 * (model.num_heads + model.kv_heads) * model.head_width + matrices * model.hidden_width
        of_layer = model.d_model * widths
    number = model.num_layers * of_layer
    if number > MOST_PARAMETERS:
        raise ConfigError(
            f"{terms} have {number:.3g} parameters, more than the {MOST_PARAMETERS:.0e} that any machine holds. Use "
            "fewer or narrower layers."
        )
