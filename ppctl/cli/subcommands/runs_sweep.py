"""`ppctl runs show SWEEP`: the axes of a sweep, its jobs and their status, and the best."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.markup import escape

from ppctl.cli.resume_command import resumption
from ppctl.launch.sweep.sweep_records import is_sweep, job_name, read_sweep
from ppctl.reports.foreign_files import printable
from ppctl.reports.page_kit import NUMBERS
from ppctl.reports.run_files import is_run
from ppctl.reports.terminal_output import SPEEDS, OutputConsole, show_json, show_lines, show_table

COLUMNS = ("final_loss", "eval_loss", "step_time_s", *SPEEDS)  # of a job


def find_sweep(name: str, tops: Sequence[Path]) -> Path | None:
    """Return the directory of the sweep of this path, or of this name below `tops`, if any."""
    places = filter(os.path.isdir, (Path(name), *(top / name for top in tops)))
    return next((place for place in places if is_sweep(place) and not is_run(place)), None)


def show_sweep(directory: Path, *, as_json: bool) -> int:
    """Show a sweep; return 0."""
    sweep = read_sweep(directory, lambda path: resumption(path).words)
    jobs = sweep["jobs"]
    if as_json:
        show_json(sweep)
        return 0
    # 1. its lines
    console, many = OutputConsole(), "s" * (len(jobs) != 1)
    say = partial(show_lines, console)
    counts = ", ".join(f"{number} {status}" for status, number in sweep["counts"].items())
    counted = f"{len(jobs)} job{many}: {counts or 'none has left anything'}"
    lines = [("sweep", str(directory)), ("jobs", counted)]
    lines += [("axis", f"{name}: {', '.join(values)}") for name, values in sweep["axes"].items()]
    for best in sweep["best"]:
        lines += [("best", best["text"]), ("  in", best["place"]), ("  anew", best["command"])]
    lines += [("summary", ", ".join(sweep["files"]))] if sweep["files"] else []
    for label, text in lines:
        say(printable(f"{label:9} {text}"))
    # 2. its jobs, and why some failed
    present = [name for name in COLUMNS if any(job[name] is not None for job in jobs)]
    columns = ["job", "status", "step", *(NUMBERS[name][0] for name in present)]
    if jobs:
        show_table(console, "", columns, [_row(job, present) for job in jobs])
    for job in jobs:
        if job["reason"]:
            say(printable(f"{job['job']}: {job['reason']}"))
    return 0


def _row(job: Mapping[str, Any], present: Sequence[str]) -> list[str]:
    return [
        escape(printable(f"{job['job']}: {job_name(job)}")),
        escape(job["status"]),
        f"{job['step']} of {'?' if job['num_steps'] is None else job['num_steps']}",
        *("" if job[name] is None else NUMBERS[name][1](job[name]) for name in present),
    ]
