"""The command that resumes a run, from the words in its `status.jsonl`. Loads no Hydra."""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ppctl.config.changed_settings import value_text
from ppctl.launch.local_processes import HOST, STARTED_WITH
from ppctl.reports import run_status
from ppctl.reports.recorded_settings import recorded_paths
from ppctl.reports.run_files import read_config, read_lines


class Resumption(NamedTuple):
    """The words that resume a run."""

    config: Mapping[str, Any]  # settings of the newest start; empty if unreadable
    words: Sequence[str]  # --config-dir=DIR, GROUP=OPTION and SETTING=VALUE, as Hydra reads them
    command: str  # command line that resumes the run; empty if no start is recorded
    notes: Sequence[str]  # remarks on the config and the words, for the user


def started_with(config_dir: str | None, overrides: Sequence[str]) -> list[str]:
    """Return the words of the command line to record for a start of `ppctl train`.

    If `launch.processes` started this process, they are the words of the launching command.
    """
    if STARTED_WITH in os.environ:
        return json.loads(os.environ.pop(STARTED_WITH))
    first = [] if config_dir is None else [f"--config-dir={config_dir}"]
    return [*first, *overrides]


def resumption(path: Path) -> Resumption:
    """Return the words that resume the run in `path`, which may have been moved."""
    # 1. the words of its newest start
    config, problems = read_config(path), list[str]()
    if isinstance(config, str):
        config, problems = {}, [config]
    lines = read_lines(path / run_status.FILE, [])
    start = [{}, *(line for line in lines if line.get("status") == run_status.STARTED)][-1]
    stored, started_in = start.get(run_status.OVERRIDES), start.get(run_status.DIRECTORY)
    if not isinstance(stored, list) or not all(isinstance(word, str) for word in stored):
        return Resumption(config, [], "", problems)
    # 2. the words that resume it from the current directory
    directory = _needed(started_in if isinstance(started_in, str) else None, config, stored)
    words, notes = _here(stored, config.get("run"), os.path.normpath(path), directory)
    first = "" if directory is None else f"cd {shlex.quote(directory)} && "
    command = first + shlex.join(["ppctl", "train", *words]) if config or words else ""
    return Resumption(config, words, command, [*problems, *notes])


def _needed(directory: str | None, recorded: Mapping[str, Any], words: Sequence[str]) -> str | None:
    """Return the run's start `directory` if code, a command or a relative path needs it."""
    if directory is None or os.path.realpath(directory) == os.path.realpath(os.curdir):
        return None
    run = recorded.get("run")
    has_code = any(isinstance(part, Mapping) and "target" in part for part in recorded.values())
    has_code = has_code or (isinstance(run, Mapping) and run.get("on_event") is not None)
    paths = [word[13:] for word in words if word.startswith("--config-dir=")]
    paths += recorded_paths(recorded)
    is_relative = not all(os.path.isabs(os.path.expanduser(path)) for path in paths)
    return directory if has_code or is_relative else None


def _here(
    words: Sequence[str], run: object, run_dir: str, directory: str | None
) -> tuple[list[str], list[str]]:
    """Return (words that resume the run in `run_dir`, notes).

    run: the recorded part `run`. directory: base of relative paths; None: the current directory.
    """
    # 1. drop words that belong to one start or process; set run.dir if the run was moved
    settings = run if isinstance(run, Mapping) else {}
    dropped = {"run.resume", "run.process_id"}
    own = []
    if directory is not None:
        run_dir = os.path.abspath(run_dir)
    if os.path.normpath(os.path.join(directory or "", str(settings.get("dir", "")))) != run_dir:
        dropped.add("run.dir")
        own.append(f"run.dir={value_text(run_dir)}")
    if settings.get("resume", "auto") != "auto":  # a recipe may set run.resume
        own.append("run.resume=auto")
    kept = [word for word in words if word.lstrip("+").partition("=")[0] not in dropped]
    # 2. note the words to add in each process, unless `launch.processes` started the processes
    notes = []
    distributed, coordinator = settings.get("distributed"), str(settings.get("coordinator"))
    if distributed == "explicit" and not coordinator.startswith(f"{HOST}:"):
        number = settings.get("num_processes")
        notes.append(f"{number} processes: each with a different run.process_id=0, 1, ...")
    elif distributed not in (None, "off", "explicit"):
        notes.append("several processes: start it in each of them")
    return [*kept, *own], notes
