"""`ppctl runs`: past and present runs as a table, and one run in detail. Loads no JAX."""

import os
import time
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from ppctl.errors import ConfigError, nearest, os_errors, suggested
from ppctl.reports import run_files, terminal_output as terminal
from ppctl.reports.foreign_files import printable
from ppctl.reports.run_files import RunSummary, setting_changes
from ppctl.reports.run_page.one_run_page import warnings_of
from ppctl.reports.run_page.read_run import TIMED, Points, RecordedRun, versions_of

HEADINGS = {"eval_loss": "eval loss"}
MOST_NAMED = 10  # runs listed in an error


def list_runs(
    runs: Sequence[RunSummary],
    title: str,
    columns: Mapping[str, Sequence[str]],
    least: Sequence[str],
    closed: Sequence[str],
) -> int:
    """Print a table of runs, then a line for each problem; return 0.

    columns: the text of each run, by column. least: the columns that make room first. closed: lines
    on unreadable directories.
    """
    console = terminal.OutputConsole()
    heads, last = ([HEADINGS.get(name, name) for name in names] for names in (columns, least))
    rows = [[*map(printable, row)] for row in zip(*columns.values(), strict=True)]
    terminal.show_table(console, title, heads, rows, last)
    lines = [f"{run.name}: {x}" for run in runs for x in (run.reason, *run.problems) if x]
    terminal.show_lines(console, *map(printable, [*lines, *closed]))
    return 0


def names_of(tops: Sequence[Path], closed: list[str]) -> list[tuple[str, Path]]:
    """Return (name, directory) of every run below `tops`.

    The name is the path below a single top, or the whole path with several. closed: gets a line for
    each unreadable directory.
    """
    names: dict[Path, str] = {}
    for top in tops:
        _check_readable(top)
        found = run_files.find_runs(top, closed)
        names |= {path: name if len(tops) == 1 else str(path) for name, path in found}
    return [(name, path) for path, name in names.items()]


def _check_readable(directory: Path) -> None:
    remedy = "Name a directory that holds runs: ppctl runs DIR."
    with os_errors(f"{directory} cannot be read", remedy):
        os.listdir(directory)


def find_run(name: str, tops: Sequence[Path]) -> tuple[str, Path]:
    """Return (name, directory) of the run with this path, name or part of a name."""
    path = Path(name)
    if run_files.is_run(path):
        return os.path.normpath(name), path
    is_inside = not path.is_absolute() and any(os.path.isdir(top / name) for top in tops)
    if os.path.isdir(path) and not is_inside:
        _check_readable(path)
        below = f"`ppctl runs {name}` lists the runs below it."
        raise ConfigError(f"{name} is no run: it has no metrics.jsonl. {below}")
    is_path = path.is_absolute() or ("/" in name and not any(map(os.path.isdir, tops)))
    if is_path and not os.path.exists(path):
        below = "`ppctl runs DIR` lists the runs below DIR."
        raise ConfigError(f"{name} is no run: there is no such directory. {below}")
    closed: list[str] = []
    names = dict(names_of(tops, closed))
    matches = [name] if name in names else [each for each in names if name in each]
    if len(matches) == 1:
        return matches[0], names[matches[0]]
    if matches:
        what = f"{name} is a part of {len(matches)} names: {few(matches)}"
        raise ConfigError(f"{what}. Use a longer part of one, or a path.")
    if unread := [line for line in closed if name in line]:
        raise ConfigError(" ".join(unread[:MOST_NAMED]))
    if not names:
        remedy = f"Name the directory: ppctl runs show {name} DIR."
        raise ConfigError(f"{name}: no run is in {listed(tops)}. {remedy}")
    hint = suggested(nearest(name, names, cutoff=0.4)[:1]) or f" (runs: {few(list(names))})"
    raise ConfigError(f"{name} is no run in {listed(tops)}.{hint}")


def show_run(run: RecordedRun, *, as_json: bool) -> int:
    """Print one run as lines, or as JSON; return 0."""
    # 1. as JSON
    found, summary = run_document(run), run.summary
    if as_json:
        terminal.show_json(found)
        return 0
    # 2. as lines
    name, path = summary.name, summary.path
    request = " ".join(run.words) or ("the defaults" if run.command else "not recorded")
    reason = f": {summary.reason}" if summary.reason else ""
    recorded = f"recorded {terminal.age_text(found['age_s'])} ago"
    lines = [
        ("run", f"{name}: {path}" if name != str(path) else name),
        ("status", f"{summary.status} at step {summary.steps_text}, {recorded}{reason}"),
        ("request", request),
        *(("changed", f"since step {x['step']}: {x['setting']}") for x in found["changed"]),
        ("loss", _losses_text(found["losses"])),
        ("eval loss", _losses_text(found["eval_losses"])),
        ("speed", _speed_text(run)),
        ("saved", _checkpoints_text(path, summary.checkpoints)),
        ("size", f"{terminal.size_text(found['disk_bytes'])} on disk"),
        *(("scalars", command) for _, command in run_files.tracker_commands(path)),
        ("profile", found.get("profile", "")),
        ("timeline", found.get("timeline", "")),
        *(("note", problem) for problem in run.problems),
        ("note", summary.resume_note),
        ("resume", run.command),
    ]
    texts = [printable(f"{label:9} {text}") for label, text in lines if text]
    terminal.show_lines(terminal.OutputConsole(), *texts)
    return 0


def run_document(run: RecordedRun) -> dict[str, Any]:
    """Return all recorded facts of a run as a JSON document; None for missing numbers."""
    path = run.summary.path
    medians = {name: run.median(name) for name in TIMED if name in run.curves}
    folders = [path / name for name in ("tensorboard", "profile", "timeline")]
    return summary_document(run.summary, time.time()) | {
        "asked": list(run.words),
        "resume": run.command or None,
        "losses": extremes(run.points("loss")),
        "eval_losses": extremes(run.points("eval_loss")),
        "step_time_s": run.median("step_time_s"),
        **({} if run.speed is None else {run.speed: run.median(run.speed)}),
        "medians": medians,
        **run.newest,
        "measured_bubble_fraction": run.measured_bubble,
        "checkpoints": list(run.summary.checkpoints),
        "disk_bytes": run_files.disk_bytes(path),
        **{folder.name: str(folder) for folder in folders if os.path.isdir(folder)},
        "versions": versions_of(run.starts[-1]) if run.starts else {},
        "starts": list(run.starts),
        "changed": [{"step": step, "setting": text} for step, text in setting_changes(run.starts)],
        "problems": list(run.problems),
        "warnings": warnings_of(run),
    }


def summary_document(run: RunSummary, now_s: float) -> dict[str, Any]:
    """Return the state of a run and its settings as a JSON document."""
    state = ("status", "reason", "step", "num_steps", "loss", "eval_loss", "eval_step")
    return {
        "name": run.name,
        "run_dir": str(run.path),
        **{name: getattr(run, name) for name in state},
        "started": terminal.iso_text(run.started_s),
        "last_active": terminal.iso_text(run.recorded_s),
        "age_s": max(0.0, now_s - run.recorded_s),
        "settings": run.config,
        "problems": list(run.problems),
    }


def extremes(points: Points) -> dict[str, dict[str, float]]:
    """Return step and loss of the first, last and least finite loss; {} without one."""
    pairs = [{"step": step, "loss": loss} for step, loss in points if loss is not None]
    if not pairs:
        return {}
    return {"first": pairs[0], "last": pairs[-1], "least": min(pairs, key=itemgetter("loss"))}


def _losses_text(found: dict[str, dict[str, float]]) -> str:
    losses = ((which, terminal.decimal_text(x["loss"]), x["step"]) for which, x in found.items())
    return ", ".join(f"{which} {loss} (step {step})" for which, loss, step in losses)


def _speed_text(run: RecordedRun) -> str:
    if (step_s := run.median("step_time_s")) is None:
        return ""
    speed = (
        "" if run.speed is None else f", {run.median(run.speed):,.0f} {terminal.SPEEDS[run.speed]}"
    )
    return f"{terminal.seconds_text(step_s)} a step{speed} (medians)"


def _checkpoints_text(path: Path, steps: Sequence[int]) -> str:
    if not steps:
        return "no checkpoint"
    many = "s" if len(steps) > 1 else ""
    return f"checkpoint{many} of step{many} {', '.join(map(str, steps))} in {path / 'checkpoints'}"


def few(names: Sequence[str]) -> str:
    """Return names in a line: the first MOST_NAMED, and the number of the others."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def listed(tops: Sequence[Path]) -> str:
    """Return directories in a line."""
    return " and ".join(map(str, tops))
