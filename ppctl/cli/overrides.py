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
    directory: str | None = None  # to go to first, where the run's own code or its relative --config-dir is

    @property
    def command(self) -> str:
        """The command line that goes on with the run; empty where nobody knows."""
        if not self.config and not self.words:
            return ""
        first = "" if self.directory is None else f"cd {shlex.quote(self.directory)} && "
        return first + shlex.join(["ppctl", "train", *self.words])


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
    stored, started_in = _newest_start(path)
    directory, words, notes = None, list[str](), list[str]()
    if stored is not None:
        directory = _needed(started_in, config, stored)
        words, notes = _here(stored, config.get("run"), os.path.normpath(path), directory)
    elif config:
        words, notes = reconstructed(config, str(path))
    return Resumption(config, words, [*problems, *notes], directory)


def _newest_start(path: Path) -> tuple[list[str] | None, str | None]:
    """Return (the words of the run's newest start, the directory it began in), None for what was not recorded."""
    starts = [line for line in read_lines(path / run_status.FILE, []) if line.get("status") == run_status.STARTED]
    words, directory = (starts[-1].get(key) if starts else None for key in (run_status.OVERRIDES, run_status.DIRECTORY))
    is_known = isinstance(words, list) and all(isinstance(word, str) for word in words)
    return words if is_known else None, directory if isinstance(directory, str) else None


def _needed(directory: str | None, config: Mapping[str, Any], words: Sequence[str]) -> str | None:
    """Return the directory that a run began in, if it is not this one and something that it needs is found from there.

    Code of one's own is looked for in the current directory, and a --config-dir may be relative to it.
    """
    if directory is None or os.path.realpath(directory) == os.path.realpath(os.curdir):
        return None
    has_code = any(isinstance(part := config.get(name), Mapping) and "target" in part for name in ("model", "data"))
    is_relative = any(word.startswith("--config-dir=") and not os.path.isabs(word[13:]) for word in words)
    return directory if has_code or is_relative else None


def _here(words: Sequence[str], run: object, run_dir: str, directory: str | None) -> tuple[list[str], list[str]]:
    """Return (the words by which the run goes on in `run_dir`, notes); `run`: its settings of this name.

    directory: that the words are for, None for the current one.
    A run that was not to go on with another's checkpoints is to go on with its own; and a number is one process's.
    """
    settings = run if isinstance(run, Mapping) else {}
    dropped = {"run.resume", "run.process_id"}
    own = []
    if directory is not None:
        run_dir = os.path.abspath(run_dir)
    if os.path.normpath(os.path.join(directory or "", str(settings.get("dir", "")))) != run_dir:
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
