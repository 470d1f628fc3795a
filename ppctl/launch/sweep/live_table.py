"""The terminal of a sweep: a line for each event, a live table of jobs side by side, and how they ended."""

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

from ppctl.launch.sweep.best import decimals
from ppctl.launch.sweep.jobs import Job, Outcome, Sweep
from ppctl.reports.run_files import last_record
from ppctl.reports.terminal import show_table

REFRESH_S = 1.0
STATES = ("running", "queued", "waiting", "finished", "skipped", "failed", "interrupted", "not started")
COLOURS = {"failed": "red", "interrupted": "yellow", "running": "bold", "finished": "green"}


class LiveTable:
    """The terminal of a sweep, on stderr; use it as a context manager.

    The table is drawn where jobs run side by side and the terminal can: a job that runs alone has the terminal.
    """

    def __init__(self, sweep: Sweep, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.sweep = sweep
        self.is_live = self.console.is_interactive and (sweep.num_parallel > 1 or sweep.submit is not None)
        self._errors: dict[str | None, int] = {}  # the job that told each first
        self._live = Live(console=self.console, auto_refresh=False, transient=True) if self.is_live else None

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
        """Print a line for what has become of a job."""
        seconds = "" if outcome.seconds is None else f" after {outcome.seconds:.1f} s"
        if outcome.status == "failed":
            where = "refused" if outcome.began_s is None else f"failed{seconds}"
            first = self._errors.setdefault(outcome.error, job.index)
            why = f": {outcome.error}" if first == job.index else f", as job {first}"
            self.say(f"job {job.index}: {job.name}: {where}{why}")
        elif outcome.status == "skipped":
            self.say(f"job {job.index}: {job.name}: finished before, skipped ({job.run_dir})")
        elif outcome.status in ("running", "queued"):
            self.say(f"job {job.index}: {job.name}: {outcome.status}{more}")
        else:
            self.say(f"job {job.index}: {job.name}: {outcome.status}{seconds}")

    def show(self, outcomes: Sequence[Outcome]) -> None:
        """Draw the table anew."""
        if self._live is not None:
            self._live.update(self._table(outcomes), refresh=True)

    def _table(self, outcomes: Sequence[Outcome]) -> Table:
        table = Table(title=state_counts(outcomes), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("job", "state", "step", "loss", "s/step", "s"):
            table.add_column(name, justify="left" if name in ("job", "state") else "right", no_wrap=True)
        rows = sorted(self.sweep.jobs, key=lambda job: STATES.index(outcomes[job.index].status))
        room = max(1, self.console.height - 8)
        for job in sorted(rows[:room], key=lambda job: job.index):
            table.add_row(*self._row(job, outcomes[job.index]))
        if len(rows) > room:
            table.add_row(f"and {len(rows) - room} more")
        return table

    def _row(self, job: Job, outcome: Outcome) -> list[str | Text]:
        """Return state and newest numbers of a job; those of another start are not shown while it waits."""
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
    """Print the table of all jobs, with the numbers that decided which is best, and of those that failed why."""
    columns = ["job", "state"]
    numbers: dict[str, str] = {}
    if sweep.trains:
        losses = ["final_loss", *(["eval_loss"] if "eval_loss" in decided_by else [])]
        forms = {name: f".{decimals(record.get(name) for record in records)}f" for name in losses}
        numbers = {"steps": ",", **forms, "step_time_s": ".4g"}
        numbers |= {name: ",.0f" for name in ("tokens_per_s", "rows_per_s") if [*decided_by[:1]] == [name]}
    rows = []
    for job, outcome, record in zip(sweep.jobs, outcomes, records, strict=True):
        code = f" ({outcome.code})" if outcome.code else ""
        cells = [number_text(record.get(key), form) for key, form in numbers.items()]
        rows.append([f"{job.index}: {job.name}", outcome.status + code, *cells, number_text(outcome.seconds, ".1f")])
    show_table(console, state_counts(outcomes), [*columns, *numbers, "seconds"], rows)
    for error, jobs in equal_errors(sweep, outcomes).items():
        which = (
            f"job {jobs[0].index}: {jobs[0].name}"
            if len(jobs) == 1
            else f"{len(jobs)} jobs ({_numbers([job.index for job in jobs])})"
        )
        console.print(f"ppctl: {which}: {error}", markup=False, highlight=False, soft_wrap=True)


def equal_errors(sweep: Sweep, outcomes: Sequence[Outcome]) -> dict[str, list[Job]]:
    """Return the jobs that failed by what they said, in the order of the first of each."""
    found: dict[str, list[Job]] = {}
    for job, outcome in zip(sweep.jobs, outcomes, strict=True):
        if outcome.error is not None:
            found.setdefault(outcome.error, []).append(job)
    return found


def _numbers(jobs: Sequence[int]) -> str:
    """Return the numbers of jobs, runs of them as first-last.

    >>> _numbers([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7, 8'
    """
    runs: list[list[int]] = []
    for number in jobs:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def state_counts(outcomes: Sequence[Outcome]) -> str:
    """Return how many jobs are in which state, in words.

    >>> state_counts([Outcome("finished"), Outcome("failed"), Outcome("finished")])
    '3 jobs: 2 finished, 1 failed'
    """
    found = Counter(outcome.status for outcome in outcomes)
    counts = ", ".join(f"{found[state]} {state}" for state in STATES if found[state])
    return f"{len(outcomes)} job{'s' * (len(outcomes) != 1)}: {counts}"


def number_text(value: float | None, form: str) -> str:
    """Return a number as text, empty where there is none.

    >>> number_text(1.5, ".2f"), number_text(None, ".2f")
    ('1.50', '')
    """
    return "" if value is None else format(value, form)
