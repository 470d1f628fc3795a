"""The record of a run, for scripts and notebooks: its settings, its numbers, and the parameters of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from ppctl.errors import CheckpointError, ConfigError
from ppctl.reports.foreign import read_settings
from ppctl.reports.run_files import read_lines
from ppctl.training.checkpoint.checkpoint import Checkpoints

Tree = Any


@dataclass(frozen=True)
class SavedRun:
    """A run directory. Made by `load_run`; nothing of it is read before it is asked for."""

    directory: Path

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """All settings of the run, as its last start wrote them: {"model": {...}, "mesh": {...}, ...}."""
        try:
            return read_settings(self.directory / "config.yaml")
        except ValueError as error:
            raise ConfigError(f"{self.directory / 'config.yaml'} cannot be read: {error}.") from error

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One record a step, oldest first: step, loss, grad_norm, lr, step_time_s, ...; units are in the names."""
        return _records(self.directory / "metrics.jsonl")

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """One record an evaluation: step, eval_loss."""
        return _records(self.directory / "eval.jsonl")

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of the finished checkpoints, ascending."""
        return Checkpoints(self.directory / "checkpoints", keep=None).steps()

    def params(self, step: int | None = None) -> Tree:
        """Return the parameters of a checkpoint, whole, on the first device.

        {"ends": embedding and head, "layers": arrays [L, ...] in model order}, whatever the layout of the run.
        step: None for the newest.

        Raises:
            CheckpointError: There is no such checkpoint, or it is damaged.
        """
        steps = self.steps
        if not steps or step not in (None, *steps):
            found = f"of steps {', '.join(map(str, steps))}" if steps else "none"
            raise CheckpointError(f"{self.directory} has no checkpoint of step {step}; there are {found}.")
        with Checkpoints(self.directory / "checkpoints", keep=None) as checkpoints:
            return checkpoints.restore_params(steps[-1] if step is None else step, jax.devices()[0])


def load_run(directory: str | Path) -> SavedRun:
    """Return a run by its directory.

    Raises:
        ConfigError: The directory holds no run.
    """
    path = Path(directory)
    if not (path / "config.yaml").is_file():
        raise ConfigError(f"{path} is no run: it has no config.yaml. `ppctl runs` lists runs.")
    return SavedRun(path)


def _records(path: Path) -> list[dict[str, Any]]:
    """Return the whole records in a file of JSON lines; a kill may leave half of one."""
    return [*read_lines(path, [])]
