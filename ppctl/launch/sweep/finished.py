"""A run's end, as its directory tells it. Starts no JAX."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from ppctl.config import Config
from ppctl.launch.local import newest_checkpoint

# What changes nothing that a run computes or records.
FREE_PARTS = ("launch", "plan", "rehearse", "tune", "inspect")
FREE_OF_RUN = (
    *("name", "dir", "resume", "log_every", "tensorboard", "checkpoint", "join_s", "heartbeat_s", "slow_after_s"),
    *("distributed", "coordinator", "num_processes", "process_id", "show_placement"),
)


def has_ended(run_dir: Path, config: Config) -> bool:
    """Return whether all run.num_steps are done and saved: what `ppctl train` itself takes for finished.

    Only a finished save has its step for a name. A run that may not go on with anything (run.resume=never) has not.
    """
    return config.run.resume != "never" and newest_checkpoint(run_dir) == config.run.num_steps


def other_settings(run_dir: Path, config: Config) -> str | None:
    """Return how the settings that the run in run_dir was made with differ from these; None: not at all.

    A setting that the run did not know is no difference.
    """
    try:
        before = yaml.safe_load((run_dir / "config.yaml").read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return "its config.yaml cannot be read"
    if not isinstance(before, dict):
        return "its config.yaml is none"
    now = yaml.safe_load(yaml.safe_dump(asdict(config)))
    found = [
        text
        for part in now
        if part in before and part not in FREE_PARTS
        for text in _differences(part, before[part], now[part], FREE_OF_RUN if part == "run" else ("cache_dir",))
    ]
    if not found:
        return None
    return "; ".join(found[:3]) + (f"; {len(found) - 3} more" if len(found) > 3 else "")


def _differences(key: str, before: Any, now: Any, free: tuple[str, ...] = ()) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        if before.get("name") != now.get("name") and "name" not in free:
            yield f"{key}={before.get('name')} then, {now.get('name')} now"
            return
        for name in (name for name in now if name in before and name not in free):
            yield from _differences(f"{key}.{name}", before[name], now[name])
    elif before != now:
        yield f"{key}: {before} then, {now} now"
