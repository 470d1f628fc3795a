"""Whether the devices that are here have room for a state, before it is made."""

from __future__ import annotations

import os

import jax

from ppctl.errors import ConfigError
from ppctl.executors.spmd.memory import shard_bytes
from ppctl.reports.terminal import size_text
from ppctl.training.pipeline import Pipeline


def check_room(pipe: Pipeline) -> None:
    """Raise ConfigError where parameters and their moments alone are more than the devices here have.

    Simulated devices share the machine's memory. What else a step takes is not counted: `ppctl plan` predicts it.
    """
    held, device = shard_bytes(pipe.states.staged), pipe.mesh.devices.flat[0]
    if device.platform == "cpu":
        local = sum(each.process_index == jax.process_index() for each in pipe.mesh.devices.flat)
        held, here = held * local, f"this machine, whose {local} simulated devices share it,"
        most: int | None = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        stats, here = device.memory_stats(), f"a {device.device_kind}"
        most = None if stats is None else stats.get("bytes_limit")
    if most is not None and held > most:
        raise ConfigError(
            f"Parameters and moments of {pipe.num_parameters:,} parameters take {size_text(held)}, and {here} has "
            f"{size_text(most)}. Use a smaller model, or more devices (mesh.pp, mesh.fsdp); `ppctl plan` runs nothing."
        )
