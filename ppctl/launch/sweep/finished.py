"""A run's end, as its directory tells it. Starts no JAX."""

from __future__ import annotations

from pathlib import Path

from ppctl.config import Config
from ppctl.config.changes import changes
from ppctl.config.sources import changed_modules, recorded_sources, sources_here
from ppctl.launch.local import newest_checkpoint
from ppctl.reports.foreign import from_json, read_file, read_settings


def has_ended(run_dir: Path, config: Config) -> bool:
    """Return whether all run.num_steps are done and saved: what `ppctl train` itself takes for finished.

    Only a finished save has its step for a name. A run that may not go on with anything (run.resume=never) has not.
    """
    return config.run.resume != "never" and newest_checkpoint(run_dir) == config.run.num_steps


def other_settings(run_dir: Path, config: Config) -> str | None:
    """Return how the settings that the run in run_dir was made with differ from these; None: not at all."""
    try:
        before = read_settings(run_dir / "config.yaml")
    except (OSError, ValueError):
        return "its config.yaml cannot be read"
    if not isinstance(before, dict):
        return "its config.yaml is none"
    found = [change.text for change in changes(before, config)] + _code_changes(run_dir)
    if not found:
        return None
    return "; ".join(found[:3]) + (f"; {len(found) - 3} more" if len(found) > 3 else "")


def _code_changes(run_dir: Path) -> list[str]:
    """Return what has changed of the code of one's own that the newest checkpoint of a run was made by."""
    step = newest_checkpoint(run_dir)
    try:
        meta = from_json(read_file(run_dir / "checkpoints" / str(step) / "meta" / "data.json"))["meta"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):  # a damaged one
        return []
    modules = {name: digests for of_part in recorded_sources(meta).values() for name, digests in of_part.items()}
    now = sources_here(modules)
    changed = changed_modules({name: modules[name] for name in now}, now)
    return [f"the code of {name} has changed" for name in changed]
