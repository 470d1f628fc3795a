"""Runs the jobs of a sweep, a few side by side; one that fails stops no other."""

from __future__ import annotations

import json
import queue
import signal
import time
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from ppctl.launch.local import newest_checkpoint
from ppctl.launch.supervise import LEFT, Events, Exit, Stop, how, shell_code, stop_requests
from ppctl.launch.sweep.finished import has_ended
from ppctl.launch.sweep.jobs import Job, Moved, Outcome, Said, Sweep
from ppctl.launch.sweep.live_table import REFRESH_S, Board
from ppctl.launch.sweep.processes import Processes


class Starter(Protocol):
    """Where jobs run. Their ends are events."""

    takes_all: bool  # it lines jobs up itself
    is_awaited: bool  # after a stop request its jobs are waited for

    def begin(self, job: Job) -> str | None: ...
    def commit(self) -> None: ...
    def end(self, index: int) -> str: ...
    def stop(self, number: int, jobs: Collection[int]) -> str: ...
    def close(self) -> None: ...


def run_jobs(sweep: Sweep, board: Board) -> tuple[list[Outcome], int | None]:
    """How each job ended, and the signal that ended the sweep early or None.

    A stop request reaches every job that runs, each time it comes; then no job is started, and those that run are
    waited for: they may be saving. Jobs that were submitted go on.
    """
    with stop_requests() as events:
        starter = _starter(sweep, events)
        try:
            runner = _Runner(sweep, board, starter, [Outcome("waiting") for _ in sweep.jobs])
            stop = runner.run(events)
        finally:
            starter.close()
    never = Outcome("not started")
    return [never if outcome.status == "waiting" else outcome for outcome in runner.outcomes], stop


def _starter(sweep: Sweep, events: Events) -> Starter:
    if sweep.submit is None:
        return Processes(sweep, events)
    from ppctl.launch.sweep.submitted import Submitted  # needs submitit

    return Submitted(sweep, events)


@dataclass
class _Runner:
    sweep: Sweep
    board: Board
    starter: Starter
    outcomes: list[Outcome]
    waiting: deque[Job] = field(default_factory=deque)
    running: dict[int, float] = field(default_factory=dict)  # of a job: when it began, as time.time()
    stop: int | None = None

    def run(self, events: Events) -> int | None:
        self.waiting.extend(self.sweep.jobs)
        while True:
            while self.stop is None and self.has_room() and (job := self.next()) is not None:
                self.begin(job)
                self.take(events, wait=False)
            self.starter.commit()
            if not self.running or (self.stop is not None and not self.starter.is_awaited):
                return self.stop
            self.board.show(self.outcomes)
            self.take(events, wait=True)

    def has_room(self) -> bool:
        return self.starter.takes_all or len(self.running) < self.sweep.num_parallel

    def next(self) -> Job | None:
        """The next job to begin, or None where there is none now."""
        if self.waiting:
            return self.waiting.popleft()
        job = self.sweep.study.ask() if self.sweep.study is not None else None
        if job is not None:
            self.sweep.jobs.append(job)
            self.outcomes.append(Outcome("waiting"))
        return job

    def take(self, events: Events, *, wait: bool) -> None:
        """Heeds all events there are, or the first one to come."""
        with suppress(queue.Empty):
            self.heed(events.get(timeout=REFRESH_S if self.board.is_live else None) if wait else events.get_nowait())
            while True:  # a stop request may stand behind the end of a job
                self.heed(events.get_nowait())

    def heed(self, event: Exit | Stop | Moved | Said) -> None:
        if isinstance(event, Exit):
            self.end(self.sweep.jobs[event.child], event.code)
        elif isinstance(event, Said):
            self.board.say(event.text)
        elif isinstance(event, Moved):
            if event.child in self.running:
                outcome = Outcome(event.state, began_s=self.running[event.child])
                self.set(self.sweep.jobs[event.child], outcome, event.more)
        else:
            said = self.starter.stop(event.number, self.running)
            if self.stop is None:
                self.stop = event.number
                self.board.say(f"{signal.Signals(event.number).name}: {said}")

    def begin(self, job: Job) -> None:
        """Starts a job, or says why there is nothing to start."""
        if job.refusal is not None:
            self.set(job, Outcome("failed", code=2, error=job.refusal))
            return
        if self.sweep.trains and job.config is not None and has_ended(job.run_dir, job.config):
            self.set(job, Outcome("skipped", code=0))
            if self.sweep.as_json:  # what the run itself would say
                told = {"status": "finished", "run_dir": str(job.run_dir), "step": job.config.run.num_steps}
                print(json.dumps(told), flush=True)
            return
        began_s = time.time()
        try:
            where = self.starter.begin(job)
        except OSError as error:
            self.set(job, Outcome("failed", code=2, error=f"{job.run_dir} cannot be written: {error.strerror}"))
            return
        self.running[job.index] = began_s
        if where is not None:
            self.set(job, Outcome("running", began_s=began_s), self.where(job, where))

    def where(self, job: Job, where: str) -> str:
        """From which step a job goes on, and where it writes."""
        if not self.sweep.trains:
            return ""
        step = newest_checkpoint(job.run_dir)
        told = "" if step is None else f" on after step {step}"
        return told + (", " if where.startswith("output") else " ") + where

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
        self.board.tell(job, outcome, more)
        if outcome.code is not None and self.sweep.study is not None:
            self.sweep.study.tell(job, outcome)


def error_line(tail: str, code: int) -> str:
    """The last error in what a process printed; `code` is Popen's.

    >>> error_line("ppctl: step 3: loss=nan.\\nmore\\n", 4), error_line("Oh\\n", 1), error_line("ppctl: x\\n", -9)
    ('step 3: loss=nan.', 'ended with exit code 1: Oh', 'was killed by SIGKILL')
    """
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    own = [line.removeprefix("ppctl: ") for line in lines if line.startswith("ppctl: ")]
    if code < 0 or not lines:
        return how(code)
    return own[-1] if own else f"{how(code)}: {lines[-1]}"
