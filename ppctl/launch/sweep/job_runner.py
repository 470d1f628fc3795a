"""Runs the jobs of a sweep, a few side by side; one that fails stops no other."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console

from ppctl.errors import error_document
from ppctl.launch.local_processes import newest_checkpoint
from ppctl.launch.supervisor import (
    LEFT,
    Child,
    Events,
    Stop,
    drain,
    how,
    in_thread,
    shell_code,
    start,
    stop_requests,
)
from ppctl.launch.sweep.sweep_jobs import (
    LOG,
    TAIL_BYTES,
    Change,
    Job,
    Outcome,
    Sweep,
    has_ended,
    job_command,
    read_tail,
)
from ppctl.reports.terminal_output import show_lines

if TYPE_CHECKING:
    from ppctl.launch.sweep.submitit_jobs import SubmittedJobs  # an extra


def run_jobs(sweep: Sweep, console: Console) -> tuple[list[Outcome], int | None]:
    """Run the jobs; return the outcome of each, and the signal that ended the sweep early or None.

    Each stop request is passed on to every running job; no other job is started, and the running
    ones are waited for, as they may be saving. Submitted jobs go on.
    """
    with stop_requests() as events:
        starter = _starter(sweep)
        try:
            runner = _Runner(sweep, console, starter, [Outcome("waiting") for _ in sweep.jobs])
            runner.run(events)
        finally:
            starter.close()
    never = Outcome("not started")
    outcomes = [never if each.status == "waiting" else each for each in runner.outcomes]
    return outcomes, runner.stop


def _starter(sweep: Sweep) -> Processes | SubmittedJobs:
    if not sweep.is_submitted:
        return Processes(sweep)
    from ppctl.launch.sweep.submitit_jobs import SubmittedJobs

    return SubmittedJobs(sweep)


@dataclass
class _Runner:
    sweep: Sweep
    console: Console
    starter: Processes | SubmittedJobs
    outcomes: list[Outcome]
    waiting: deque[Job] = field(default_factory=deque)
    running: dict[int, float] = field(default_factory=dict)  # start of a job, as time.time()
    stop: int | None = None
    errors: dict[str | None, int] = field(default_factory=dict)  # the first job with each

    def run(self, events: Events) -> None:
        self.waiting.extend(self.sweep.jobs)
        while True:
            while self.stop is None and self.has_room() and (job := self.next()) is not None:
                self.begin(job)
                self.handle_events(events, 0)
            self.starter.commit()
            if not self.running or (self.stop is not None and not self.starter.is_awaited):
                return
            while not self.handle_events(events, self.starter.poll_s):
                pass

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

    def handle_events(self, events: Events, wait_s: float) -> bool:
        """Handle a stop request, if one comes within wait_s, and all changes; return if any."""
        changes = self.starter.changes()
        try:
            event = events.get(timeout=0 if changes else wait_s)
        except queue.Empty:
            event = None
        for index, state, more, code in changes:
            job = self.sweep.jobs[index]
            if code is None:
                self.set(job, Outcome(state, began_s=self.running[index]), more)
            else:
                self.end(job, code, more)
        if isinstance(event, Stop):
            message = self.starter.stop(event.number, self.running)
            if self.stop is None:
                self.stop = event.number
                self.say(f"{signal.Signals(event.number).name}: {message}")
        return event is not None or bool(changes)

    def begin(self, job: Job) -> None:
        """Start a job, unless it is refused or finished."""
        # 1. no start: a refused job, or a finished run; with --json as the job itself would print
        document: dict[str, Any] | None = None
        if job.refusal is not None:
            self.set(job, Outcome("failed", code=2, error=job.refusal))
            document = error_document(job.refusal_kind, job.refusal)
        elif (
            self.sweep.trains and job.config is not None and has_ended(job.run_dir, job.config.run)
        ):
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
            self.starter.begin(job)
        except OSError as error:
            why = f"{job.run_dir} cannot be written: {error.strerror}"
            self.set(job, Outcome("failed", code=2, error=why))
            return
        self.running[job.index] = began_s

    def end(self, job: Job, code: int, tail: str) -> None:
        began_s = self.running.pop(job.index)
        in_shell = shell_code(code)
        status = "finished" if code == 0 else "interrupted" if in_shell in LEFT[1:] else "failed"
        if status == "interrupted" and self.stop is None and self.starter.is_awaited:
            self.stop = in_shell - 128  # someone asked the job itself: the sweep is over too
        error = error_line(tail, code) if status == "failed" else None
        self.set(job, Outcome(status, in_shell, time.time() - began_s, error, began_s))

    def set(self, job: Job, outcome: Outcome, more: str = "") -> None:
        self.outcomes[job.index] = outcome
        self.show(job, outcome, more)
        if outcome.code is not None and self.sweep.study is not None:
            self.sweep.study.tell(job, outcome)

    def show(self, job: Job, outcome: Outcome, more: str) -> None:
        """Print a line for the new state of a job; equal errors are printed once."""
        text = outcome.status
        if outcome.status in ("running", "queued"):
            text += more
        elif outcome.status == "skipped":
            text = f"finished before, skipped ({job.run_dir})"
        elif outcome.seconds is not None:
            text += f" after {outcome.seconds:.1f} s"
        if outcome.status == "failed":
            where = "refused" if outcome.began_s is None else text
            first = self.errors.setdefault(outcome.error, job.index)
            text = f"{where}: {outcome.error}" if first == job.index else f"{where}, as job {first}"
        self.say(f"job {job.index}: {job.name}: {text}")

    def say(self, text: str) -> None:
        show_lines(self.console, f"ppctl: {text}")


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


# --- processes of the sweep ----------------------------------------------------------------------


@dataclass
class Running:
    """The process of a job and its output: a file in its run.dir, or the terminal."""

    process: subprocess.Popen[bytes]
    log: Path | None = None  # None: the job runs alone and has the terminal
    first: int = 0  # byte of the log where this start begins
    tail: bytearray = field(default_factory=bytearray)  # end of stderr on the terminal
    pumps: list[threading.Thread] = field(default_factory=list)


class Processes:
    """Starts jobs as processes and reports their ends; `close` kills those that are left.

    Processes, because JAX fixes the number of simulated devices when it starts.
    """

    takes_all = False  # whether it queues jobs itself
    is_awaited = True  # after a stop request, which reaches the jobs: they may be saving
    poll_s = 0.1  # between looks for ended jobs

    def __init__(self, sweep: Sweep) -> None:
        self.sweep, self.begun = sweep, list[Change]()
        self.running: dict[int, Running] = {}
        self.alive, self.held = os.pipe()  # jobs read the end of file when this process is gone

    def begin(self, job: Job) -> None:
        """Start a job. OSError where its output cannot be written."""
        pipe, command = subprocess.PIPE, Child(job_command(job))
        if self.sweep.num_parallel == 1:
            running = Running(start(command, self.alive, stdout=None, stderr=pipe))
        else:
            job.run_dir.mkdir(parents=True, exist_ok=True)
            path = job.run_dir / LOG
            with path.open("ab") as log:
                stdout = pipe if self.sweep.as_json else log
                first = log.tell()
                process = start(command, self.alive, stdout=stdout, stderr=log)
                running = Running(process, path, first)
        self.running[job.index], process = running, running.process
        for stream, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if stream is not None:
                running.pumps.append(in_thread(_forward, running, stream, target.buffer))
        more = ""
        if self.sweep.trains:
            step = newest_checkpoint(job.run_dir)
            more = "" if step is None else f" on after step {step}"
            more += f" in {job.run_dir}" if running.log is None else f", output in {running.log}"
        self.begun.append(Change(job.index, "running", more))

    def commit(self) -> None:
        """Do nothing: a job runs as soon as it has begun."""

    def changes(self) -> list[Change]:
        """Return the changes of jobs since the last call."""
        changes, self.begun = self.begun, []
        for index, running in list(self.running.items()):
            if (code := running.process.poll()) is not None:
                del self.running[index]
                changes.append(Change(index, "ended", _tail(running), code))
        return changes

    def stop(self, number: int, jobs: Collection[int]) -> str:
        """Pass a stop request, signal `number`, on to these jobs; return a message about them."""
        for index in jobs:
            self.running[index].process.send_signal(number)
        names = ", ".join(map(str, sorted(jobs)))
        jobs_text = "nothing" if not jobs else f"job{'s' if len(jobs) > 1 else ''} {names}"
        return f"no other job is started; waiting for {jobs_text}"

    def close(self) -> None:
        for running in self.running.values():
            running.process.kill()
            running.process.wait()
        os.close(self.alive)
        os.close(self.held)


def _tail(running: Running) -> str:
    """Return the end of the output of a job that has ended."""
    drain(running.pumps)
    if running.log is None:
        return running.tail.decode(errors="replace")
    with running.log.open("rb") as file:
        return read_tail(file, running.first)


def _forward(running: Running, pipe: IO[bytes], target: IO[bytes]) -> None:
    """Forward stderr in pieces, keeping its end; stdout, JSON of several jobs, in whole lines."""
    is_stderr = pipe is running.process.stderr
    pieces = iter(lambda: os.read(pipe.fileno(), 65_536), b"") if is_stderr else pipe
    with pipe:
        for piece in pieces:
            with suppress(OSError, ValueError):  # the reader has gone; the job need not
                target.write(piece)
                target.flush()
            if is_stderr:
                running.tail[:] = (running.tail + piece)[-TAIL_BYTES:]
