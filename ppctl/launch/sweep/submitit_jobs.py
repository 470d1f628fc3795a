"""Jobs of a sweep submitted to Slurm with submitit: they outlive the sweep.

Needs the extra ppctl[slurm]. A record in the run.dir of a job names its submission, so that the
same sweep, started again, waits for the job instead of submitting it twice.
"""

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import submitit
from submitit.core.utils import FailedJobError

from ppctl.config.groups.command_settings import SubmititSlurm
from ppctl.errors import ConfigError, LostError, error_document, one_line
from ppctl.launch.local_processes import ERROR_FILE, left_error
from ppctl.launch.supervisor import Child, start
from ppctl.launch.sweep import sweep_jobs
from ppctl.launch.sweep.sweep_jobs import Change, Job, Sweep, job_command
from ppctl.reports.terminal_output import replace_file

POLL_S = 1.0  # seconds between checks for results
QUEUE_S = 15.0  # seconds between queries of Slurm's accounting, for all jobs together
MAX_NUM_TIMEOUT = 20  # restarts at a job's time limit: enough for jobs with progress
JOB_ID = re.compile(r"[0-9]+(_[0-9]+)?")  # form of Slurm's job ids, which are parts of file names
STATES = {"PENDING": "queued", "REQUEUED": "queued", "RUNNING": "running"}  # key: submitit's name

SubmititJob = submitit.Job[tuple[int, dict[str, Any] | None]]  # with the result of NodeCommand


@dataclass
class NodeCommand:
    """A node's program, pickled by submitit: runs a command, returns its exit code and error."""

    command: list[str]
    run_dir: str

    def __call__(self) -> tuple[int, dict[str, Any] | None]:
        task = submitit.JobEnvironment().global_rank
        number = "" if task == 0 else f"{task}."
        path = Path(self.run_dir) / f"{number}{sweep_jobs.SUBMITTED_LOG}"
        with path.open("ab") as log, tempfile.TemporaryDirectory() as folder:
            self._start(log, file := Path(folder, "error"))
            return self._wait(), left_error(file)

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Let the run save before its time limit; return the same command, to submit again."""
        with suppress(ProcessLookupError, ChildProcessError):  # it has just ended
            os.kill(self.process.pid, signal.SIGTERM)
            self._wait()
        return submitit.helpers.DelayedSubmission(replace(self))

    def _start(self, log: IO[bytes], error_file: Path) -> None:
        """Start the process; it exits when this one, which holds the pipe, is gone."""
        alive, self.held = os.pipe()
        # Slurm may send the child, too, the signal before the time limit; only this process handles
        # it, so the child starts with the signal blocked
        warning = getattr(signal, f"SIG{submitit.JobEnvironment.USR_SIG}")
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [warning])
        try:
            child = Child(self.command, {ERROR_FILE: str(error_file)})
            self.process = start(child, alive, stdout=log, stderr=log)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(alive)

    def _wait(self) -> int:
        """Return the exit code. Unlike Popen.wait, `checkpoint` can interrupt it."""
        _, status = os.waitpid(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        return self.process.returncode


class SubmittedJobs:
    """Submits jobs and reports their states and results."""

    is_awaited = False  # after a stop request, the sweep ends and the jobs continue

    def __init__(self, sweep: Sweep) -> None:
        assert isinstance(sweep.launcher, SubmititSlurm)
        self.takes_all, self.poll_s, self.asked_s = sweep.study is None, POLL_S, 0.0
        folder = sweep.directory / sweep_jobs.SUBMITIT
        self.executor = submitit.SlurmExecutor(folder, max_num_timeout=MAX_NUM_TIMEOUT)
        try:
            self.executor.update_parameters(**sweep.launcher.parameters())
        except (TypeError, ValueError) as error:
            text = f"hydra.launcher: submitit refuses these settings: {error}"
            raise ConfigError(text) from error
        self.batch: list[Job] = []  # jobs begun and not yet submitted
        self.known: dict[int, tuple[SubmititJob, str]] = {}  # submission and state by job number
        self.changed: list[Change] = []  # changes not reported yet

    def begin(self, job: Job) -> None:
        """Add a job to the batch, or follow its unfinished submission by an earlier start.

        OSError if run.dir is not writable.
        """
        job.run_dir.mkdir(parents=True, exist_ok=True)
        submission = self._submitted_before(job)
        if submission is None:
            self.batch.append(job)
        else:
            self._know(job, submission, "submitted before")

    def _submit(self) -> None:
        """Submit the batch, several jobs as one array of Slurm."""
        jobs, self.batch = self.batch, []
        if not jobs:
            return
        commands = [NodeCommand(job_command(job), str(job.run_dir)) for job in jobs]
        try:
            submissions = self.executor.submit_array(commands)
        except (OSError, subprocess.SubprocessError, FailedJobError) as error:
            why = f"it cannot be submitted: {one_line(error)}"
            document = error_document(ConfigError.kind, why)
            self.changed += [Change(job.index, "ended", code=2, error=document) for job in jobs]
            return
        for job, submission in zip(jobs, submissions, strict=True):
            record = {"id": submission.job_id, "tasks": submission.num_tasks}
            replace_file(job.run_dir / sweep_jobs.SUBMITTED, json.dumps(record) + "\n")
            self._know(job, submission, f"output in {job.run_dir / sweep_jobs.SUBMITTED_LOG}")

    def changes(self) -> list[Change]:
        """Submit the batch; return the changes of jobs since the last call."""
        self._submit()
        changes, self.changed = self.changed, []
        if self.known and time.monotonic() - self.asked_s >= QUEUE_S:
            self.asked_s = time.monotonic()
            submitit.SlurmJob.watcher.update()
        for index, (submission, state) in list(self.known.items()):
            if submission.done():
                del self.known[index]
                changes.append(_ended(index, submission))
            elif (now := STATES.get(submission.state, state)) != state:
                self.known[index] = submission, now
                changes.append(Change(index, now))
        return changes

    def stop(self, _number: signal.Signals, jobs: Collection[int]) -> str:
        """Return a message about the given jobs. They are not stopped: submitted jobs continue."""
        ids = [self.known[index][0].job_id for index in sorted(jobs) if index in self.known]
        if not ids:
            return "nothing is left running"
        ends = " ".join(["scancel", *ids])
        return f"submitted jobs continue; repeat the command to await them, or cancel them: {ends}"

    def close(self) -> None:
        """Do nothing: submitted jobs continue."""

    def _know(self, job: Job, submission: SubmititJob, more: str) -> None:
        self.known[job.index] = submission, "queued"
        text = f" as Slurm job {submission.job_id}, {more}"
        self.changed.append(Change(job.index, "queued", text))

    def _submitted_before(self, job: Job) -> SubmititJob | None:
        """Return the unfinished submission of a job by an earlier start of the sweep."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads((job.run_dir / sweep_jobs.SUBMITTED).read_text())
            name, tasks = str(record["id"]), [*range(int(record["tasks"]))]
            if JOB_ID.fullmatch(name):
                submission = self.executor.job_class(self.executor.folder, name, tasks=tasks)
                return None if submission.done() else submission
        return None


def _ended(index: int, submission: SubmititJob) -> Change:
    """Return the end of a job: the exit code and error of its first failed task, else task 0's."""
    ends: list[tuple[int, dict[str, Any] | None]] = []  # exit code and error of each task
    for task in map(submission.task, range(submission.num_tasks)):
        error = task.exception()  # waits up to 15 s for the result on a slow file system
        if error is None:
            ends.append(task.result())
            continue
        lines = re.findall(r"^[\w.]+(?:Error|Exception)\b.*", str(error), re.MULTILINE)
        reason = lines[-1] if lines else f"it has ended without a result ({task.state})"
        ends.append((1, error_document(LostError.kind, f"{reason}: {task.paths.stderr}")))
    code, document = next((end for end in ends if end[0] != 0), ends[0])
    return Change(index, "ended", code=code, error=document)
