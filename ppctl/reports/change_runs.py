"""Run directories renamed and removed: never one that is written to, never through a link, whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from ppctl.errors import ConfigError
from ppctl.reports.run_files import INSIDE, OF_TRACKERS, REMOVED, RUNNING, WRITTEN, find_runs, is_run, run_summary
from ppctl.reports.run_page.write_report import FILE as REPORT
from ppctl.reports.run_status import HeldError, held_by, kept_still
from ppctl.reports.runs_table import few


def check_run(name: str, path: Path, top: Path) -> None:
    """Raise ConfigError for what may neither be moved nor removed: no run, out of `top` by a link, or with more in it.

    name: as the user knows it. top: the directory of runs, which may be a link itself.
    """
    if not is_run(path):
        raise ConfigError(f"{name} is no run, and stays. `ppctl runs` lists those there are.")
    _check_inside(name, path, top)
    if Path(os.path.realpath(os.curdir)).is_relative_to(os.path.realpath(path)):
        raise ConfigError(f"{name} is where this command runs, and stays. Go to another directory first.")
    below = [each for each, place in find_runs(path) if place != path]
    if below:
        raise ConfigError(f"{name} holds {len(below)} more runs, and stays: {few(below)}. Move or remove these first.")
    if run_summary(name, path).status == RUNNING:
        raise _alive(name, held_by(path))


def check_removable(name: str, path: Path, also: Iterable[str]) -> None:
    """Raise ConfigError where not all of a run directory can be removed, or is a run's.

    also: what else than a run's own files may be in it.
    """
    ours = {*WRITTEN, *OF_TRACKERS, REPORT, *also}
    try:
        others = sorted(each for each in os.listdir(path) if each not in ours | {f".{own}.part" for own in ours})
        if others:
            raise ConfigError(f"{name} holds what no run wrote, and stays: {few(others)}. Move that away first.")
        for folder, folders, files in os.walk(path, onerror=_raise):
            if (folders or files) and not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
    except OSError as error:
        raise ConfigError(
            f"{name} cannot be removed: {error.filename}: {error.strerror}. Make it writable, or leave it."
        ) from error


def check_target(name: str, path: Path, target: Path, top: Path) -> None:
    """Raise ConfigError where a run may not be moved to: what is there, in the run, behind a link, or never looked at.

    top: the directory of runs that the target is in.
    """
    if os.path.lexists(target):
        raise ConfigError(f"{target} is there already, and {name} stays. Use another name.")
    _check_inside(str(target), target, top)
    if Path(os.path.realpath(target)).is_relative_to(os.path.realpath(path)):
        raise ConfigError(f"{target} lies in {name} itself. Use another name.")
    hidden = [part for part in _below(target, top).parts if part in (*INSIDE, *OF_TRACKERS) or part.startswith(REMOVED)]
    if hidden:
        raise ConfigError(f"{target}: in a directory named {hidden[0]} no run is looked for. Use another name.")


def _check_inside(name: str, path: Path, top: Path) -> None:
    real = Path(os.path.realpath(path))
    if Path(os.path.realpath(top)) / _below(path, top) != real:
        raise ConfigError(f"{name} lies behind a link, in {real}. Name that path, if it is what you mean.")


def _below(path: Path, top: Path) -> Path:
    return Path(os.path.relpath(os.path.abspath(path), os.path.abspath(top)))


def _raise(error: OSError) -> None:
    raise error


def remove_run(name: str, path: Path) -> None:
    """Remove a run directory: rename it, by which it is no run any more, then delete it.

    Raises ConfigError where a process writes to it or it cannot be renamed, and then all of it is as it was; or where
    its remains cannot be deleted, which are named.
    """
    remains = path.with_name(f"{REMOVED}{path.name}-{os.getpid()}")
    _rename(name, path, remains, "removed")
    try:
        shutil.rmtree(remains)  # follows no link
    except OSError as error:
        raise ConfigError(
            f"{name} is removed, but {error.filename} cannot be deleted: {error.strerror}. Delete {remains} yourself."
        ) from error


def move_run(name: str, path: Path, target: Path) -> None:
    """Rename a run directory. Raises ConfigError, and all is as it was, where that cannot be."""
    made = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _rename(name, path, target, "moved")
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}. Use another name.") from error
    finally:
        for parent in made:
            if parent.is_dir() and not os.listdir(parent):
                parent.rmdir()


def _rename(name: str, path: Path, target: Path, done: str) -> None:
    try:
        with kept_still(path):
            os.rename(path, target)
    except HeldError as error:
        raise _alive(name, error.pid) from None
    except OSError as error:
        why, remedy = error.strerror, "Make its directory writable, or leave it"
        if error.errno == errno.EXDEV:
            why, remedy = f"{target.parent} is on another file system", "Copy it there (cp -a), then remove it here"
        raise ConfigError(f"{name} cannot be {done}: {why}. {remedy}.") from error


def _alive(name: str, pid: int | None) -> ConfigError:
    how = "where it was started" if pid is None else f"kill -INT {pid}, which saves"
    who = "a process" if pid is None else f"process {pid}"
    return ConfigError(f"{name} is running, recorded by {who}, and stays. End it first: {how}.")
