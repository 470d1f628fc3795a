"""The terminal of a sweep: a line for each event, a live table of parallel jobs, and the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ppctl.launch.sweep.best_job import decimals
from ppctl.launch.sweep.sweep_jobs import Job, Outcome, Sweep
from ppctl.reports.run_files import last_record
from ppctl.reports.terminal_output import show_table

REFRESH_S = 1.0
STATES = ("running", "queued", "waiting", "finished", "skipped", "failed")
STATES += ("interrupted", "not started")
COLOURS = {"failed": "red", "interrupted": "yellow", "running": "bold", "finished": "green"}


class LiveTable:
    """The terminal of a sweep, on stderr; use it as a context manager.

    The table is drawn if jobs run side by side; a job that runs alone has the terminal.
    """

    def __init__(self, sweep: Sweep, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.sweep = sweep
        has_table = sweep.num_parallel > 1 or sweep.is_submitted
        self.is_live = self.console.is_interactive and has_table
        self._errors: dict[str | None, int] = {}  # the first job with each
        live = Live(console=self.console, auto_refresh=False, transient=True)
        self._live = live if self.is_live else None

    def __enter__(self) -> LiveTable:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line, above the table."""
        self.console.print(f"ppctl: {text}", markup=False, highlight=False, soft_wrap=True)

    def show_outcome(self, job: Job, outcome: Outcome, more: str = "") -> None:
        """Print a line for the new state of a job."""
        seconds = "" if outcome.seconds is None else f" after {outcome.seconds:.1f} s"
        text = f"{outcome.status}{seconds}"
        if outcome.status == "failed":
            where = "refused" if outcome.began_s is None else text
            first = self._errors.setdefault(outcome.error, job.index)
            text = f"{where}: {outcome.error}" if first == job.index else f"{where}, as job {first}"
        elif outcome.status == "skipped":
            text = f"finished before, skipped ({job.run_dir})"
        elif outcome.status in ("running", "queued"):
            text = f"{outcome.status}{more}"
        self.say(f"job {job.index}: {job.name}: {text}")

    def show(self, outcomes: Sequence[Outcome]) -> None:
        """Draw the table anew."""
        if self._live is not None:
            self._live.update(self._table(outcomes), refresh=True)

    def _table(self, outcomes: Sequence[Outcome]) -> Table:
        title = state_counts(outcomes)
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("job", "state", "step", "loss", "s/step", "s"):
            side = "left" if name in ("job", "state") else "right"
            table.add_column(name, justify=side, no_wrap=True)
        rows = sorted(self.sweep.jobs, key=lambda job: STATES.index(outcomes[job.index].status))
        room = max(1, self.console.height - 8)
        for job in sorted(rows[:room], key=lambda job: job.index):
            table.add_row(*self._row(job, outcomes[job.index]))
        if len(rows) > room:
            table.add_row(f"and {len(rows) - room} more")
        return table

    def _row(self, job: Job, outcome: Outcome) -> list[str | Text]:
        """Return the state and the newest numbers of a job; none of an earlier start."""
        record: Mapping[str, Any] = {}
        seconds = outcome.seconds
        if outcome.began_s is not None:
            record = last_record(job.run_dir, since_s=outcome.began_s) or {}
            seconds = time.time() - outcome.began_s if seconds is None else seconds
        num_steps = job.config.run.num_steps if job.config is not None else None
        step = f"{record['step']}/{num_steps}" if "step" in record else ""
        return [
            Text(f"{job.index}: {job.name}", overflow="ellipsis"),
            Text(outcome.status, style=COLOURS.get(outcome.status, "dim")),
            step,
            number_text(record.get("loss"), ".4f"),
            number_text(record.get("step_time_s"), ".3f"),
            number_text(seconds, ".0f"),
        ]


def show_end(
    console: Console,
    sweep: Sweep,
    outcomes: Sequence[Outcome],
    records: Sequence[Mapping[str, Any]],
    decided_by: Sequence[str] = (),
) -> None:
    """Print the table of all jobs, with the numbers that decided the best, and the errors."""
    # 1. numbers and their forms
    forms: dict[str, str] = {}
    if sweep.trains:
        forms["steps"] = ","
        for name in ("final_loss", *(["eval_loss"] if "eval_loss" in decided_by else [])):
            forms[name] = f".{decimals(record.get(name) for record in records)}f"
        forms["step_time_s"] = ".4g"
        if decided_by and decided_by[0] in ("tokens_per_s", "rows_per_s"):
            forms[decided_by[0]] = ",.0f"
    # 2. the table
    rows = []
    for job, outcome, record in zip(sweep.jobs, outcomes, records, strict=True):
        status = outcome.status + (f" ({outcome.code})" if outcome.code else "")
        cells = [number_text(record.get(key), form) for key, form in forms.items()]
        seconds = number_text(outcome.seconds, ".1f")
        rows.append([f"{job.index}: {job.name}", status, *cells, seconds])
    show_table(console, state_counts(outcomes), ["job", "state", *forms, "seconds"], rows)
    # 3. the errors
    for error, jobs in equal_errors(sweep, outcomes).items():
        others = f" and {len(jobs) - 1} more" if len(jobs) > 1 else ""
        text = f"ppctl: job {jobs[0].index}: {jobs[0].name}{others}: {error}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def equal_errors(sweep: Sweep, outcomes: Sequence[Outcome]) -> dict[str, list[Job]]:
    """Return the failed jobs by their error, in the order of the first job of each."""
    jobs: dict[str, list[Job]] = {}
    for job, outcome in zip(sweep.jobs, outcomes, strict=True):
        if outcome.error is not None:
            jobs.setdefault(outcome.error, []).append(job)
    return jobs


def state_counts(outcomes: Sequence[Outcome]) -> str:
    """Return the number of jobs in each state, in words.

    >>> state_counts([Outcome("finished"), Outcome("failed"), Outcome("finished")])
    '3 jobs: 2 finished, 1 failed'
    """
    numbers = Counter(outcome.status for outcome in outcomes)
    counts = ", ".join(f"{numbers[state]} {state}" for state in STATES if numbers[state])
    return f"{len(outcomes)} job{'s' * (len(outcomes) != 1)}: {counts}"


def number_text(value: float | None, form: str) -> str:
    """Return a number as text, "" for None.

    >>> number_text(1.5, ".2f"), number_text(None, ".2f")
    ('1.50', '')
    """
    return "" if value is None else format(value, form)
