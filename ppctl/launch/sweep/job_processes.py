"""Jobs of a sweep as processes of this one: they end with it, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ppctl.launch.supervisor import Child, Events, Exit, drain, in_thread, start
from ppctl.launch.sweep.sweep_jobs import LOG, Job, Sweep, run_dir_override

TAIL_BYTES = 16_384  # of a job's output, which are searched for its last error


@dataclass
class Running:
    """The process of a job and its output: a file in its run.dir, or the terminal."""

    process: subprocess.Popen[bytes]
    log: Path | None = None  # None: the job runs alone and has the terminal
    first: int = 0  # byte of the log where this start begins
    tail: bytearray = field(default_factory=bytearray)  # end of stderr on the terminal
    pumps: list[threading.Thread] = field(default_factory=list)


class Processes:
    """Starts jobs as processes and reports their ends as events; `close` kills those that are left.

    Processes, because JAX fixes the number of simulated devices when it starts.
    """

    takes_all = False  # whether it queues jobs itself
    is_awaited = True  # after a stop request, which reaches the jobs: they may be saving

    def __init__(self, sweep: Sweep, events: Events) -> None:
        self.sweep, self.events = sweep, events
        self.running: dict[int, Running] = {}
        self.alive, self.held = os.pipe()  # jobs read the end of file when this process is gone

    def begin(self, job: Job) -> str:
        """Start a job; return the place of its output. OSError where it cannot be written."""
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
        in_thread(self._report, job.index, process)
        for stream, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if stream is not None:
                running.pumps.append(in_thread(_forward, running, stream, target.buffer))
        return f"in {job.run_dir}" if running.log is None else f"output in {running.log}"

    def commit(self) -> None:
        """Do nothing: a job runs as soon as it has begun."""

    def end(self, index: int) -> str:
        """Return the end of the output of a job that has ended."""
        running = self.running.pop(index)
        drain(running.pumps)
        if running.log is None:
            return running.tail.decode(errors="replace")
        with running.log.open("rb") as file:
            return read_tail(file, running.first)

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

    def _report(self, index: int, process: subprocess.Popen[bytes]) -> None:
        self.events.put(Exit(index, process.wait()))


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


def job_command(job: Job) -> list[str]:
    """Return the command of the process of a job."""
    return [sys.executable, "-m", "ppctl.cli", *job.words, run_dir_override(job.run_dir)]


def read_tail(file: IO[bytes], first: int) -> str:
    """Return the last TAIL_BYTES of a log from its byte `first` on."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(first, size - TAIL_BYTES))
    return file.read().decode(errors="replace")
