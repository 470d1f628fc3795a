"""The end of a run, read from its directory. Starts no JAX."""

from __future__ import annotations

from pathlib import Path

from ppctl.config import Config
from ppctl.config.changed_settings import changes
from ppctl.config.code_digests import changed_modules, sources_here
from ppctl.launch.local_processes import newest_checkpoint
from ppctl.reports.foreign_files import from_json, read_file, read_settings


def has_ended(run_dir: Path, config: Config) -> bool:
    """Return whether all run.num_steps are done and saved, and run.resume lets them count."""
    return config.run.resume != "never" and newest_checkpoint(run_dir) == config.run.num_steps


def other_settings(run_dir: Path, config: Config) -> str | None:
    """Return the differences between the settings of the run in run_dir and these, or None."""
    try:
        before = read_settings(run_dir / "config.yaml")
    except (OSError, ValueError):
        return "its config.yaml cannot be read"
    if not isinstance(before, dict):
        return "its config.yaml is none"
    texts = [change.text for change in changes(before, config)] + _code_changes(run_dir)
    more = [f"{len(texts) - 3} more"] if len(texts) > 3 else []
    return "; ".join(texts[:3] + more) or None


def _code_changes(run_dir: Path) -> list[str]:
    """Return the changes of the user's code since the newest checkpoint of a run."""
    file = run_dir / "checkpoints" / str(newest_checkpoint(run_dir)) / "meta" / "data.json"
    try:
        parts = from_json(read_file(file))["meta"]["sources"].values()
    except (OSError, ValueError, RecursionError, KeyError, TypeError):  # a damaged one
        return []
    modules = {name: digests for part in parts for name, digests in part.items()}
    now = sources_here(modules)
    changed = changed_modules({name: modules[name] for name in now}, now)
    return [f"the code of {name} has changed" for name in changed]
