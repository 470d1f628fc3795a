"""The words that go on with a run: those it was started with, which `status.jsonl` has kept. Loads no Hydra."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ppctl.cli.choices import value_text
from ppctl.cli.older_runs import reconstructed
from ppctl.launch.local import HOST, STARTED_WITH
from ppctl.reports import run_status
from ppctl.reports.run_files import read_config, read_lines


class Resumption(NamedTuple):
    """How a run goes on."""

    config: Mapping[str, Any]  # the settings of its newest start; empty: they cannot be read
    words: Sequence[str]  # --config-dir=DIR, GROUP=OPTION and SETTING=VALUE, as Hydra reads them
    notes: Sequence[str]  # what the words leave out

    @property
    def command(self) -> str:
        """The command line that goes on with the run; empty where nobody knows."""
        return shlex.join(["ppctl", "train", *self.words]) if self.config or self.words else ""


def started_with(config_dir: str | None, overrides: Sequence[str]) -> list[str]:
    """Return what `ppctl train` was started with, to be stored: of a process of the launcher what the launcher was."""
    if STARTED_WITH in os.environ:
        return json.loads(os.environ.pop(STARTED_WITH))
    return [*(() if config_dir is None else (f"--config-dir={config_dir}",)), *overrides]


def resumption(path: Path) -> Resumption:
    """Return how the run in a directory goes on, wherever that stands now."""
    config = read_config(path)
    problems = [config] if isinstance(config, str) else []
    config = {} if isinstance(config, str) else config
    stored = _stored(path)
    if stored is not None:
        words, notes = _here(stored, config.get("run"), os.path.normpath(path))
    elif config:
        words, notes = reconstructed(config, str(path))
    else:
        words, notes = [], []
    return Resumption(config, words, [*problems, *notes])


def _stored(path: Path) -> list[str] | None:
    """Return the words of the run's newest start; None: it was begun by a version that stored none."""
    starts = [line for line in read_lines(path / run_status.FILE, []) if line.get("status") == run_status.STARTED]
    words = starts[-1].get(run_status.OVERRIDES) if starts else None
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else None


def _here(words: Sequence[str], run: object, run_dir: str) -> tuple[list[str], list[str]]:
    """Return (the words by which the run goes on in `run_dir`, notes); `run`: its settings of this name.

    A run that was not to go on with another's checkpoints is to go on with its own; and a number is one process's.
    """
    settings = run if isinstance(run, Mapping) else {}
    dropped = {"run.resume", "run.process_id"}
    own = []
    if os.path.normpath(str(settings.get("dir", ""))) != run_dir:
        dropped.add("run.dir")
        own.append(f"run.dir={value_text(run_dir)}")
    if settings.get("resume", "auto") != "auto":  # a recipe may say so
        own.append("run.resume=auto")
    kept = [word for word in words if word.lstrip("+").partition("=")[0] not in dropped]
    notes = []
    distributed, coordinator = settings.get("distributed"), str(settings.get("coordinator"))
    if distributed == "explicit" and not coordinator.startswith(f"{HOST}:"):  # else `launch.processes` chose it
        notes.append(f"{settings.get('num_processes')} processes: each with its own run.process_id=0, 1, ...")
    elif distributed not in (None, "off", "explicit"):
        notes.append("several processes: start it in each of them")
    return [*kept, *own], notes
