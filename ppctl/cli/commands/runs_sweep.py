"""`ppctl runs show SWEEP`: the jobs of a sweep, how they stand, what it varies, and the best of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from ppctl.cli.overrides import resumption
from ppctl.launch.sweep.recorded import RecordedJob, RecordedSweep, is_sweep, read_sweep
from ppctl.reports.foreign import printable
from ppctl.reports.run_files import is_run
from ppctl.reports.terminal import OutputConsole, show_json, show_table

NUMBERS = {  # of a job: how its column is called, and the number written
    "final_loss": ("loss", ".4f"),
    "eval_loss": ("eval loss", ".4f"),
    "step_time_s": ("s/step", ".3g"),
    "tokens_per_s": ("tok/s", ",.0f"),
    "rows_per_s": ("rows/s", ",.0f"),
}


def find_sweep(name: str, tops: Sequence[Path]) -> Path | None:
    """Return the directory of the sweep that a path or a name below these directories means; None: it means none."""
    places = [place for place in (Path(name), *(top / name for top in tops)) if os.path.isdir(place)]
    return next((place for place in places if is_sweep(place) and not is_run(place)), None)


def show_sweep(directory: Path, *, as_json: bool) -> int:
    """Show a sweep; return 0."""
    sweep = read_sweep(directory, lambda path: resumption(path).words)
    if as_json:
        show_json(_document(sweep))
        return 0
    console, many = OutputConsole(), "s" * (len(sweep.jobs) != 1)
    counts = ", ".join(f"{number} {status}" for status, number in sweep.counts.items()) or "none has left anything"
    lines = [("sweep", str(directory)), ("jobs", f"{len(sweep.jobs)} job{many}: {counts}")]
    lines += [("axis", f"{name}: {', '.join(values)}") for name, values in sweep.axes.items()]
    for best in sweep.best:
        lines += [("best", best.text), ("  in", str(best.place)), ("  anew", best.command)]
    lines += [("summary", ", ".join(map(str, sweep.files)))] if sweep.files else []
    for label, text in lines:
        console.print(printable(f"{label:9} {text}"), markup=False, highlight=False, soft_wrap=True)
    present = [name for name in NUMBERS if any(job.numbers[name] is not None for job in sweep.jobs)]
    columns = ["job", "status", "step", *(NUMBERS[name][0] for name in present)]
    if sweep.jobs:
        show_table(console, "", columns, [_row(index, job, present) for index, job in enumerate(sweep.jobs)])
    for index, job in enumerate(sweep.jobs):
        if job.reason:
            console.print(printable(f"{index}: {job.reason}"), markup=False, highlight=False, soft_wrap=True)
    return 0


def _row(index: int, job: RecordedJob, present: Sequence[str]) -> list[str]:
    numbers = ((job.numbers[name], NUMBERS[name][1]) for name in present)
    return [
        escape(printable(f"{index}: {job.name}")),
        escape(job.status),
        f"{job.step} of {'?' if job.num_steps is None else job.num_steps}",
        *("" if value is None else format(value, form) for value, form in numbers),
    ]


def _document(sweep: RecordedSweep) -> dict[str, Any]:
    jobs = [
        {
            "job": index,
            "run_dir": str(job.run_dir),
            "status": job.status,
            "reason": job.reason,
            "step": job.step,
            "num_steps": job.num_steps,
            "values": dict(job.values),
            **job.numbers,
        }
        for index, job in enumerate(sweep.jobs)
    ]
    return {
        "sweep_dir": str(sweep.directory),
        "counts": sweep.counts,
        "axes": {name: list(values) for name, values in sweep.axes.items()},
        "best": [
            {
                "what": best.what,
                "job": best.job.index,
                "value": sweep.jobs[best.job.index].numbers[best.by],
                "place": str(best.place),
                "command": best.command,
            }
            for best in sweep.best
        ],
        "jobs": jobs,
        "files": list(map(str, sweep.files)),
    }
