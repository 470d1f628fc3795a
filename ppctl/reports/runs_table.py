"""`ppctl runs`: past and present runs as a table, and one of them in detail. Loads no JAX."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from ppctl.errors import ConfigError
from ppctl.reports.foreign_files import printable
from ppctl.reports.run_files import (
    RUNNING,
    RunSummary,
    disk_bytes,
    find_runs,
    is_run,
    setting_changes,
    tracker_commands,
)
from ppctl.reports.run_page.read_run import Points, RecordedRun
from ppctl.reports.run_status import FINISHED
from ppctl.reports.runs_columns import Column, steps_text
from ppctl.reports.terminal_output import (
    SPEEDS,
    OutputConsole,
    age_text,
    iso_text,
    show_json,
    show_lines,
    show_table,
    size_text,
)

MOST_NAMED = 10  # runs in an error


def list_runs(
    runs: Sequence[RunSummary], title: str, columns: Sequence[Column], *, as_json: bool
) -> int:
    """List runs, at least one, in this order; return 0."""
    now_s = time.time()
    if as_json:
        show_json({"runs": [_document(run, now_s) for run in runs]})
        return 0
    console = OutputConsole()
    heads = [column.name.replace("eval_loss", "eval loss") for column in columns]
    rows = [[escape(printable(column.text(run, now_s))) for column in columns] for run in runs]
    show_table(console, title, heads, rows)
    for run in runs:
        for line in (*([run.reason] if run.reason else []), *run.problems):
            show_lines(console, printable(f"{run.name}: {line}"))
    return 0


def names_of(tops: Sequence[Path]) -> list[tuple[str, Path]]:
    """Return (name, directory) of every run: the path below a single directory, or the whole."""
    for top in tops:
        remedy = "Name one that holds runs: ppctl runs DIR."
        if not os.path.exists(top):  # False too where a name is too long
            raise ConfigError(f"{top}: there is no such directory. {remedy}")
        if not os.path.isdir(top):
            raise ConfigError(f"{top} is a file. Name a directory that holds runs: ppctl runs DIR.")
        try:
            os.listdir(top)
        except OSError as error:
            remedy = "Make it readable, or name another."
            raise ConfigError(f"{top} cannot be read: {error.strerror}. {remedy}") from error
    names: dict[Path, str] = {}
    for top in tops:
        names |= {path: name if len(tops) == 1 else str(path) for name, path in find_runs(top)}
    return [(name, path) for path, name in names.items()]


def find_run(name: str, tops: Sequence[Path]) -> tuple[str, Path]:
    """Return (name, directory) of the one run with this path, name or part of a name.

    Raises ConfigError for none and for several.
    """
    path = Path(name)
    if is_run(path):
        return os.path.normpath(name), path
    if os.path.isdir(path) and not any(os.path.isdir(top / name) for top in tops):
        below = f"`ppctl runs {name}` lists the runs below it."
        raise ConfigError(f"{name} is no run: it has no metrics.jsonl. {below}")
    names = dict(names_of(tops))
    matches = [name] if name in names else [each for each in names if name in each]
    if len(matches) == 1:
        return matches[0], names[matches[0]]
    if matches:
        what = f"{name} is a part of {len(matches)} names: {few(matches)}"
        raise ConfigError(f"{what}. Use more of one, or a path.")
    if not names:
        remedy = f"Name the directory: ppctl runs show {name} DIR."
        raise ConfigError(f"{name}: no run is in {listed(tops)}. {remedy}")
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]}?" if near else f" (runs: {few(list(names))})"
    raise ConfigError(f"{name} is no run in {listed(tops)}.{hint}")


def show_run(run: RecordedRun, *, as_json: bool) -> int:
    """Show one run; return 0."""
    # 1. the facts
    summary, now_s = run.summary, time.time()
    name, path, changed = summary.name, summary.path, setting_changes(run.starts)
    losses, eval_losses = (extremes(run.curves.get(name, ())) for name in ("loss", "eval_loss"))
    folders = [path / name for name in ("tensorboard", "profile", "timeline")]
    places = {folder.name: str(folder) for folder in folders if folder.is_dir()}
    size = disk_bytes(path)
    # 2. as JSON
    if as_json:
        document = _document(summary, now_s) | {
            "asked": list(run.words),
            "losses": _pairs(losses),
            "eval_losses": _pairs(eval_losses),
            "step_time_s": run.median("step_time_s"),
            **({} if run.speed is None else {run.speed: run.median(run.speed)}),
            "changed": [{"step": step, "setting": text} for step, text in changed],
            "checkpoints": list(summary.checkpoints),
            "disk_bytes": size,
            **places,
            "resume": run.command or None,
            "problems": list(run.problems),
        }
        show_json(document)
        return 0
    # 3. as lines
    request = " ".join(run.words) or ("the defaults" if run.command else "not recorded")
    lines = [
        ("run", f"{name}: {path}" if name != str(path) else name),
        ("status", _status_text(summary, now_s)),
        ("request", request),
        *(("changed", f"since step {step}: {text}") for step, text in changed),
        ("loss", _losses_text(losses)),
        ("eval loss", _losses_text(eval_losses)),
        ("speed", _speed_text(run)),
        ("saved", _checkpoints_text(path, summary.checkpoints)),
        ("size", f"{size_text(size)} on disk"),
        *(("scalars", command) for _, command in tracker_commands(path)),
        ("profile", places.get("profile", "")),
        ("timeline", places.get("timeline", "")),
        *(("note", problem) for problem in run.problems),
        ("note", _hint(summary)),
        ("resume", run.command),
    ]
    console = OutputConsole()
    for label, text in lines:
        if text:
            show_lines(console, printable(f"{label:9} {text}"))
    return 0


def _hint(run: RunSummary) -> str:
    """Return a note to read before resuming, or ""."""
    if run.status == RUNNING:
        return "running: resume it when it has ended"
    if run.status == FINISHED:
        return "finished: it goes on with a larger run.num_steps"
    return "" if run.checkpoints else "no checkpoint: it starts anew"


def _document(run: RunSummary, now_s: float) -> dict[str, Any]:
    return run.document | {
        "started": iso_text(run.started_s),
        "last_active": iso_text(run.recorded_s),
        "age_s": max(0.0, now_s - run.recorded_s),
        "settings": run.config,
        "problems": list(run.problems),
    }


def _status_text(run: RunSummary, now_s: float) -> str:
    ago = age_text(now_s - run.recorded_s)
    reason = f": {run.reason}" if run.reason else ""
    return f"{run.status} at step {steps_text(run)}, recorded {ago} ago{reason}"


def extremes(points: Points) -> dict[str, tuple[float, float]]:
    """Return the first, last and least (step, loss); nothing where no loss is finite."""
    pairs = [(step, loss) for step, loss in points if loss is not None]
    if not pairs:
        return {}
    return {"first": pairs[0], "last": pairs[-1], "least": min(pairs, key=lambda pair: pair[1])}


def _losses_text(found: dict[str, tuple[float, float]]) -> str:
    return ", ".join(f"{which} {loss:.4f} (step {step})" for which, (step, loss) in found.items())


def _speed_text(run: RecordedRun) -> str:
    step_s = run.median("step_time_s")
    if step_s is None:
        return ""
    speed = "" if run.speed is None else f", {run.median(run.speed):,.0f} {SPEEDS[run.speed]}"
    return f"{step_s:.3g} s a step{speed} (medians)"


def _checkpoints_text(path: Path, steps: Sequence[int]) -> str:
    if not steps:
        return "no checkpoint"
    many = "s" if len(steps) > 1 else ""
    return f"checkpoint{many} of step{many} {', '.join(map(str, steps))} in {path / 'checkpoints'}"


def _pairs(found: dict[str, tuple[float, float]]) -> dict[str, dict[str, float]]:
    return {which: {"step": step, "loss": loss} for which, (step, loss) in found.items()}


def few(names: Sequence[str]) -> str:
    """Return names in a line, of many the first ones."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def listed(tops: Sequence[Path]) -> str:
    """Return directories in a line."""
    return " and ".join(map(str, tops))
