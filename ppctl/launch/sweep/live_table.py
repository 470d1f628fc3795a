"""What the terminal shows of a sweep: a line for each event, a live table of jobs side by side, and how they ended."""

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

from ppctl.launch.sweep.jobs import Job, Outcome, Sweep
from ppctl.reports.run_files import last_record
from ppctl.reports.terminal import show_table

REFRESH_S = 1.0
STATES = ("running", "queued", "waiting", "finished", "skipped", "failed", "interrupted", "not started")
COLOURS = {"failed": "red", "interrupted": "yellow", "running": "bold", "finished": "green"}


class Board:
    """The terminal of a sweep, on stderr; use it as a context manager.

    The table is drawn where jobs run side by side and the terminal can: a job that runs alone has the terminal.
    """

    def __init__(self, sweep: Sweep, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.sweep = sweep
        self.is_live = self.console.is_interactive and (sweep.num_parallel > 1 or sweep.submit is not None)
        self._live = Live(console=self.console, auto_refresh=False, transient=True) if self.is_live else None

    def __enter__(self) -> Board:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Nothing; prints a line, above the table."""
        self.console.print(f"ppctl: {text}", markup=False, highlight=False, soft_wrap=True)

    def tell(self, job: Job, outcome: Outcome, more: str = "") -> None:
        """Nothing; prints a line for what has become of a job."""
        seconds = "" if outcome.seconds is None else f" after {outcome.seconds:.1f} s"
        if outcome.status == "failed":
            where = "refused" if outcome.began_s is None else f"failed{seconds}"
            self.say(f"job {job.index}: {job.name}: {where}: {outcome.error}")
        elif outcome.status == "skipped":
            self.say(f"job {job.index}: {job.name}: finished before, skipped ({job.run_dir})")
        elif outcome.status in ("running", "queued"):
            self.say(f"job {job.index}: {job.name}: {outcome.status}{more}")
        else:
            self.say(f"job {job.index}: {job.name}: {outcome.status}{seconds}")

    def show(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing; draws the table anew."""
        if self._live is not None:
            self._live.update(self._table(outcomes), refresh=True)

    def _table(self, outcomes: Sequence[Outcome]) -> Table:
        table = Table(title=counted(outcomes), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
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
        """State and newest numbers of a job; those of another start are not shown while it waits."""
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
            number(record.get("loss"), ".4f"),
            number(record.get("step_time_s"), ".3f"),
            number(seconds, ".0f"),
        ]


def show_end(console: Console, sweep: Sweep, outcomes: Sequence[Outcome], records: Sequence[Mapping[str, Any]]) -> None:
    """Nothing; prints the table of all jobs, and of those that failed why."""
    columns = ["job", "state"]
    numbers = {"steps": ",", "final_loss": ".4f", "step_time_s": ".3f"} if sweep.trains else {}
    rows = []
    for job, outcome, record in zip(sweep.jobs, outcomes, records, strict=True):
        code = f" ({outcome.code})" if outcome.code else ""
        told = [number(record.get(key), form) for key, form in numbers.items()]
        rows.append([f"{job.index}: {job.name}", outcome.status + code, *told, number(outcome.seconds, ".1f")])
    show_table(console, counted(outcomes), [*columns, *numbers, "seconds"], rows)
    for job, outcome in zip(sweep.jobs, outcomes, strict=True):
        if outcome.error is not None:
            text = f"ppctl: job {job.index}: {job.name}: {outcome.error}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)


def counted(outcomes: Sequence[Outcome]) -> str:
    """How many jobs are in which state.

    >>> counted([Outcome("finished"), Outcome("failed"), Outcome("finished")])
    '3 jobs: 2 finished, 1 failed'
    """
    found = Counter(outcome.status for outcome in outcomes)
    told = ", ".join(f"{found[state]} {state}" for state in STATES if found[state])
    return f"{len(outcomes)} job{'s' * (len(outcomes) != 1)}: {told}"


def number(value: float | None, form: str) -> str:
    """A number, or nothing where there is none.

    >>> number(1.5, ".2f"), number(None, ".2f")
    ('1.50', '')
    """
    return "" if value is None else format(value, form)
