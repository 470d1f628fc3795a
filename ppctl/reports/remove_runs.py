"""Run directories removed: never while written to, never through a link, whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from ppctl.errors import ConfigError
from ppctl.reports import run_files
from ppctl.reports.run_page.write_report import FILE as REPORT
from ppctl.reports.run_status import HeldError, held_by, kept_still
from ppctl.reports.runs_table import few


def check_run(name: str, path: Path, top: Path) -> None:
    """Raise ConfigError for a directory to keep: no run, out of `top` by a link, or with more runs.

    name: as the user knows it. top: the directory of runs, which may be a link itself.
    """
    if not run_files.is_run(path):
        raise ConfigError(f"{name} is no run, and stays. `ppctl runs` lists those there are.")
    real = Path(os.path.realpath(path))
    below = Path(os.path.relpath(os.path.abspath(path), os.path.abspath(top)))
    if Path(os.path.realpath(top)) / below != real:
        remedy = "Name that path, if it is what you mean."
        raise ConfigError(f"{name} lies behind a link, in {real}. {remedy}")
    if Path(os.path.realpath(os.curdir)).is_relative_to(real):
        remedy = "Go to another directory first."
        raise ConfigError(f"{name} is where this command runs, and stays. {remedy}")
    inner = [each for each, place in run_files.find_runs(path) if place != path]
    if inner:
        what = f"{name} holds {len(inner)} more runs, and stays: {few(inner)}"
        raise ConfigError(f"{what}. Remove these first.")
    if run_files.run_summary(name, path).status == run_files.RUNNING:
        raise _alive(name, held_by(path))


def check_removable(name: str, path: Path, also: Iterable[str]) -> None:
    """Raise ConfigError where not all of a run directory can be removed, or is a run's.

    also: further names that may be in it.
    """
    ours = {*run_files.WRITTEN, *run_files.OF_TRACKERS, REPORT, *also}
    ours |= {f".{own}.part" for own in ours}
    try:
        others = sorted({*os.listdir(path)} - ours)
        if others:
            what = f"{name} holds what no run wrote, and stays: {few(others)}"
            raise ConfigError(f"{what}. Move that away first.")
        for folder, folders, files in os.walk(path, onerror=_raise):
            if (folders or files) and not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
    except OSError as error:
        what = f"{name} cannot be removed: {error.filename}: {error.strerror}"
        raise ConfigError(f"{what}. Make it writable, or leave it.") from error


def _raise(error: OSError) -> None:
    raise error


def remove_run(name: str, path: Path) -> None:
    """Remove a run directory: rename it, by which it is no run any more, then delete it.

    Raises ConfigError where a process writes to it or it cannot be renamed, and then all of it is
    as it was; or where its remains cannot be deleted, which are named.
    """
    remains = path.with_name(f"{run_files.REMOVED}{path.name}-{os.getpid()}")
    try:
        with kept_still(path):
            os.rename(path, remains)
    except HeldError as error:
        raise _alive(name, error.pid) from None
    except OSError as error:
        remedy = "Make its directory writable, or leave it."
        raise ConfigError(f"{name} cannot be removed: {error.strerror}. {remedy}") from error
    try:
        shutil.rmtree(remains)  # follows no link
    except OSError as error:
        what = f"{name} is removed, but {error.filename} cannot be deleted: {error.strerror}"
        raise ConfigError(f"{what}. Delete {remains} yourself.") from error


def _alive(name: str, pid: int | None) -> ConfigError:
    how = "where it was started" if pid is None else f"kill -INT {pid}, which saves"
    who = "a process" if pid is None else f"process {pid}"
    return ConfigError(f"{name} is running, recorded by {who}, and stays. End it first: {how}.")
