"""Runs the jobs of a sweep, a few side by side; each is a process with its own run.dir, and a failing one stops none.

Processes, because JAX fixes the number of simulated devices when it starts.
"""

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
from typing import IO

from ppctl.launch import newest_checkpoint
from ppctl.supervise import LEFT, Child, Events, Exit, Stop, how, shell_code, start, stop_requests
from ppctl.sweep.board import REFRESH_S, Board
from ppctl.sweep.ended import has_ended
from ppctl.sweep.jobs import LOG, Job, Outcome, Sweep, run_dir_override

TAIL_BYTES = 16_384  # of what a job printed that are looked at for its last error
DRAIN_S = 2.0  # for output that is still in the pipe of an ended process


def run_jobs(sweep: Sweep, board: Board) -> tuple[list[Outcome], int | None]:
    """How each job ended, and the signal that ended the sweep early or None.

    A stop request reaches every job that runs, each time it comes; then no job is started, and those that run are
    waited for: they may be saving.
    """
    runner = _Runner(sweep, board, [Outcome("waiting") for _ in sweep.jobs])
    with stop_requests() as events:
        stop = runner.run(events)
    never = Outcome("not started")
    return [never if outcome.status == "waiting" else outcome for outcome in runner.outcomes], stop


@dataclass
class _Started:
    process: subprocess.Popen[bytes]
    output: _Output
    began_s: float


@dataclass
class _Runner:
    sweep: Sweep
    board: Board
    outcomes: list[Outcome]
    running: dict[int, _Started] = field(default_factory=dict)
    stop: int | None = None

    def run(self, events: Events) -> int | None:
        waiting = deque(self.sweep.jobs)
        alive, held = os.pipe()  # nobody writes: jobs read its end when this process is gone
        try:
            while True:
                while waiting and self.stop is None and len(self.running) < self.sweep.num_parallel:
                    self.begin(waiting.popleft(), alive, events)
                    self.take(events, wait=False)
                if not self.running:
                    return self.stop
                self.board.show(self.outcomes)
                self.take(events, wait=True)
        finally:
            for started in self.running.values():
                started.process.kill()
                started.process.wait()
            os.close(alive)
            os.close(held)

    def take(self, events: Events, *, wait: bool) -> None:
        """Heeds all events there are, or the first one to come."""
        with suppress(queue.Empty):
            self.heed(events.get(timeout=REFRESH_S if self.board.is_live else None) if wait else events.get_nowait())
            while True:  # a stop request may stand behind the end of a job
                self.heed(events.get_nowait())

    def heed(self, event: Exit | Stop) -> None:
        if isinstance(event, Exit):
            self.end(self.sweep.jobs[event.child], event.code)
            return
        name = signal.Signals(event.number).name
        if self.stop is None:
            self.stop = event.number
            self.board.say(f"{name}: no other job is started; waiting for {_jobs(self.running)}")
        for started in self.running.values():
            started.process.send_signal(event.number)

    def begin(self, job: Job, alive: int, events: Events) -> None:
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
        output = _Output(self.sweep, job)
        began_s = time.time()
        try:
            stdout, stderr = output.open()
            process = start(Child(command_of(job)), alive, stdout=stdout, stderr=stderr)
        except OSError as error:
            output.close()
            self.set(job, Outcome("failed", code=2, error=f"{job.run_dir} cannot be written: {error.strerror}"))
            return
        output.follow(process)
        self.running[job.index] = _Started(process, output, began_s)
        threading.Thread(target=_report, args=(job.index, process, events), daemon=True).start()
        self.set(job, Outcome("running", began_s=began_s), self.where(job))

    def where(self, job: Job) -> str:
        """From which step a job goes on, and where it writes."""
        if not self.sweep.trains:
            return ""
        step = newest_checkpoint(job.run_dir)
        told = "" if step is None else f" on after step {step}"
        return told + (f", output in {job.run_dir / LOG}" if self.sweep.num_parallel > 1 else f" in {job.run_dir}")

    def end(self, job: Job, code: int) -> None:
        started = self.running.pop(job.index)
        tail = started.output.close()
        seconds, in_shell = time.time() - started.began_s, shell_code(code)
        status = "finished" if code == 0 else "interrupted" if in_shell in LEFT[1:] else "failed"
        if status == "interrupted" and self.stop is None:  # someone asked the job itself: the sweep is over too
            self.stop = in_shell - 128
        error = error_line(tail, code) if status == "failed" else None
        self.set(job, Outcome(status, in_shell, seconds, error, started.began_s))

    def set(self, job: Job, outcome: Outcome, more: str = "") -> None:
        self.outcomes[job.index] = outcome
        self.board.tell(job, outcome, more)


def command_of(job: Job) -> list[str]:
    """What the process of a job runs."""
    return [sys.executable, "-m", "ppctl.cli", *job.words, run_dir_override(job.run_dir)]


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


@dataclass
class _Output:
    """Where a job's output goes: to the terminal if it runs alone, else to a file in its run.dir.

    JSON goes to stdout either way, in whole lines. What stderr said last is kept.
    """

    sweep: Sweep
    job: Job
    log: IO[bytes] | None = None
    first: int = 0  # of the log's bytes that are of this start
    tail: bytearray = field(default_factory=bytearray)
    pumps: list[threading.Thread] = field(default_factory=list)

    def open(self) -> tuple[IO[bytes] | int | None, IO[bytes] | int]:
        """stdout and stderr for the process. OSError where the log cannot be written."""
        if self.sweep.num_parallel == 1:
            return None, subprocess.PIPE
        self.job.run_dir.mkdir(parents=True, exist_ok=True)
        self.log = (self.job.run_dir / LOG).open("ab")
        self.first = self.log.tell()
        return (subprocess.PIPE if self.sweep.as_json else self.log), self.log

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdout is not None:
            self._pump(process.stdout, sys.stdout.buffer, is_kept=False)
        if process.stderr is not None:
            self._pump(process.stderr, sys.stderr.buffer, is_kept=True)

    def close(self) -> str:
        """The end of what the process said, once it has ended."""
        until_s = time.monotonic() + DRAIN_S
        for pump in self.pumps:
            pump.join(max(0.0, until_s - time.monotonic()))
        if self.log is None:
            return self.tail.decode(errors="replace")
        self.log.close()
        with Path(self.log.name).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self.first, size - TAIL_BYTES))
            return file.read().decode(errors="replace")

    def _pump(self, pipe: IO[bytes], target: IO[bytes], *, is_kept: bool) -> None:
        thread = threading.Thread(target=self._forward, args=(pipe, target, is_kept), daemon=True)
        self.pumps.append(thread)
        thread.start()

    def _forward(self, pipe: IO[bytes], target: IO[bytes], is_kept: bool) -> None:
        """Hands on what comes as it comes; JSON in whole lines, for several jobs write there."""
        pieces = iter(lambda: os.read(pipe.fileno(), 65_536), b"") if is_kept else pipe
        with pipe:
            for piece in pieces:
                with suppress(OSError, ValueError):  # the reader has gone; the job need not
                    target.write(piece)
                    target.flush()
                if is_kept:
                    self.tail = (self.tail + piece)[-TAIL_BYTES:]


def _report(index: int, process: subprocess.Popen[bytes], events: Events) -> None:
    events.put(Exit(index, process.wait()))


def _jobs(running: dict[int, _Started]) -> str:
    """
    >>> _jobs({})
    'nothing'
    """
    numbers = ", ".join(map(str, sorted(running)))
    return "nothing" if not running else f"job{'s' if len(running) > 1 else ''} {numbers}"
