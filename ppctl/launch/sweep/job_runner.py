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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

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
from ppctl.launch.sweep.sweep_jobs import LOG, Job, Outcome, Sweep, has_ended, run_dir_override
from ppctl.reports.terminal_output import show_lines

POLL_S = 0.1  # between looks for ended jobs
TAIL_BYTES = 16_384  # of a job's output, which are searched for its last error


def run_jobs(sweep: Sweep, console: Console) -> tuple[list[Outcome], int | None]:
    """Run the jobs; return the outcome of each, and the signal that ended the sweep early or None.

    Each stop request is passed on to every running job; no other job is started, and the running
    ones are waited for, as they may be saving.
    """
    runner = _Runner(sweep, console)
    with stop_requests() as events:
        try:
            runner.run(events)
        finally:
            runner.close()
    never = Outcome("not started")
    outcomes = [never if each.status == "waiting" else each for each in runner.outcomes]
    return outcomes, runner.stop


@dataclass
class Running:
    """The process of a job and its output: a file in its run.dir, or the terminal."""

    process: subprocess.Popen[bytes]
    began_s: float  # as time.time()
    log: Path | None = None  # None: the job runs alone and has the terminal
    first: int = 0  # byte of the log where this start begins
    tail: bytearray = field(default_factory=bytearray)  # end of stderr on the terminal
    pumps: list[threading.Thread] = field(default_factory=list)


class _Runner:
    """Starts jobs as processes and notes their ends; `close` kills those that are left.

    Processes, because JAX fixes the number of simulated devices when it starts.
    """

    def __init__(self, sweep: Sweep, console: Console) -> None:
        self.sweep, self.console = sweep, console
        self.outcomes = [Outcome("waiting") for _ in sweep.jobs]
        self.waiting, self.running = deque(sweep.jobs), dict[int, Running]()
        self.stop: int | None = None
        self.errors: dict[str | None, int] = {}  # the first job with each
        self.alive, self.held = os.pipe()  # jobs read the end of file when this process is gone

    def run(self, events: Events) -> None:
        while True:
            while self.stop is None and (job := self.next()) is not None:
                self.begin(job)
                self.handle_events(events, 0)
            if not self.running:
                return
            self.handle_events(events, POLL_S)

    def close(self) -> None:
        for running in self.running.values():
            running.process.kill()
            running.process.wait()
        os.close(self.alive)
        os.close(self.held)

    def next(self) -> Job | None:
        """Return the next job to begin; None where there is no room, or no job waits now."""
        if len(self.running) >= self.sweep.num_parallel:
            return None
        if self.waiting:
            return self.waiting.popleft()
        job = self.sweep.study.ask() if self.sweep.study is not None else None
        if job is not None:
            self.sweep.jobs.append(job)
            self.outcomes.append(Outcome("waiting"))
        return job

    def handle_events(self, events: Events, wait_s: float) -> None:
        """Note the jobs that have ended, and pass on a stop request that comes within wait_s."""
        for index, running in list(self.running.items()):
            if (code := running.process.poll()) is not None:
                del self.running[index]
                self.end(self.sweep.jobs[index], running, code)
                wait_s = 0
        try:
            event = events.get(timeout=wait_s)
        except queue.Empty:
            return
        if isinstance(event, Stop):
            for running in self.running.values():
                running.process.send_signal(event.number)
            if self.stop is None:
                self.stop = event.number
                names = ", ".join(map(str, sorted(self.running)))
                jobs = f"job{'s' if len(self.running) > 1 else ''} {names}"
                waiting = f"waiting for {jobs if names else 'nothing'}"
                name = signal.Signals(event.number).name
                self.say(f"{name}: no other job is started; {waiting}")

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
        try:
            running = self.running[job.index] = self.started(job)
        except OSError as error:
            why = f"{job.run_dir} cannot be written: {error.strerror}"
            self.set(job, Outcome("failed", code=2, error=why))
            return
        more = ""
        if self.sweep.trains:
            step = newest_checkpoint(job.run_dir)
            more = "" if step is None else f" on after step {step}"
            more += f" in {job.run_dir}" if running.log is None else f", output in {running.log}"
        self.set(job, Outcome("running", began_s=running.began_s), more)

    def started(self, job: Job) -> Running:
        """Return the process of a job, with its output forwarded. OSError: it cannot be written."""
        pipe, command, began_s = subprocess.PIPE, Child(job_command(job)), time.time()
        if self.sweep.num_parallel == 1:
            running = Running(start(command, self.alive, stdout=None, stderr=pipe), began_s)
        else:
            job.run_dir.mkdir(parents=True, exist_ok=True)
            path = job.run_dir / LOG
            with path.open("ab") as log:
                stdout = pipe if self.sweep.as_json else log
                first = log.tell()
                process = start(command, self.alive, stdout=stdout, stderr=log)
                running = Running(process, began_s, path, first)
        process = running.process
        for stream, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if stream is not None:
                running.pumps.append(in_thread(_forward, running, stream, target.buffer))
        return running

    def end(self, job: Job, running: Running, code: int) -> None:
        """Note the end of a job with Popen's exit code."""
        in_shell = shell_code(code)
        status = "finished" if code == 0 else "interrupted" if in_shell in LEFT[1:] else "failed"
        if status == "interrupted" and self.stop is None:
            self.stop = in_shell - 128  # someone asked the job itself: the sweep is over too
        tail = _tail(running)
        error = error_line(tail, code) if status == "failed" else None
        seconds = time.time() - running.began_s
        self.set(job, Outcome(status, in_shell, seconds, error, running.began_s))

    def set(self, job: Job, outcome: Outcome, more: str = "") -> None:
        self.outcomes[job.index] = outcome
        self.show(job, outcome, more)
        if outcome.code is not None and self.sweep.study is not None:
            self.sweep.study.tell(job, outcome)

    def show(self, job: Job, outcome: Outcome, more: str) -> None:
        """Print a line for the new state of a job; equal errors are printed once."""
        text = outcome.status + more
        if outcome.status == "skipped":
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


def job_command(job: Job) -> list[str]:
    """Return the command of the process of a job."""
    return [sys.executable, "-m", "ppctl.cli", *job.words, run_dir_override(job.run_dir)]


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


def _tail(running: Running) -> str:
    """Return the end of the output of a job that has ended."""
    drain(running.pumps)
    if running.log is None:
        return running.tail.decode(errors="replace")
    with running.log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(running.first, size - TAIL_BYTES))
        return file.read().decode(errors="replace")


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
