"""Runs of versions that stored no overrides: from config.yaml back to words for what differs from the defaults.

Loads no Hydra. To be deleted when no such run is worth resuming.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from ppctl.cli.choices import value_text
from ppctl.cli.request_words import request_words
from ppctl.launch.local import HOST

# of run: what the launcher sets for its processes
JOINED = ("distributed", "coordinator", "num_processes", "process_id")


def reconstructed(config: Mapping[str, Any], run_dir: str) -> tuple[list[str], list[str]]:
    """Return (overrides by which a composed config differs from the defaults and goes on in `run_dir`, notes).

    The notes are on what the overrides cannot say.

    run.resume is left out: a run that was not to go on with another's checkpoints is to go on with its own.
    """
    words: list[str] = []
    notes: list[str] = []
    config = {part: dict(values) for part, values in config.items() if isinstance(values, Mapping)}
    if "run" in config:
        config["run"].pop("resume", None)
        config["run"]["dir"] = os.path.normpath(run_dir)
        words += _joined(config["run"], notes)
    found, more = request_words(config)
    return [*words, *found], [*notes, *more]


def _joined(run: dict[str, Any], notes: list[str]) -> Iterator[str]:
    """Yield what replaces the place that a process had among those of the run, which `run` loses."""
    joined = {key: run.pop(key, None) for key in JOINED}
    if joined["distributed"] == "explicit" and str(joined["coordinator"]).startswith(f"{HOST}:"):
        yield f"launch.processes={joined['num_processes']}"  # `launch.processes` chose the rest
    elif joined["distributed"] == "explicit":
        yield from (f"run.{key}={value_text(joined[key])}" for key in JOINED[:3])
        notes.append(f"{joined['num_processes']} processes: each with its own run.process_id=0, 1, ...")
    elif joined["distributed"] not in (None, "off"):
        yield f"run.distributed={joined['distributed']}"
        notes.append("several processes: start it in each of them")
