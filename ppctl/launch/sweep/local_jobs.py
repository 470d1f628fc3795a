"""Jobs of a sweep as local processes, which end with the sweep.

Each job is a process, because JAX fixes the number of simulated devices when it starts.
"""

import os
import signal
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path

from ppctl.launch.local_processes import ERROR_FILE, left_error, newest_checkpoint
from ppctl.launch.supervisor import Child, start
from ppctl.launch.sweep.sweep_jobs import LOG, Change, Job, Sweep, job_command


class LocalJobs:
    """Starts jobs as processes and reports when they end; `close` kills the remaining ones.

    If jobs run one at a time, they write to the terminal; if side by side, to a file in their
    run.dir.
    """

    takes_all = False  # the sweep limits the number of running jobs
    is_awaited = True  # wait after a stop request, which reaches the jobs: they may be saving
    poll_s = 0.1  # seconds between checks for ended jobs

    def __init__(self, sweep: Sweep) -> None:
        self.sweep, self.begun = sweep, list[Change]()
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.alive, self.held = os.pipe()  # jobs read the end of file when this process is gone
        self.folder = tempfile.TemporaryDirectory()  # jobs' errors, and their stdout with --json

    def begin(self, job: Job) -> None:
        """Start a job. OSError if its output cannot be written."""
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

    def stop(self, number: signal.Signals, jobs: Collection[int]) -> str:
        """Pass a stop request on to these jobs; return a message about them."""
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
