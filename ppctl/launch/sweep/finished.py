"""A run's end, as its directory tells it. Starts no JAX."""

from __future__ import annotations

from pathlib import Path

import yaml

from ppctl.config import Config
from ppctl.config.changes import changes
from ppctl.launch.local import newest_checkpoint


def has_ended(run_dir: Path, config: Config) -> bool:
    """Return whether all run.num_steps are done and saved: what `ppctl train` itself takes for finished.

    Only a finished save has its step for a name. A run that may not go on with anything (run.resume=never) has not.
    """
    return config.run.resume != "never" and newest_checkpoint(run_dir) == config.run.num_steps


def other_settings(run_dir: Path, config: Config) -> str | None:
    """Return how the settings that the run in run_dir was made with differ from these; None: not at all."""
    try:
        before = yaml.safe_load((run_dir / "config.yaml").read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return "its config.yaml cannot be read"
    if not isinstance(before, dict):
        return "its config.yaml is none"
    found = [change.text for change in changes(before, config)]
    if not found:
        return None
    return "; ".join(found[:3]) + (f"; {len(found) - 3} more" if len(found) > 3 else "")
