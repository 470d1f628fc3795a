"""`ppctl runs rm` and `prune`: find runs, ask the user, remove their directories or checkpoints.

A run that a process writes to, or that is reached through a symlink, is never changed. Checkpoints
that a run set aside (renamed to STEP.damaged or STEP.after-N) are pruned too.
"""

import errno
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ppctl.errors import ConfigError, DeclinedError, suggested
from ppctl.launch.sweep.sweep_jobs import LOG, SUBMITTED, SUBMITTED_LOG
from ppctl.reports import run_files
from ppctl.reports.foreign_files import printable
from ppctl.reports.recorded_settings import setting_value
from ppctl.reports.run_files import disk_bytes, is_run, run_summary
from ppctl.reports.run_status import HeldError, held_by, kept_still
from ppctl.reports.runs_table import few, find_run
from ppctl.reports.terminal_output import show_json, size_text
from ppctl.reports.write_report import FILE as REPORT


class _Run(NamedTuple):
    name: str  # name as typed
    path: Path
    top: Path  # directory of runs that contains `path`, else the start of the path

    @property
    def line(self) -> str:
        """The description of the run, printed above the question."""
        found, size = run_summary(self.name, self.path), size_text(disk_bytes(self.path))
        return printable(f"{self.path}: {found.status} at step {found.steps_text}, {size}")


def remove(names: Sequence[str], top: Path, *, is_sure: bool, as_json: bool) -> int:
    """Check all runs, then remove them; return 0.

    names: names or paths of runs. top: directory of runs. is_sure: remove without asking.
    """
    if not names:
        raise ConfigError("`ppctl runs rm` needs the names of runs; `ppctl runs` lists them.")
    found = [checked_run(name, top) for name in names]
    for run in found:
        _check_files(run.name, run.path)
    for index, run in enumerate(found):
        for other in found[:index]:
            if os.path.samefile(other.path, run.path):
                raise ConfigError(f"{other.name} and {run.name} are the same run. Name each once.")
    runs = f"{len(found)} runs" if len(found) > 1 else "this run"
    ask([run.line for run in found], f"Remove {runs} for good?", "rm", is_sure=is_sure)
    removed = []
    for run in found:
        size = disk_bytes(run.path)
        remove_run(run.name, run.path)
        removed.append({"name": run.name, "run_dir": str(run.path), "disk_bytes": size})
        print(f"ppctl: removed {printable(str(run.path))}, {size_text(size)}", file=sys.stderr)
    if as_json:
        show_json({"removed": removed})
    return 0


def checked_run(name: str, top: Path) -> _Run:
    """Return the run with this path or full name. ConfigError if `_check_place` refuses it."""
    found = next((path for path in (Path(name), top / name) if name and is_run(path)), None)
    if found is None:
        near, _ = find_run(name, [top])
        raise ConfigError(f"{name} is no run.{suggested([near])} Use a full name or a path.")
    path = Path(os.path.normpath(found))
    is_below = Path(os.path.abspath(path)).is_relative_to(os.path.abspath(top)) and path != top
    run = _Run(name, path, top if is_below else Path(path.anchor or os.curdir))
    _check_place(*run)
    return run


def ask(lines: Sequence[str], question: str, action: str, *, is_sure: bool) -> None:
    """Ask on the terminal unless `is_sure`. ConfigError without a terminal, DeclinedError on no."""
    if is_sure:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        reason = f"`ppctl runs {action}` asks first, but it has no terminal."
        raise ConfigError(f"{reason} Add --yes.")
    print("\n".join(lines), f"{question} [y/N] ", sep="\n", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise DeclinedError("Nothing was changed.")


def _check_place(name: str, path: Path, top: Path) -> None:
    """Raise ConfigError for a directory that is not safe to change; `top` may be a symlink."""
    real = Path(os.path.realpath(path))
    below = Path(os.path.relpath(os.path.abspath(path), os.path.abspath(top)))
    if os.path.normpath(os.path.realpath(top) / below) != str(real):
        remedy = "Name that path instead."
        raise ConfigError(f"{name} is a symlink or below one; the run is in {real}. {remedy}")
    if Path(os.path.realpath(os.curdir)).is_relative_to(real):
        remedy = "Go to another directory first."
        raise ConfigError(f"{name} contains the current directory. {remedy}")
    inner = [each for each, place in run_files.find_runs(path) if place != path]
    if inner:
        what = f"{name} contains {len(inner)} more runs: {few(inner)}"
        raise ConfigError(f"{what}. Remove these first.")
    if run_summary(name, path).status == run_files.RUNNING:
        raise alive(name, held_by(path))


def _check_files(name: str, path: Path) -> None:
    """Raise ConfigError if a run directory holds foreign files or cannot be removed whole."""
    ours = {*run_files.WRITTEN, *run_files.OF_TRACKERS, REPORT, LOG, SUBMITTED_LOG, SUBMITTED}
    ours |= {f".{own}.part" for own in ours}
    try:
        others = sorted({*os.listdir(path)} - ours)
        if others:
            what = f"{name} holds files that no run wrote: {few(others)}"
            raise ConfigError(f"{what}. Move them away first.")
        for folder, folders, files in os.walk(path, onerror=_raise):
            if (folders or files) and not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
    except OSError as error:
        what = f"{name} cannot be removed: {error.filename}: {error.strerror}"
        raise ConfigError(f"{what}. Make it writable, or leave it.") from error


def _raise(error: OSError) -> None:
    raise error


def remove_run(name: str, path: Path) -> None:
    """Remove a run directory: rename it, so that it is no longer a run, then delete it.

    ConfigError if a process writes to it or it cannot be renamed; the run is then unchanged. If the
    renamed directory cannot be deleted, the ConfigError names it.
    """
    remains = _remains(path)
    try:
        with kept_still(path):
            os.rename(path, remains)
    except HeldError as error:
        raise alive(name, error.pid) from None
    except OSError as error:
        remedy = "Make its directory writable, or leave it."
        raise ConfigError(f"{name} cannot be removed: {error.strerror}. {remedy}") from error
    try:
        shutil.rmtree(remains)  # follows no symlink
    except OSError as error:
        what = f"{name} is removed, but {error.filename} cannot be deleted: {error.strerror}"
        raise ConfigError(f"{what}. Delete {remains} yourself.") from error


def _remains(path: Path) -> Path:
    """Return the name of a file or directory while it is removed."""
    return path.with_name(f"{run_files.REMOVED}{path.name}-{os.getpid()}")


def alive(name: str, pid: int | None) -> ConfigError:
    """Return the error for a run that a process is recording."""
    how = "where it was started" if pid is None else f"kill -INT {pid}, which saves"
    who = "a process" if pid is None else f"process {pid}"
    return ConfigError(f"{name} is running, recorded by {who}. End it first: {how}.")


# --- prune ----------------------------------------------------------------------------------------


def prune(
    names: Sequence[str], top: Path, keep: int | None, *, is_sure: bool, as_json: bool
) -> int:
    """Remove a run's checkpoints except the newest `keep` and the permanent ones; return 0.

    names: a list with only the run's name or path. top: directory of runs. is_sure: remove without
    asking. ConfigError for other numbers of names, or if `keep` is None.
    """
    if len(names) != 1 or keep is None:
        raise ConfigError(
            "`ppctl runs prune` needs one run and the number of checkpoints to keep: "
            "ppctl runs prune NAME --keep 1."
        )
    if keep < 1:
        raise ConfigError(f"--keep {keep} leaves no checkpoint. Use 1 or more, or `ppctl runs rm`.")
    # 1. the checkpoints to remove
    run = checked_run(names[0], top)
    folder = run.path / "checkpoints"
    steps = run_files.checkpoint_steps(folder)
    often = setting_value(run_summary(run.name, run.path).config, "run.checkpoint.keep_every")
    permanent = {step for step in steps if isinstance(often, int) and step % often == 0}
    kept = {*steps[-keep:], *permanent}
    gone = [str(step) for step in steps if step not in kept]
    listed = os.listdir(folder) if folder.is_dir() else []
    gone += sorted(filter(run_files.ASIDE.fullmatch, listed))
    stays = ", ".join(map(str, sorted(kept))) or "none"
    if not gone:
        line = f"{printable(str(run.path))} has nothing to prune: checkpoints of step {stays}."
        print(line, file=sys.stderr if as_json else sys.stdout)
        if as_json:
            show_json({"removed": [], "kept": sorted(kept), "disk_bytes": 0})
        return 0
    # 2. the confirmation, and the removal
    size = sum(disk_bytes(folder / name) or (folder / name).lstat().st_size for name in gone)
    line = f"{folder}: {few(gone)}, {size_text(size)}; kept: {stays}"
    count = f"{len(gone)} checkpoint{'s' * (len(gone) > 1)}"
    ask([printable(line)], f"Remove {count} for good?", "prune", is_sure=is_sure)
    try:
        with kept_still(run.path):
            for name in gone:
                _remove(folder / name)
    except HeldError as error:
        raise alive(run.name, error.pid) from None
    except OSError as error:
        what = f"{error.filename} cannot be removed: {error.strerror}"
        raise ConfigError(f"{what}. Make it writable, or leave it.") from error
    print(f"ppctl: removed {count} in {printable(line)}", file=sys.stderr)
    if as_json:
        show_json({"removed": gone, "kept": sorted(kept), "disk_bytes": size})
    return 0


def _remove(path: Path) -> None:
    """Remove a file or directory. Renaming a directory first hides a half-removed checkpoint."""
    if not path.is_dir() or path.is_symlink():
        path.unlink()
        return
    remains = _remains(path)
    path.rename(remains)
    shutil.rmtree(remains)
