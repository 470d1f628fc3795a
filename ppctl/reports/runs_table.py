"""`ppctl runs`: past and present runs as a table, and one of them in detail. Loads no JAX."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from ppctl.errors import ConfigError
from ppctl.reports.foreign import printable
from ppctl.reports.run_files import (
    RUNNING,
    RunHistory,
    RunSummary,
    disk_bytes,
    find_runs,
    is_run,
    run_history,
    run_summary,
)
from ppctl.reports.run_status import FINISHED
from ppctl.reports.runs_columns import Column, steps_text
from ppctl.reports.terminal import OutputConsole, age_text, iso_text, show_json, show_table, size_text
from ppctl.reports.tracker_commands import tracker_commands

MOST_NAMED = 10  # runs in an error


def list_runs(runs: Sequence[RunSummary], title: str, columns: Sequence[Column], *, as_json: bool) -> int:
    """List runs, at least one, in this order; return 0."""
    now_s = time.time()
    if as_json:
        show_json({"runs": [_document(run, now_s) for run in runs]})
        return 0
    console = OutputConsole()
    heads = [column.name.replace("eval_loss", "eval loss") for column in columns]
    rows = [[escape(_printable(column.text(run, now_s))) for column in columns] for run in runs]
    show_table(console, title, heads, rows)
    for run in runs:
        for line in (*([run.reason] if run.reason else []), *run.problems):
            _say(console, f"{run.name}: {line}")
    return 0


def names_of(tops: Sequence[Path]) -> list[tuple[str, Path]]:
    """Return (name, directory) of every run: the path below the directory, or of several the whole path."""
    for top in tops:
        if not os.path.exists(top):  # False too where a name is too long
            raise ConfigError(f"{top}: there is no such directory. Name one that holds runs: ppctl runs DIR.")
        if not os.path.isdir(top):
            raise ConfigError(f"{top} is a file. Name a directory that holds runs: ppctl runs DIR.")
        try:
            os.listdir(top)
        except OSError as error:
            raise ConfigError(f"{top} cannot be read: {error.strerror}. Make it readable, or name another.") from error
    found = {path: name if len(tops) == 1 else str(path) for top in tops for name, path in find_runs(top)}
    return [(name, path) for path, name in found.items()]


def find_run(name: str, tops: Sequence[Path]) -> tuple[str, Path]:
    """Return (name, directory) of the run that a path, a name or a part of one means; ConfigError unless it is one."""
    path = Path(name)
    if is_run(path):
        return os.path.normpath(name), path
    if os.path.isdir(path) and not any(os.path.isdir(top / name) for top in tops):
        raise ConfigError(f"{name} is no run: it has no metrics.jsonl. `ppctl runs {name}` lists the runs below it.")
    names = dict(names_of(tops))
    if name in names:
        return name, names[name]
    matches = [each for each in names if name in each]
    if len(matches) == 1:
        return matches[0], names[matches[0]]
    if matches:
        raise ConfigError(f"{name} is a part of {len(matches)} names: {few(matches)}. Use more of one, or a path.")
    if not names:
        raise ConfigError(f"{name}: no run is in {listed(tops)}. Name the directory: ppctl runs show {name} DIR.")
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]}?" if near else f" (runs: {few(list(names))})"
    raise ConfigError(f"{name} is no run in {listed(tops)}.{hint}")


def show_run(name: str, path: Path, words: Sequence[str], command: str, notes: Sequence[str], *, as_json: bool) -> int:
    """Show one run; return 0.

    words: its request, settings other than the defaults. command: resumes it; empty where that is not known.
    notes: what the words and the command leave out.
    """
    found, past, now_s = run_summary(name, path), run_history(path), time.time()
    places = {place: str(path / place) for place in ("tensorboard", "profile", "timeline") if (path / place).is_dir()}
    problems = list(dict.fromkeys((*found.problems, *past.problems, *notes)))
    size = disk_bytes(path)
    if as_json:
        document = _document(found, now_s) | {
            "asked": list(words),
            "losses": _pairs(past.losses),
            "eval_losses": _pairs(past.eval_losses),
            "step_time_s": past.step_time_s,
            **({} if past.unit is None else {past.unit: past.speed}),
            "changed": [{"step": step, "setting": text} for step, text in past.changed],
            "checkpoints": list(found.checkpoints),
            "disk_bytes": size,
            **places,
            "resume": command or None,
            "problems": problems,
        }
        show_json(document)
        return 0
    lines = [
        ("run", f"{name}: {path}" if name != str(path) else name),
        ("status", _status_text(found, now_s)),
        ("request", " ".join(words) or "the defaults"),
        *(("changed", f"since step {step}: {text}") for step, text in past.changed),
        *_history_lines(past),
        ("saved", _checkpoints_text(path, found.checkpoints)),
        ("size", f"{size_text(size)} on disk"),
        *(("scalars", command) for _, command in tracker_commands(path)),
        *((place, places[place]) for place in ("profile", "timeline") if place in places),
        *(("note", problem) for problem in problems),
        *([("note", hint)] if (hint := _hint(found)) else []),
        *([("resume", command)] if command else []),
    ]
    console = OutputConsole()
    for label, text in lines:
        _say(console, f"{label:9} {text}")
    return 0


def _hint(run: RunSummary) -> str | None:
    """Return a note to read before resuming."""
    if run.status == RUNNING:
        return "running: resume it when it has ended"
    if run.status == FINISHED:
        return "finished: it goes on with a larger run.num_steps"
    return None if run.checkpoints else "no checkpoint: it starts anew"


def _say(console: Console, text: str) -> None:
    console.print(_printable(text), markup=False, highlight=False, soft_wrap=True)


def _printable(text: str) -> str:
    """Return a text without what no terminal can print: file names may hold any bytes."""
    return printable(text.encode(errors="replace").decode())


def _document(run: RunSummary, now_s: float) -> dict[str, Any]:
    return {
        "name": run.name,
        "run_dir": str(run.path),
        "status": run.status,
        "reason": run.reason,
        "step": run.step,
        "num_steps": run.num_steps,
        "loss": run.loss,
        "eval_loss": run.eval_loss,
        "started": iso_text(run.started_s),
        "last_active": iso_text(run.recorded_s),
        "age_s": max(0.0, now_s - run.recorded_s),
        "settings": run.config,
        "problems": list(run.problems),
    }


def _status_text(run: RunSummary, now_s: float) -> str:
    reason = f": {run.reason}" if run.reason else ""
    return f"{run.status} at step {steps_text(run)}, recorded {age_text(now_s - run.recorded_s)} ago{reason}"


def _history_lines(past: RunHistory) -> list[tuple[str, str]]:
    lines = []
    for label, found in (("loss", past.losses), ("eval loss", past.eval_losses)):
        if found:
            values = [f"{which} {loss:.4f} (step {step})" for which, (step, loss) in found.items()]
            lines.append((label, ", ".join(values)))
    if past.step_time_s is not None:
        unit = {"tokens_per_s": "tok/s", "rows_per_s": "rows/s"}
        speed = "" if past.unit is None or past.speed is None else f", {past.speed:,.0f} {unit[past.unit]}"
        lines.append(("speed", f"{past.step_time_s:.3g} s a step{speed} (medians)"))
    return lines


def _checkpoints_text(path: Path, steps: Sequence[int]) -> str:
    if not steps:
        return "no checkpoint"
    many = "s" if len(steps) > 1 else ""
    return f"checkpoint{many} of step{many} {', '.join(map(str, steps))} in {path / 'checkpoints'}"


def _pairs(found: dict[str, tuple[int, float]]) -> dict[str, dict[str, float]]:
    return {which: {"step": step, "loss": loss} for which, (step, loss) in found.items()}


def few(names: Sequence[str]) -> str:
    """Return names in a line, of many the first ones."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def listed(tops: Sequence[Path]) -> str:
    """Return directories in a line."""
    return " and ".join(map(str, tops))
