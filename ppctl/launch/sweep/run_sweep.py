"""`ppctl COMMAND --multirun`: checks a sweep, runs its jobs, and writes their records and a page.

One loop runs local or submitted jobs; a job that fails does not stop the others.
"""

from __future__ import annotations

import queue
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ppctl.errors import ConfigError, error_document, one_line, os_errors
from ppctl.launch.supervisor import LEFT, Events, Stop, how, shell_code, stop_requests
from ppctl.launch.sweep import sweep_records as records
from ppctl.launch.sweep.local_jobs import LocalJobs
from ppctl.launch.sweep.sweep_jobs import EARLIER, FILES, Job, Result, Sweep, check_sweep, has_ended
from ppctl.launch.sweep.sweep_page import sweep_page
from ppctl.reports.terminal_output import replace_file, show_json, show_lines
from ppctl.reports.write_report import FILE as REPORT

if TYPE_CHECKING:
    from ppctl.launch.sweep.submitit_jobs import SubmittedJobs  # needs the extra slurm


def run_sweep(sweep: Sweep, report: Callable[[Path], object] = lambda run_dir: None) -> int:
    """Run a sweep; return 0 if all jobs are finished, 1 if one failed, 130 or 143 if interrupted.

    report: writes the report of the run in a directory; the page links to it. Raises ConfigError
    for an impossible sweep, before anything is started or written.
    """
    # 1. check the sweep
    check_sweep(sweep)
    # 2. run the jobs
    directory, console = sweep.directory, Console(stderr=True)
    remedy = "Use another run.dir, or make it writable."
    with os_errors(f"run.dir={directory} cannot be written", remedy):
        if sweep.trains:
            directory.mkdir(parents=True, exist_ok=True)
            records.write_records(directory, [*map(Result, sweep.jobs)])
        if sweep.study is not None:
            sweep.study.open()
    results, stop = run_jobs(sweep, console)
    # 3. write records, reports and the page
    records.show_results(console, results)
    if sweep.trains:
        for each in results:
            if each.seconds is not None or not (each.job.run_dir / REPORT).exists():
                report(each.job.run_dir)
        show_lines(console, *(f"ppctl: {line}" for line in write_summary(directory, results)))
    if stop is not None:
        return 128 + stop
    return int(any(each.status in ("failed", "interrupted") for each in results))


def write_summary(directory: Path, results: list[Result]) -> list[str]:
    """Write records and page; return lines about the sweep, even if a file cannot be written."""
    lines = [f"note: {note}"] if (note := records.side_by_side_note(results)) else []
    for best in records.best_of(results):
        lines += [best.text, f"  in {best.place}"]
    try:
        records.write_records(directory, results)
        replace_file(directory / FILES[1], sweep_page(directory, results))
    except OSError as error:
        return [*lines, f"the summary in {directory} cannot be written: {error.strerror}"]
    return [*lines, f"summary: {', '.join(str(directory / name) for name in FILES)}"]


# --- the loop over jobs ---------------------------------------------------------------------------


def run_jobs(sweep: Sweep, console: Console) -> tuple[list[Result], int | None]:
    """Run the jobs; return their results, and the signal that ended the sweep early or None.

    Each stop request is passed on to every running job. No other job starts; the running ones are
    awaited, because they may be saving. Submitted jobs continue.
    """
    with stop_requests() as events:
        starts = LocalJobs
        if sweep.is_submitted:
            from ppctl.launch.sweep.submitit_jobs import SubmittedJobs as starts  # an extra

        with closing(starts(sweep)) as starter:
            loop = _Loop(sweep, console, starter, deque(sweep.jobs), [*map(Result, sweep.jobs)])
            loop.run(events)
    return loop.results, loop.stop


@dataclass
class _Loop:
    sweep: Sweep
    console: Console
    starter: LocalJobs | SubmittedJobs
    waiting: deque[Job]
    results: list[Result]
    running: dict[int, float] = field(default_factory=dict)  # start of each job, seconds since 1970
    stop: int | None = None

    def run(self, events: Events) -> None:
        while True:
            while self.stop is None and self.has_room() and (job := self.next()) is not None:
                self.begin(job)
            if not self.running or (self.stop is not None and not self.starter.is_awaited):
                return
            while not self.handle_events(events):
                pass

    def has_room(self) -> bool:
        return self.starter.takes_all or len(self.running) < self.sweep.num_parallel

    def next(self) -> Job | None:
        """Return the next job to begin, or None if no job is waiting."""
        if self.waiting:
            return self.waiting.popleft()
        job = self.sweep.study.ask() if self.sweep.study is not None else None
        if job is not None:
            self.sweep.jobs.append(job)
            self.results.append(Result(job))
        return job

    def handle_events(self, events: Events) -> bool:
        """Handle all changes, and a stop request within poll_s; return whether any came."""
        changes = self.starter.changes()
        try:
            event = events.get(timeout=0 if changes else self.starter.poll_s)
        except queue.Empty:
            event = None
        for index, state, more, code, error in changes:
            job = self.sweep.jobs[index]
            if code is None:
                self.set(Result(job, state), f"{state}{more}")
            else:
                self.end(job, code, error)
        if isinstance(event, Stop):
            number = signal.Signals(event.number)
            message = self.starter.stop(number, self.running)
            if self.stop is None:
                self.stop = number
                show_lines(self.console, f"ppctl: {number.name}: {message}")
        return event is not None or bool(changes)

    def begin(self, job: Job) -> None:
        """Start a job; if it is refused or finished, print its result instead."""
        run = None if job.config is None or not self.sweep.trains else job.config.run
        if job.refusal is not None:
            self.refuse(job, job.refusal.kind, one_line(job.refusal))
        elif run is not None and has_ended(job.run_dir, run):
            result = Result(job, EARLIER, 0, numbers=records.numbers_of(job.run_dir))
            self.set(result, f"{EARLIER} ({job.run_dir})")
            self.emit({"status": "finished", "run_dir": str(job.run_dir), "step": run.num_steps})
        else:
            began_s = time.time()
            try:
                self.starter.begin(job)
            except OSError as error:
                why = f"{job.run_dir} cannot be written: {error.strerror}"
                self.refuse(job, ConfigError.kind, why)
            else:
                self.running[job.index] = began_s

    def refuse(self, job: Job, kind: str, why: str) -> None:
        self.set(Result(job, "failed", ConfigError.exit_code, error=why), f"refused: {why}")
        self.emit(error_document(kind, why))

    def end(self, job: Job, code: int, error: dict[str, Any] | None) -> None:
        """Record the end of a job, with Popen's exit code and the error that it left."""
        began_s = self.running.pop(job.index)
        in_shell, seconds = shell_code(code), time.time() - began_s
        status = "finished" if code == 0 else "interrupted" if in_shell in LEFT[1:] else "failed"
        if status == "interrupted" and self.stop is None and self.starter.is_awaited:
            self.stop = in_shell - 128  # the job itself got the signal: stop the sweep too
        text, why = f"{status} after {seconds:.1f} s", None
        if status == "failed":
            why = how(code) if error is None else error["error"]["message"]
            text += f": {why}"
        result = Result(job, status, in_shell, seconds, why)
        if self.sweep.trains:
            since_s = 0.0 if result.is_done else began_s
            result = replace(result, numbers=records.numbers_of(job.run_dir, since_s))
        self.set(result, text)
        if error is not None:
            self.emit(error)

    def set(self, result: Result, text: str) -> None:
        """Record and print the new state of a job, and report its end to the search."""
        job = result.job
        self.results[job.index] = result
        show_lines(self.console, f"ppctl: job {job.index}: {job.name}: {text}")
        if self.sweep.trains:
            with suppress(OSError):  # such as a full disk; `write_summary` reports it
                records.write_records(self.sweep.directory, self.results)
        if result.code is not None and self.sweep.study is not None:
            self.sweep.study.tell(result)

    def emit(self, document: dict[str, Any]) -> None:
        if self.sweep.as_json:
            show_json(document)
