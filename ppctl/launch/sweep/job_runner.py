"""Runs the jobs of a sweep, a few side by side; one that fails stops no other."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ppctl.errors import ConfigError, error_document
from ppctl.launch.local_processes import ERROR_FILE, left_error, newest_checkpoint
from ppctl.launch.supervisor import LEFT, Child, Events, Stop, how, shell_code, start, stop_requests
from ppctl.launch.sweep.sweep_jobs import LOG, Change, Job, Outcome, Sweep, has_ended, job_command
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
            runner = _Runner(sweep, console, starter, [Outcome("not started") for _ in sweep.jobs])
            runner.run(events)
        finally:
            starter.close()
    return runner.outcomes, runner.stop


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

    def run(self, events: Events) -> None:
        self.waiting.extend(self.sweep.jobs)
        while True:
            while self.stop is None and self.has_room() and (job := self.next()) is not None:
                self.begin(job)
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
            self.outcomes.append(Outcome("not started"))
        return job

    def handle_events(self, events: Events, wait_s: float) -> bool:
        """Handle a stop request, if one comes within wait_s, and all changes; return if any."""
        changes = self.starter.changes()
        try:
            event = events.get(timeout=0 if changes else wait_s)
        except queue.Empty:
            event = None
        for index, state, more, code, error in changes:
            job = self.sweep.jobs[index]
            if code is None:
                self.set(job, Outcome(state, began_s=self.running[index]), f"{state}{more}")
            else:
                self.end(job, code, error)
        if isinstance(event, Stop):
            message = self.starter.stop(event.number, self.running)
            if self.stop is None:
                self.stop = event.number
                self.say(f"{signal.Signals(event.number).name}: {message}")
        return event is not None or bool(changes)

    def begin(self, job: Job) -> None:
        """Start a job, unless it is refused or finished: then print what the job itself would."""
        run = None if job.config is None or not self.sweep.trains else job.config.run
        if job.refusal is not None:
            self.refuse(job, job.refusal_kind, job.refusal)
        elif run is not None and has_ended(job.run_dir, run):
            self.set(job, Outcome("skipped", 0), f"finished before, skipped ({job.run_dir})")
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
        self.set(job, Outcome("failed", ConfigError.exit_code, error=why), f"refused: {why}")
        self.emit(error_document(kind, why))

    def end(self, job: Job, code: int, error: dict[str, Any] | None) -> None:
        """Note the end of a job with Popen's exit code and the error that it left."""
        began_s = self.running.pop(job.index)
        in_shell, seconds = shell_code(code), time.time() - began_s
        status = "finished" if code == 0 else "interrupted" if in_shell in LEFT[1:] else "failed"
        if status == "interrupted" and self.stop is None and self.starter.is_awaited:
            self.stop = in_shell - 128  # someone asked the job itself: the sweep is over too
        text, why = f"{status} after {seconds:.1f} s", None
        if status == "failed":
            why = how(code) if error is None else error["error"]["message"]
            text += f": {why}"
        self.set(job, Outcome(status, in_shell, seconds, why, began_s), text)
        if error is not None:
            self.emit(error)

    def set(self, job: Job, outcome: Outcome, text: str) -> None:
        """Note and print the new state of a job, and tell the search of an end."""
        self.outcomes[job.index] = outcome
        self.say(f"job {job.index}: {job.name}: {text}")
        if outcome.code is not None and self.sweep.study is not None:
            self.sweep.study.tell(job, outcome)

    def say(self, text: str) -> None:
        show_lines(self.console, f"ppctl: {text}")

    def emit(self, document: dict[str, Any]) -> None:
        if self.sweep.as_json:
            print(json.dumps(document), flush=True)


# --- processes of the sweep ----------------------------------------------------------------------


class Processes:
    """Starts jobs as processes and reports their ends; `close` kills those that are left.

    Processes, because JAX fixes the number of simulated devices when it starts. A job that runs
    alone has the terminal; jobs side by side write to a file in their run.dir.
    """

    takes_all = False  # whether it queues jobs itself
    is_awaited = True  # after a stop request, which reaches the jobs: they may be saving
    poll_s = 0.1  # between looks for ended jobs

    def __init__(self, sweep: Sweep) -> None:
        self.sweep, self.begun = sweep, list[Change]()
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.alive, self.held = os.pipe()  # jobs read the end of file when this process is gone
        self.folder = tempfile.TemporaryDirectory()  # errors, and with --json documents

    def begin(self, job: Job) -> None:
        """Start a job. OSError where its output cannot be written."""
        child = Child(job_command(job), {ERROR_FILE: str(self._file("error", job.index))})
        is_alone, where = self.sweep.num_parallel == 1, job.run_dir
        if is_alone:
            process = start(child, self.alive, stdout=None, stderr=None)
        else:
            where.mkdir(parents=True, exist_ok=True)
            with (where / LOG).open("ab") as log, self._file("out", job.index).open("wb") as out:
                stdout = out if self.sweep.as_json else log
                process = start(child, self.alive, stdout=stdout, stderr=log)
        self.running[job.index] = process
        more = ""
        if self.sweep.trains:
            step = newest_checkpoint(where)
            more = "" if step is None else f" on after step {step}"
            more += f" in {where}" if is_alone else f", output in {where / LOG}"
        self.begun.append(Change(job.index, "running", more))

    def changes(self) -> list[Change]:
        """Return the changes of jobs since the last call."""
        changes, self.begun = self.begun, []
        for index, process in list(self.running.items()):
            if (code := process.poll()) is not None:
                del self.running[index]
                error = left_error(self._file("error", index))
                if (out := self._file("out", index)).exists():
                    print(out.read_text(errors="replace"), end="", flush=True)
                changes.append(Change(index, "ended", code=code, error=error))
        return changes

    def stop(self, number: int, jobs: Collection[int]) -> str:
        """Pass a stop request, signal `number`, on to these jobs; return a message about them."""
        for index in jobs:
            self.running[index].send_signal(number)
        names = ", ".join(map(str, sorted(jobs)))
        jobs_text = "nothing" if not jobs else f"job{'s' if len(jobs) > 1 else ''} {names}"
        return f"no other job is started; waiting for {jobs_text}"

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
        os.close(self.alive)
        os.close(self.held)
        self.folder.cleanup()

    def _file(self, name: str, job: int) -> Path:
        return Path(self.folder.name, f"{name}-{job}")
