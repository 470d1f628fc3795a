"""`ppctl runs mv` and `ppctl runs rm`: names to directories, the question before anything is changed, what was done."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ppctl.cli.choices import nearest
from ppctl.cli.overrides import resumption
from ppctl.errors import ConfigError, DeclinedError
from ppctl.launch.sweep.jobs import LOG, SUBMITTED, SUBMITTED_LOG
from ppctl.reports.change_runs import check_removable, check_run, check_target, move_run, remove_run
from ppctl.reports.foreign import printable
from ppctl.reports.run_files import disk_bytes, find_runs, is_run, run_summary
from ppctl.reports.runs_columns import steps_text
from ppctl.reports.terminal import show_json, size_text

PATH_STARTS = ("/", "./", "../")


class _Run(NamedTuple):
    name: str  # as typed
    path: Path
    top: Path  # the directory of runs that it is in

    @property
    def line(self) -> str:
        """What it is, for who is asked."""
        found = run_summary(self.name, self.path)
        return printable(f"{self.path}: {found.status} at step {steps_text(found)}, {size_text(disk_bytes(self.path))}")


def remove(names: Sequence[str], top: Path, *, is_sure: bool, as_json: bool) -> int:
    """Remove runs, all that can be told beforehand checked for all of them first; return 0."""
    if not names:
        raise ConfigError("`ppctl runs rm` needs the names of runs; `ppctl runs` lists them.")
    found = [_find(name, top) for name in names]
    for run in found:
        check_run(*run)
        check_removable(run.name, run.path, (LOG, SUBMITTED_LOG, SUBMITTED))
    for index, run in enumerate(found):
        twice = next((each.name for each in found[:index] if os.path.samefile(each.path, run.path)), None)
        if twice is not None:
            raise ConfigError(f"{twice} and {run.name} are the same run. Name each once.")
    runs = f"{len(found)} runs" if len(found) > 1 else "this run"
    _ask("rm", [run.line for run in found], f"Remove {runs} for good?", is_sure=is_sure)
    removed = []
    for run in found:
        size = disk_bytes(run.path)
        remove_run(run.name, run.path)
        removed.append({"name": run.name, "run_dir": str(run.path), "disk_bytes": size})
        _say(f"removed {run.path}, {size_text(size)}")
    if as_json:
        show_json({"removed": removed})
    return 0


def move(words: Sequence[str], top: Path, *, is_sure: bool, as_json: bool) -> int:
    """Rename a run, and say what resumes it then; return 0."""
    if len(words) != 2:
        raise ConfigError("`ppctl runs mv` needs a run and its new name: ppctl runs mv NAME NEW.")
    run, new = _find(words[0], top), words[1]
    check_run(*run)
    is_path = new.startswith((*PATH_STARTS, f"{top}/"))
    target = Path(os.path.normpath(new if is_path else run.top / new))
    above = top if _is_below(target, top) else run.top if _is_below(target, run.top) else target.parent
    if not new or target in (run.top, Path(os.curdir)):
        raise ConfigError(f"{new!r} is no name for a run. Name it by letters, digits, - and _.")
    check_target(run.name, run.path, target, above)
    _ask("mv", [run.line], f"Move it to {target}?", is_sure=is_sure)
    move_run(run.name, run.path, target)
    found = resumption(target)
    _say(f"moved {run.path} to {target}")
    if as_json:
        show_json({"moved": {"from": str(run.path), "to": str(target), "resume": found.command or None}})
    else:
        for text in (*(f"note      {note}" for note in found.notes), f"resume    {found.command}"):
            print(printable(text))
    return 0


def _find(name: str, top: Path) -> _Run:
    """Return the run of this path, or of this name in the list; a part of a name is none."""
    for path, place in ((Path(name), None), (top / name, top)):
        if name and is_run(path):
            path = Path(os.path.normpath(path))
            above = top if _is_below(path, top) else place or path.parent
            return _Run(name, path, above)
    for path in (Path(name), top / name):
        below = [each for each, _ in find_runs(path)] if name and os.path.isdir(path) else []
        if below:
            raise ConfigError(f"{name} is no run, but holds {len(below)}, as {below[0]}. Name the runs themselves.")
    known = [each for each, _ in find_runs(top)] if top.is_dir() else []
    near = [each for each in known if name and name in each] or nearest(name, known)
    hint = f" Did you mean {near[0]}? Here a name has to be whole." if near else " `ppctl runs` lists them."
    raise ConfigError(f"{name or repr(name)} is no run in {top}, and no path of one.{hint}")


def _is_below(path: Path, top: Path) -> bool:
    return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(top)) and path != top


def _ask(action: str, lines: Sequence[str], question: str, *, is_sure: bool) -> None:
    """Ask on the terminal, unless that is settled. ConfigError where there is none, DeclinedError after a no."""
    if is_sure:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(f"`ppctl runs {action}` asks first, and there is no terminal to ask on. Add --yes.")
    print("\n".join(lines), f"{question} [y/N] ", sep="\n", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise DeclinedError("Nothing was changed.")


def _say(text: str) -> None:
    print(f"ppctl: {printable(text)}", file=sys.stderr)
