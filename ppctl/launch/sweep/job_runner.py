"""Runs the jobs of a sweep, a few side by side; one that fails stops no other."""

from __future__ import annotations

import json
import queue
import signal
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ppctl.errors import error_document
from ppctl.launch.local_processes import newest_checkpoint
from ppctl.launch.supervisor import LEFT, Events, Exit, Stop, how, shell_code, stop_requests
from ppctl.launch.sweep.finished_runs import has_ended
from ppctl.launch.sweep.job_processes import Processes
from ppctl.launch.sweep.live_table import REFRESH_S, LiveTable
from ppctl.launch.sweep.sweep_jobs import Job, JobEvents, Moved, Outcome, Sweep

if TYPE_CHECKING:
    from ppctl.launch.sweep.submitit_jobs import SubmittedJobs  # an extra


def run_jobs(sweep: Sweep, table: LiveTable) -> tuple[list[Outcome], int | None]:
    """Run the jobs; return the outcome of each, and the signal that ended the sweep early or None.

    Each stop request is passed on to every running job; no other job is started, and the running
    ones are waited for, as they may be saving. Submitted jobs go on.
    """
    with stop_requests() as events:
        starter = _starter(sweep, events)
        try:
            runner = _Runner(sweep, table, starter, [Outcome("waiting") for _ in sweep.jobs])
            stop = runner.run(events)
        finally:
            starter.close()
    never = Outcome("not started")
    return [never if outcome.status == "waiting" else outcome for outcome in runner.outcomes], stop


def _starter(sweep: Sweep, events: JobEvents) -> Processes | SubmittedJobs:
    if not sweep.is_submitted:
        return Processes(sweep, events)
    from ppctl.launch.sweep.submitit_jobs import SubmittedJobs

    return SubmittedJobs(sweep, events)


@dataclass
class _Runner:
    sweep: Sweep
    table: LiveTable
    starter: Processes | SubmittedJobs
    outcomes: list[Outcome]
    waiting: deque[Job] = field(default_factory=deque)
    running: dict[int, float] = field(default_factory=dict)  # start of a job, as time.time()
    stop: int | None = None

    def run(self, events: Events) -> int | None:
        self.waiting.extend(self.sweep.jobs)
        while True:
            while self.stop is None and self.has_room() and (job := self.next()) is not None:
                self.begin(job)
                self.handle_events(events, wait=False)
            self.starter.commit()
            if not self.running or (self.stop is not None and not self.starter.is_awaited):
                return self.stop
            self.table.show(self.outcomes)
            self.handle_events(events, wait=True)

    def has_room(self) -> bool:
        return self.starter.takes_all or len(self.running) < self.sweep.num_parallel

    def next(self) -> Job | None:
        """Return the next job to begin, or None where no job waits now."""
        if self.waiting:
            return self.waiting.popleft()
        job = self.sweep.study.ask() if self.sweep.study is not None else None
        if job is not None:
            self.sweep.jobs.append(job)
            self.outcomes.append(Outcome("waiting"))
        return job

    def handle_events(self, events: Events, *, wait: bool) -> None:
        """Handle all events there are, or wait for the first one to come."""
        timeout_s = (REFRESH_S if self.table.is_live else None) if wait else 0
        with suppress(queue.Empty):
            self.handle(events.get(timeout=timeout_s))
            while True:  # a stop request may follow the end of a job
                self.handle(events.get_nowait())

    def handle(self, event: Exit | Stop | Moved) -> None:
        if isinstance(event, Exit):
            self.end(self.sweep.jobs[event.child], event.code)
        elif isinstance(event, Moved):
            if event.child in self.running:
                outcome = Outcome(event.state, began_s=self.running[event.child])
                self.set(self.sweep.jobs[event.child], outcome, event.more)
        else:
            message = self.starter.stop(event.number, self.running)
            if self.stop is None:
                self.stop = event.number
                self.table.say(f"{signal.Signals(event.number).name}: {message}")

    def begin(self, job: Job) -> None:
        """Start a job, unless it is refused or finished."""
        # 1. no start: a refused job, or a finished run; with --json as the job itself would print
        document: dict[str, Any] | None = None
        if job.refusal is not None:
            self.set(job, Outcome("failed", code=2, error=job.refusal))
            document = error_document(job.refusal_kind, job.refusal)
        elif self.sweep.trains and job.config is not None and has_ended(job.run_dir, job.config):
            self.set(job, Outcome("skipped", code=0))
            step = job.config.run.num_steps
            document = {"status": "finished", "run_dir": str(job.run_dir), "step": step}
        if document is not None:
            if self.sweep.as_json:
                print(json.dumps(document), flush=True)
            return
        # 2. the start
        began_s = time.time()
        try:
            where = self.starter.begin(job)
        except OSError as error:
            why = f"{job.run_dir} cannot be written: {error.strerror}"
            self.set(job, Outcome("failed", code=2, error=why))
            return
        self.running[job.index] = began_s
        if where is not None:
            self.set(job, Outcome("running", began_s=began_s), self.where(job, where))

    def where(self, job: Job, where: str) -> str:
        """Return from which step a job goes on, and where it writes."""
        if not self.sweep.trains:
            return ""
        step = newest_checkpoint(job.run_dir)
        resumed = "" if step is None else f" on after step {step}"
        return resumed + (", " if where.startswith("output") else " ") + where

    def end(self, job: Job, code: int) -> None:
        began_s = self.running.pop(job.index)
        tail = self.starter.end(job.index)
        in_shell = shell_code(code)
        status = "finished" if code == 0 else "interrupted" if in_shell in LEFT[1:] else "failed"
        if status == "interrupted" and self.stop is None and self.starter.is_awaited:
            self.stop = in_shell - 128  # someone asked the job itself: the sweep is over too
        error = error_line(tail, code) if status == "failed" else None
        self.set(job, Outcome(status, in_shell, time.time() - began_s, error, began_s))

    def set(self, job: Job, outcome: Outcome, more: str = "") -> None:
        self.outcomes[job.index] = outcome
        self.table.show_outcome(job, outcome, more)
        if outcome.code is not None and self.sweep.study is not None:
            self.sweep.study.tell(job, outcome)


def error_line(tail: str, code: int) -> str:
    r"""Return the last error in the output of a process; `code` is Popen's.

    >>> error_line("ppctl: step 3: loss=nan.\nmore\n", 4), error_line("Oh\n", 1)
    ('step 3: loss=nan.', 'ended with exit code 1: Oh')
    """
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    own = [line.removeprefix("ppctl: ") for line in lines if line.startswith("ppctl: ")]
    if code < 0 or not lines:
        return how(code)
    return own[-1] if own else f"{how(code)}: {lines[-1]}"
