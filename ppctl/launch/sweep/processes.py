"""Jobs of a sweep as processes of this one: they end with it, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from ppctl.launch.supervise import Child, Events, Exit, drain, start
from ppctl.launch.sweep.jobs import LOG, Job, Sweep, run_dir_override

TAIL_BYTES = 16_384  # of what a job printed that are looked at for its last error


class Processes:
    """Starts jobs as processes and reports their ends as events; `close` kills those that are left.

    Processes, because JAX fixes the number of simulated devices when it starts.
    """

    takes_all = False
    is_awaited = True  # after a stop request, which reaches the jobs: they may be saving

    def __init__(self, sweep: Sweep, events: Events) -> None:
        self.sweep, self.events = sweep, events
        self.running: dict[int, tuple[subprocess.Popen[bytes], JobOutput]] = {}
        self.alive, self.held = os.pipe()  # nobody writes: jobs read its end when this process is gone

    def begin(self, job: Job) -> str:
        """Start a job; return where it writes. OSError where it cannot."""
        output = JobOutput(self.sweep, job)
        try:
            stdout, stderr = output.open()
            process = start(Child(job_command(job)), self.alive, stdout=stdout, stderr=stderr)
        except OSError:
            output.close()
            raise
        output.follow(process)
        self.running[job.index] = (process, output)
        threading.Thread(target=self._report, args=(job.index, process), daemon=True).start()
        return f"output in {job.run_dir / LOG}" if self.sweep.num_parallel > 1 else f"in {job.run_dir}"

    def commit(self) -> None:
        """Do nothing: a job runs as soon as it has begun."""

    def end(self, index: int) -> str:
        """Return the end of what a job printed, once it has ended."""
        return self.running.pop(index)[1].close()

    def stop(self, number: int, jobs: Collection[int]) -> str:
        """Pass a stop request on to these jobs; return what there is to say of them."""
        for index in jobs:
            self.running[index][0].send_signal(number)
        names = ", ".join(map(str, sorted(jobs)))
        jobs_text = "nothing" if not jobs else f"job{'s' if len(jobs) > 1 else ''} {names}"
        return f"no other job is started; waiting for {jobs_text}"

    def close(self) -> None:
        for process, _ in self.running.values():
            process.kill()
            process.wait()
        os.close(self.alive)
        os.close(self.held)

    def _report(self, index: int, process: subprocess.Popen[bytes]) -> None:
        self.events.put(Exit(index, process.wait()))


def job_command(job: Job) -> list[str]:
    """Return what the process of a job runs."""
    return [sys.executable, "-m", "ppctl.cli", *job.words, run_dir_override(job.run_dir)]


def read_tail(file: IO[bytes], first: int) -> str:
    """Return the last TAIL_BYTES of a log from its byte `first` on."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(first, size - TAIL_BYTES))
    return file.read().decode(errors="replace")


@dataclass
class JobOutput:
    """Where a job's output goes: to the terminal if it runs alone, else to a file in its run.dir.

    JSON goes to stdout either way, in whole lines. The end of stderr is kept.
    """

    sweep: Sweep
    job: Job
    log: IO[bytes] | None = None
    first: int = 0  # of the log's bytes that are of this start
    tail: bytearray = field(default_factory=bytearray)
    pumps: list[threading.Thread] = field(default_factory=list)

    def open(self) -> tuple[IO[bytes] | int | None, IO[bytes] | int]:
        """Return stdout and stderr for the process. OSError where the log cannot be written."""
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
        """Return the end of what the process printed, once it has ended."""
        drain(self.pumps)
        if self.log is None:
            return self.tail.decode(errors="replace")
        self.log.close()
        with open(self.log.name, "rb") as file:
            return read_tail(file, self.first)

    def _pump(self, pipe: IO[bytes], target: IO[bytes], *, is_kept: bool) -> None:
        thread = threading.Thread(target=self._forward, args=(pipe, target, is_kept), daemon=True)
        self.pumps.append(thread)
        thread.start()

    def _forward(self, pipe: IO[bytes], target: IO[bytes], is_kept: bool) -> None:
        """Hand on what comes as it comes; JSON in whole lines, for several jobs write there."""
        pieces = iter(lambda: os.read(pipe.fileno(), 65_536), b"") if is_kept else pipe
        with pipe:
            for piece in pieces:
                with suppress(OSError, ValueError):  # the reader has gone; the job need not
                    target.write(piece)
                    target.flush()
                if is_kept:
                    self.tail = (self.tail + piece)[-TAIL_BYTES:]
