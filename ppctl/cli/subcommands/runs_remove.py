"""`ppctl runs rm`: find the runs, ask, and remove them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ppctl.cli.choices import nearest
from ppctl.errors import ConfigError, DeclinedError
from ppctl.launch.sweep.sweep_jobs import LOG, SUBMITTED, SUBMITTED_LOG
from ppctl.reports.foreign_files import printable
from ppctl.reports.remove_runs import check_removable, check_run, remove_run
from ppctl.reports.run_files import disk_bytes, find_runs, is_run, run_summary
from ppctl.reports.runs_columns import steps_text
from ppctl.reports.terminal_output import show_json, size_text


class _Run(NamedTuple):
    name: str  # as typed
    path: Path
    top: Path  # its directory of runs

    @property
    def line(self) -> str:
        """The run's description in the question."""
        found, size = run_summary(self.name, self.path), size_text(disk_bytes(self.path))
        return printable(f"{self.path}: {found.status} at step {steps_text(found)}, {size}")


def remove(names: Sequence[str], top: Path, *, is_sure: bool, as_json: bool) -> int:
    """Remove runs after all of them are checked; return 0."""
    if not names:
        raise ConfigError("`ppctl runs rm` needs the names of runs; `ppctl runs` lists them.")
    found = [_find(name, top) for name in names]
    for run in found:
        check_run(*run)
        check_removable(run.name, run.path, (LOG, SUBMITTED_LOG, SUBMITTED))
    for index, run in enumerate(found):
        for other in found[:index]:
            if os.path.samefile(other.path, run.path):
                raise ConfigError(f"{other.name} and {run.name} are the same run. Name each once.")
    runs = f"{len(found)} runs" if len(found) > 1 else "this run"
    _ask([run.line for run in found], f"Remove {runs} for good?", is_sure=is_sure)
    removed = []
    for run in found:
        size = disk_bytes(run.path)
        remove_run(run.name, run.path)
        removed.append({"name": run.name, "run_dir": str(run.path), "disk_bytes": size})
        print(f"ppctl: removed {printable(str(run.path))}, {size_text(size)}", file=sys.stderr)
    if as_json:
        show_json({"removed": removed})
    return 0


def _find(name: str, top: Path) -> _Run:
    """Return the run of this path, or of this whole name in the list."""
    for path, place in ((Path(name), None), (top / name, top)):
        if name and is_run(path):
            path = Path(os.path.normpath(path))
            above = top if _is_below(path, top) else place or path.parent
            return _Run(name, path, above)
    for path in (Path(name), top / name):
        below = [each for each, _ in find_runs(path)] if name and os.path.isdir(path) else []
        if below:
            fault = f"{name} is no run, but holds {len(below)}, as {below[0]}."
            raise ConfigError(f"{fault} Name the runs themselves.")
    known = [each for each, _ in find_runs(top)] if top.is_dir() else []
    near = [each for each in known if name and name in each] or nearest(name, known)
    hint = " `ppctl runs` lists them."
    if near:
        hint = f" Did you mean {near[0]}? Here a name has to be whole."
    raise ConfigError(f"{name or repr(name)} is no run in {top}, and no path of one.{hint}")


def _is_below(path: Path, top: Path) -> bool:
    return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(top)) and path != top


def _ask(lines: Sequence[str], question: str, *, is_sure: bool) -> None:
    """Ask on the terminal unless `is_sure`. ConfigError without one, DeclinedError after a no."""
    if is_sure:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        reason = "`ppctl runs rm` asks first, and there is no terminal to ask on."
        raise ConfigError(f"{reason} Add --yes.")
    print("\n".join(lines), f"{question} [y/N] ", sep="\n", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise DeclinedError("Nothing was changed.")
