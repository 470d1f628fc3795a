"""Jobs of a sweep submitted with submitit, to Slurm or to this machine: they go on when the sweep's own process ends.

Needs the extra ppctl[slurm]. The rest of a sweep knows of it what `ppctl.launch.sweep.jobs.SubmitsJobs` says.

Which job was submitted as what stands in its run.dir, so that the same sweep, started again, waits for what it finds
instead of submitting it twice. A job's result says that it has ended, and `squeue` where there is none.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import submitit
from submitit.core.utils import FailedJobError

from ppctl.config.sweep import SubmititLocal, SubmititSlurm
from ppctl.errors import ConfigError
from ppctl.launch.supervise import ALIVE_FD, Exit
from ppctl.launch.sweep.jobs import SUBMITIT, SUBMITTED, SUBMITTED_LOG, Job, JobEvents, Moved, Notice, Sweep
from ppctl.launch.sweep.processes import job_command, read_tail
from ppctl.reports.terminal import replace_file

POLL_S = 1.0  # between looks for results
QUEUE_S = 10.0  # between questions to Slurm
ANSWER_S = 30.0  # that Slurm has for one
GRACE_S = 15.0  # for the result of a job that has left the queue, on a slow file system
JOB_ID = re.compile(r"[0-9]+(_[0-9]+)?")  # a part of the names of submitit's files
WAITS = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
RUNS = {"RUNNING", "COMPLETING", "SUSPENDED", "PREEMPTED", "SIGNALING", "STAGE_OUT", "STOPPED", "RESIZING"}


@dataclass(frozen=True)
class Submission:
    """hydra/launcher=submitit_local or submitit_slurm with its settings."""

    settings: SubmititLocal | SubmititSlurm

    @property
    def is_here(self) -> bool:
        """Jobs share this machine."""
        return isinstance(self.settings, SubmititLocal)

    def check(self) -> None:
        """Raise ConfigError where jobs cannot be submitted from here."""
        if not self.is_here and shutil.which("sbatch") is None:
            raise ConfigError(
                "hydra/launcher=submitit_slurm needs Slurm's sbatch, which is not on this machine's PATH. "
                "Start the sweep where jobs are submitted, or use hydra/launcher=submitit_local."
            )

    def starter(self, sweep: Sweep, events: JobEvents) -> SubmittedJobs:
        """Return what submits the jobs of a sweep."""
        return SubmittedJobs(self.settings, sweep, events)


class NodeCommand:
    """The program of a node: the job's command, with its output in run.dir.

    Called, it returns the command's exit code and the end of what it printed. submitit pickles it.
    """

    def __init__(self, command: Sequence[str], run_dir: Path, *, is_signalled: bool) -> None:
        self.command, self.run_dir = list(command), str(run_dir)
        self.is_signalled = is_signalled  # the cluster itself sends signals to every process of a job
        self.gpus = os.environ.get("CUDA_VISIBLE_DEVICES")  # submitit hides them from jobs of this machine

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
        """Let the run save, before the end of a job's time; return the same command, to be submitted again."""
        with suppress(ProcessLookupError, ChildProcessError):  # it has just ended
            os.kill(self.process.pid, signal.SIGTERM)
            self._wait()
        again = NodeCommand(self.command, Path(self.run_dir), is_signalled=self.is_signalled)
        again.gpus = self.gpus
        return submitit.helpers.DelayedSubmission(again)

    def _start(self, log: int) -> subprocess.Popen[bytes]:
        """Start the process. The signal before the end of its time is for this one, wherever the cluster sends it."""
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if not self.is_signalled:
            env.pop("CUDA_VISIBLE_DEVICES", None)
            env |= {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": self.gpus}
        alive, self.held = os.pipe()  # nobody writes: the run reads its end when this process is gone
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [getattr(signal, f"SIG{submitit.JobEnvironment.USR_SIG}")])
        try:
            process = subprocess.Popen(
                self.command,
                env={**env, ALIVE_FD: str(alive)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(alive,),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(alive)
        if not self.is_signalled:
            signal.signal(signal.SIGTERM, lambda *_: os.kill(process.pid, signal.SIGTERM))
        return process

    def _wait(self) -> int:
        """Return the exit code. `checkpoint` calls this while a call of this is waiting, as Popen may not be asked."""
        _, status = os.waitpid(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        return self.process.returncode

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("process", "held")}


class KnownJob(NamedTuple):
    """A submitted job and how it stands."""

    job: submitit.Job[tuple[int, str]]
    state: str
    gone_s: float | None = None  # since when it is not there any more, as time.monotonic()


class SubmittedJobs:
    """Submits jobs and reports what becomes of them as events."""

    is_awaited = False  # a stop request ends the waiting, and no job

    def __init__(self, settings: SubmititLocal | SubmititSlurm, sweep: Sweep, events: JobEvents) -> None:
        self.settings, self.events, self.directory = settings, events, sweep.directory
        self.is_slurm = isinstance(self.settings, SubmititSlurm)
        self.takes_all = self.is_slurm and sweep.study is None
        self.executor = self._executor()
        self.batch: list[Job] = []
        self.is_silent = False  # Slurm does not answer
        self.known: dict[int, KnownJob] = {}
        self.tails: dict[int, str] = {}
        self.lock, self.closed = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def begin(self, job: Job) -> None:
        """Take a job, which `commit` submits unless it is there. OSError where its run.dir cannot be written."""
        job.run_dir.mkdir(parents=True, exist_ok=True)
        found = self._submitted_before(job)
        if found is None:
            self.batch.append(job)
            return
        with self.lock:
            self.known[job.index] = KnownJob(found, "queued")
        self.events.put(Moved(job.index, "queued", f" as {self._name(found)}, submitted before"))

    def commit(self) -> None:
        """Submit what has begun, several as one array of Slurm."""
        jobs, self.batch = self.batch, []
        if not jobs:
            return
        commands = [NodeCommand(job_command(job), job.run_dir, is_signalled=self.is_slurm) for job in jobs]
        try:
            made = self.executor.submit_array(commands)
        except (OSError, subprocess.SubprocessError, FailedJobError) as error:
            reason = " ".join(str(error).split())
            for job in jobs:
                self._end(job.index, 2, f"ppctl: it cannot be submitted: {reason}")
            return
        for job, each in zip(jobs, made, strict=True):
            state = "queued" if self.is_slurm else "running"
            with self.lock:
                self.known[job.index] = KnownJob(each, state)
            record = {"cluster": self.settings.cluster, "id": each.job_id, "tasks": each.num_tasks}
            replace_file(job.run_dir / SUBMITTED, json.dumps(record) + "\n")
            where = f" as {self._name(each)}, output in {job.run_dir / SUBMITTED_LOG}"
            self.events.put(Moved(job.index, state, where))

    def end(self, index: int) -> str:
        """Return the end of what a job printed."""
        return self.tails.pop(index)

    def stop(self, number: int, jobs: Collection[int]) -> str:
        """Return what there is to say of these jobs, which go on."""
        del number
        with self.lock:
            left = [self.known[index].job.job_id for index in sorted(jobs) if index in self.known]
        if not left:
            return "nothing is left running"
        what = "scancel" if self.is_slurm else "kill"
        return f"submitted jobs go on; the same line waits for them again, and this ends them: {what} {' '.join(left)}"

    def close(self) -> None:
        self.closed.set()
        self.thread.join()

    # --- what becomes of them --------------------------------------------------------------------------------

    def _watch(self) -> None:
        polled_s = 0.0
        while not self.closed.wait(POLL_S):
            with self.lock:
                known = dict(self.known)
            for index, each in known.items():
                result = _result(each.job)
                if result is not None:
                    self._end(index, *result)
            if time.monotonic() - polled_s >= (QUEUE_S if self.is_slurm else POLL_S):
                polled_s = time.monotonic()
                self._poll({index: each for index, each in known.items() if index in self.known})

    def _poll(self, known: Mapping[int, KnownJob]) -> None:
        states = self._states([each.job for each in known.values()])
        if states is None:
            return
        now_s = time.monotonic()
        for index, each in known.items():
            state = states.get(each.job.job_id, "")
            moved = "queued" if state in WAITS else "running" if state in RUNS else None
            gone_s = None if moved else now_s if each.gone_s is None else each.gone_s
            if moved is not None and moved != each.state:
                self.events.put(Moved(index, moved, ""))
            with self.lock:
                self.known[index] = each._replace(state=moved or each.state, gone_s=gone_s)
            if gone_s is not None and now_s - gone_s >= GRACE_S and _result(each.job) is None:
                in_queue = f" ({state})" if state else ""
                self._end(
                    index, 1, f"ppctl: {self._name(each.job)} has ended without a result{in_queue}: {_log(each.job)}"
                )

    def _end(self, index: int, code: int, tail: str) -> None:
        with self.lock:
            self.known.pop(index, None)
        self.tails[index] = tail
        self.events.put(Exit(index, code))

    def _states(self, jobs: Sequence[submitit.Job[Any]]) -> dict[str, str] | None:
        """Return the state of each job that is known where it was submitted; None: there is no answer now."""
        if not self.is_slurm:
            return {job.job_id: "RUNNING" for job in jobs if _is_alive(job)}
        if not jobs:
            return {}
        ids = ",".join(job.job_id for job in jobs)
        command = ["squeue", "--noheader", "--array", "--states=all", "--format=%i %T", f"--jobs={ids}"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWER_S)
        except subprocess.TimeoutExpired:
            return self._silent(f"no answer in {ANSWER_S:g} s")
        if answer.returncode != 0 and "Invalid job id" not in answer.stderr:
            return self._silent(" ".join(answer.stderr.split()))
        self.is_silent = False
        pairs = (line.split() for line in answer.stdout.splitlines())
        return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}

    def _silent(self, why: str) -> None:
        """Say once that Slurm does not answer, until it does again."""
        if not self.is_silent:
            self.events.put(Notice(f"squeue does not say how jobs stand ({why}); waiting on, for their results too"))
        self.is_silent = True

    # --- what is there already -------------------------------------------------------------------------------

    def _submitted_before(self, job: Job) -> submitit.Job[tuple[int, str]] | None:
        """Return as what a job was submitted by an earlier start of the sweep, if that has not ended."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads((job.run_dir / SUBMITTED).read_text())
            if record["cluster"] == self.settings.cluster and JOB_ID.fullmatch(str(record["id"])):
                kind = submitit.SlurmJob if self.is_slurm else submitit.LocalJob
                found = kind(self._folder, str(record["id"]), tasks=list(range(int(record["tasks"]))))
                states = self._states([found]) or {}
                if _result(found) is None and states.get(found.job_id, "") in WAITS | RUNS:
                    return found
        return None

    @property
    def _folder(self) -> Path:
        return self.directory / SUBMITIT

    def _executor(self) -> submitit.SlurmExecutor | submitit.LocalExecutor:
        kind = submitit.SlurmExecutor if self.is_slurm else submitit.LocalExecutor
        executor = kind(self._folder, max_num_timeout=self.settings.max_num_timeout)
        try:
            executor.update_parameters(**self.settings.parameters())
        except (TypeError, ValueError) as error:
            raise ConfigError(f"hydra.launcher: submitit refuses these settings: {error}") from error
        return executor

    def _name(self, job: submitit.Job[Any]) -> str:
        return f"Slurm job {job.job_id}" if self.is_slurm else f"process {job.job_id}"


def _result(job: submitit.Job[tuple[int, str]]) -> tuple[int, str] | None:
    """Return (exit code, end of its output) of the first task that failed, or of the first; None: one goes on."""
    tasks = [job.task(number) for number in range(job.num_tasks)]
    if not all(task.paths.result_pickle.exists() for task in tasks):
        return None
    results = []
    for task in tasks:
        error = task.exception()
        if error is None:
            results.append(task.result())
        else:
            last = [line for line in str(error).splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)]
            results.append((1, f"ppctl: {last[-1] if last else 'it failed'}: {_log(task)}"))
    return next((result for result in results if result[0] != 0), results[0])


def _log(job: submitit.Job[Any]) -> Path:
    """Return where submitit itself wrote of a job."""
    return job.task(0).paths.stderr


def _is_alive(job: submitit.Job[Any]) -> bool:
    """Return whether the process of a job of this machine is there."""
    if job.state == "RUNNING":
        return True
    try:  # one that an earlier start of the sweep began is no child of this process
        os.kill(int(job.job_id), 0)
        return b"submitit" in Path(f"/proc/{job.job_id}/cmdline").read_bytes()
    except FileNotFoundError:
        return not Path("/proc").exists()
    except OSError:
        return False
