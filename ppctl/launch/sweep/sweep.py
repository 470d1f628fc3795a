"""`ppctl COMMAND --multirun`: checks a sweep, runs its jobs, and writes what came of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ppctl.errors import ConfigError
from ppctl.launch.sweep.best import best_of
from ppctl.launch.sweep.jobs import MARK, Sweep, check_refusals, check_sweep
from ppctl.launch.sweep.live_table import LiveTable, show_end
from ppctl.launch.sweep.records import record_of
from ppctl.launch.sweep.runner import run_jobs
from ppctl.launch.sweep.summary import write_summary
from ppctl.reports.run_page.write_report import FILE as REPORT


def run_sweep(
    sweep: Sweep,
    report: Callable[[Path], object] = lambda run_dir: None,
    with_data_checked: Callable[[Sweep], Sweep] = lambda sweep: sweep,
) -> int:
    """Run a sweep; return the exit code: 0 all jobs are finished, 1 one failed, 130 or 143 interrupted.

    `report` writes the report of the run in a directory, which the summary links to; `with_data_checked` refuses jobs
    whose data are too few.

    Raises ConfigError, before anything is started or written, for a sweep that would not do what it says.
    """
    check_sweep(sweep)
    sweep = with_data_checked(sweep)
    check_refusals(sweep)
    try:
        sweep.directory.mkdir(parents=True, exist_ok=True)
        (sweep.directory / MARK).write_text(sweep.document)
        if sweep.study is not None:
            sweep.study.open()
    except OSError as error:
        raise ConfigError(
            f"run.dir={sweep.directory} cannot be written: {error.strerror}. Use another run.dir, or make it writable."
        ) from error
    with LiveTable(sweep) as table:
        outcomes, stop = run_jobs(sweep, table)
    records = [record_of(job, outcome) for job, outcome in zip(sweep.jobs, outcomes, strict=True)]
    decided_by = [best.by for best in best_of(sweep, records)] if sweep.trains else []
    show_end(table.console, sweep, outcomes, records, decided_by)
    if sweep.trains:
        for job, outcome in zip(sweep.jobs, outcomes, strict=True):
            if outcome.seconds is not None or not (job.run_dir / REPORT).exists():
                report(job.run_dir)
        for line in write_summary(sweep, outcomes, records):
            table.say(line)
    if stop is not None:
        return 128 + stop
    return int(any(outcome.status in ("failed", "interrupted") for outcome in outcomes))
