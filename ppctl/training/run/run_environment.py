"""The environment of a run (packages, devices, disk) and the metadata of its checkpoints."""

import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from ppctl.config import Run
from ppctl.errors import ConfigError
from ppctl.executors.rank_meshes import RankMeshes
from ppctl.reports.run_files import checkpoint_steps
from ppctl.reports.terminal_output import size_text, write_remedy

PACKAGES = ("ppctl", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")


def checkpoint_metadata(
    settings: Mapping[str, Any], step: int, sources: Any, data: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the metadata of a checkpoint after `step` steps as plain JSON."""
    return {"config": dict(settings), "sources": sources, "data": {**data, "next_step": step}}


@contextmanager
def writing(run_dir: Path) -> Iterator[None]:
    """Raise ConfigError if the body cannot write to run_dir, for example on a full disk."""
    try:
        yield
    except OSError as error:
        what, reason = f"run.dir={run_dir} cannot be written", str(error.strerror)
        raise ConfigError(f"{what}: {reason}. {write_remedy(reason)}") from error


def check_disk(run: Run, state_bytes: int) -> None:
    """Raise ConfigError if run.dir has too little free space for the checkpoints of a run."""
    settings, written = run.checkpoint, len(checkpoint_steps(Path(run.dir) / "checkpoints"))
    if not settings.enabled:
        return
    num_saves = 1 if settings.every is None else -(-run.num_steps // settings.every)
    permanent = 0 if settings.keep_every is None else run.num_steps // settings.keep_every
    # keep + 1: the oldest is removed only after a save has finished
    number = min(settings.keep + 1 + permanent, num_saves)
    more, free = max(1, number - written), shutil.disk_usage(run.dir).free
    if free < more * state_bytes:
        raise ConfigError(
            f"run.dir={run.dir} has {size_text(free)} free, but {more} x {size_text(state_bytes)} "
            f"= {size_text(more * state_bytes)} are needed for checkpoints (run.checkpoint.keep="
            f"{settings.keep} and the next one; {written} are written). Free the disk, use another "
            "run.dir, or keep fewer."
        )


def environment(meshes: RankMeshes) -> dict[str, Any]:
    """Return versions, system and devices, for the record of a start."""
    device = meshes.device
    versions = {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    return {
        "versions": versions,
        "system": platform.platform(),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "num_devices": meshes.num_devices,
        "num_processes": jax.process_count(),
        "num_cores": num_cores(meshes),
    }


def num_cores(meshes: RankMeshes) -> int | None:
    """Return the number of cores that simulated devices share; None for other devices."""
    return os.cpu_count() if meshes.device.platform == "cpu" else None
