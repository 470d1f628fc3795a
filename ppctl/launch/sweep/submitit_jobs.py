"""Jobs of a sweep submitted with submitit, to Slurm or to this machine: they outlive the sweep.

Needs the extra ppctl[slurm]. A record in the run.dir of a job names its submission, so that the
same sweep, started again, waits for the job instead of submitting it twice.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError

from ppctl.config.groups.sweep_settings import SubmititLocal, SubmititSlurm
from ppctl.errors import ConfigError
from ppctl.launch.supervisor import ALIVE_FD, Exit
from ppctl.launch.sweep.sweep_jobs import (
    SUBMITIT,
    SUBMITTED,
    SUBMITTED_LOG,
    Job,
    JobEvents,
    Moved,
    Sweep,
    job_command,
    read_tail,
)
from ppctl.reports.terminal_output import replace_file

POLL_S = 1.0  # between looks for results
QUEUE_S = 15.0  # between questions to Slurm's accounting, for all jobs together
MAX_NUM_TIMEOUT = 20  # starts after the end of a job's time: enough for jobs with progress
JOB_ID = re.compile(r"[0-9]+(_[0-9]+)?")  # a part of the names of submitit's files
STATES = {"PENDING": "queued", "REQUEUED": "queued", "RUNNING": "running"}  # by submitit's names

SubmititJob = submitit.Job[tuple[int, str]]  # its result: exit code, end of the output


@dataclass
class NodeCommand:
    """The program of a node, pickled by submitit: the command of a job, its output in run.dir.

    A call returns the exit code of the command and the end of its output.
    """

    command: list[str]
    run_dir: str
    is_signalled: bool  # the cluster itself sends signals to every process of a job
    gpus: str | None  # the sweep's CUDA_VISIBLE_DEVICES, which submitit hides from local jobs

    def __call__(self) -> tuple[int, str]:
        task = submitit.JobEnvironment().global_rank
        path = Path(self.run_dir) / (SUBMITTED_LOG if task == 0 else f"{task}.{SUBMITTED_LOG}")
        with path.open("ab") as log:
            first = log.tell()
            self.process = self._start(log.fileno())
            code = self._wait()
        with path.open("rb") as file:
            return code, read_tail(file, first)

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Let the run save before the end of its time; return the same command, to submit again."""
        with suppress(ProcessLookupError, ChildProcessError):  # it has just ended
            os.kill(self.process.pid, signal.SIGTERM)
            self._wait()
        return submitit.helpers.DelayedSubmission(replace(self))

    def _start(self, log: int) -> subprocess.Popen[bytes]:
        # 1. the environment: the run ends when this process, which holds the pipe, is gone
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if not self.is_signalled:
            env.pop("CUDA_VISIBLE_DEVICES", None)
            env |= {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": self.gpus}
        alive, self.held = os.pipe()
        # 2. the process, deaf to the signal before the end of its time: that is for this process
        warning = getattr(signal, f"SIG{submitit.JobEnvironment.USR_SIG}")
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [warning])
        try:
            env[ALIVE_FD] = str(alive)
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            popen: type[subprocess.Popen[bytes]] = subprocess.Popen
            process = popen(self.command, env=env, pass_fds=(alive,), **streams)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(alive)
        # 3. SIGTERM is handed on where the cluster does not send it to the run itself
        if not self.is_signalled:
            signal.signal(signal.SIGTERM, lambda *_: os.kill(process.pid, signal.SIGTERM))
        return process

    def _wait(self) -> int:
        """Return the exit code. Unlike Popen.wait, `checkpoint` can interrupt it."""
        _, status = os.waitpid(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        return self.process.returncode


class SubmittedJobs:
    """Submits jobs and reports their states and ends as events."""

    is_awaited = False  # a stop request ends the waiting, and no job

    def __init__(self, sweep: Sweep, events: JobEvents) -> None:
        assert isinstance(sweep.launcher, SubmititLocal | SubmititSlurm)
        self.events = events
        self.is_slurm = isinstance(sweep.launcher, SubmititSlurm)
        self.takes_all = self.is_slurm and sweep.study is None
        kind = submitit.SlurmExecutor if self.is_slurm else submitit.LocalExecutor
        self.executor = kind(sweep.directory / SUBMITIT, max_num_timeout=MAX_NUM_TIMEOUT)
        try:
            self.executor.update_parameters(**sweep.launcher.parameters())
        except (TypeError, ValueError) as error:
            text = f"hydra.launcher: submitit refuses these settings: {error}"
            raise ConfigError(text) from error
        self.batch: list[Job] = []  # begun and not yet submitted
        self.known: dict[int, tuple[SubmititJob, str]] = {}  # submission and state by job number
        self.tails: dict[int, str] = {}
        self.lock, self.closed = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def begin(self, job: Job) -> None:
        """Find the submission of a job, or take it for `commit`. OSError: unwritable run.dir."""
        job.run_dir.mkdir(parents=True, exist_ok=True)
        submission = self._submitted_before(job)
        if submission is None:
            self.batch.append(job)
        else:
            self._know(job, submission, f" as {self._name(submission)}, submitted before")

    def commit(self) -> None:
        """Submit the batch, several jobs as one array of Slurm."""
        jobs, self.batch = self.batch, []
        if not jobs:
            return
        how = self.is_slurm, os.environ.get("CUDA_VISIBLE_DEVICES")
        commands = [NodeCommand(job_command(job), str(job.run_dir), *how) for job in jobs]
        try:
            submissions = self.executor.submit_array(commands)
        except (OSError, subprocess.SubprocessError, FailedJobError) as error:
            why = " ".join(str(error).split())
            for job in jobs:
                self._end(job.index, 2, f"ppctl: it cannot be submitted: {why}")
            return
        for job, submission in zip(jobs, submissions, strict=True):
            record = {"id": submission.job_id, "tasks": submission.num_tasks}
            record["is_slurm"] = self.is_slurm
            replace_file(job.run_dir / SUBMITTED, json.dumps(record) + "\n")
            output = job.run_dir / SUBMITTED_LOG
            self._know(job, submission, f" as {self._name(submission)}, output in {output}")

    def end(self, index: int) -> str:
        """Return the end of the output of a job."""
        return self.tails.pop(index)

    def stop(self, number: int, jobs: Collection[int]) -> str:
        """Return a message about these jobs, which go on."""
        del number
        with self.lock:
            ids = [self.known[index][0].job_id for index in sorted(jobs) if index in self.known]
        if not ids:
            return "nothing is left running"
        ends = " ".join(["scancel" if self.is_slurm else "kill", *ids])
        return f"submitted jobs go on; the same line waits for them again, this ends them: {ends}"

    def close(self) -> None:
        self.closed.set()
        self.thread.join()

    def _know(self, job: Job, submission: SubmititJob, more: str) -> None:
        state = "queued" if self.is_slurm else "running"
        with self.lock:
            self.known[job.index] = submission, state
        self.events.put(Moved(job.index, state, more))

    def _watch(self) -> None:
        asked_s = 0.0
        while not self.closed.wait(POLL_S):
            with self.lock:
                known = dict(self.known)
            if self.is_slurm and known and time.monotonic() - asked_s >= QUEUE_S:
                asked_s = time.monotonic()
                submitit.SlurmJob.watcher.update()
            for index, (submission, state) in known.items():
                if _is_done(submission):
                    self._end(index, *_result(submission))
                    continue
                now = STATES.get(submission.state, state)
                if now != state:
                    with self.lock:
                        self.known[index] = submission, now
                    self.events.put(Moved(index, now, ""))

    def _end(self, index: int, code: int, tail: str) -> None:
        with self.lock:
            self.known.pop(index, None)
        self.tails[index] = tail
        self.events.put(Exit(index, code))

    def _submitted_before(self, job: Job) -> SubmititJob | None:
        """Return the unfinished submission of a job by an earlier start of the sweep."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads((job.run_dir / SUBMITTED).read_text())
            name, tasks = str(record["id"]), [*range(int(record["tasks"]))]
            if record["is_slurm"] == self.is_slurm and JOB_ID.fullmatch(name):
                submission = self.executor.job_class(self.executor.folder, name, tasks=tasks)
                return None if _is_done(submission) else submission
        return None

    def _name(self, submission: SubmititJob) -> str:
        return f"Slurm job {submission.job_id}" if self.is_slurm else f"process {submission.job_id}"


def _is_done(submission: SubmititJob) -> bool:
    is_local = isinstance(submission, submitit.LocalJob)
    if not is_local or submission.state != "NO PROCESS AND NO RESULT":
        return submission.done()
    try:  # submitit knows no process that an earlier start of the sweep began
        os.kill(int(submission.job_id), 0)
        file = Path(f"/proc/{submission.job_id}/cmdline")
        return Path("/proc").exists() and b"submitit" not in file.read_bytes()
    except OSError:
        return True


def _result(submission: SubmititJob) -> tuple[int, str]:
    """Return (exit code, end of the output) of the first task that failed, or of the first task."""
    results: list[tuple[int, str]] = []
    for task in map(submission.task, range(submission.num_tasks)):
        error = task.exception()  # waits 15 s for the result, on a slow file system
        if error is None:
            results.append(task.result())
            continue
        lines = re.findall(r"^[\w.]+(?:Error|Exception)\b.*", str(error), re.MULTILINE)
        reason = lines[-1] if lines else f"it has ended without a result ({task.state})"
        results.append((1, f"ppctl: {reason}: {task.paths.stderr}"))
    return next((result for result in results if result[0] != 0), results[0])
