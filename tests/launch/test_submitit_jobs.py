"""Jobs submitted by submitit, to this machine and to a Slurm of one node where Slurm is installed."""

from __future__ import annotations

import getpass
import io
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest
from rich.console import Console

from ppctl.config import Config, Run
from ppctl.config.sweep import SubmititLocal, SubmititSlurm
from ppctl.errors import ConfigError
from ppctl.launch.sweep import submitit_jobs
from ppctl.launch.sweep.jobs import SUBMITIT, SUBMITTED, SUBMITTED_LOG, Job, Sweep
from ppctl.launch.sweep.live_table import LiveTable
from ppctl.launch.sweep.runner import run_jobs
from ppctl.launch.sweep.submitit_jobs import Submission
from ppctl.launch.sweep.sweep import run_sweep

NUM_STEPS = 20
FAST = [sys.executable, "-I", "-S", "-c"]  # starts in a few milliseconds
LOCAL = SubmititLocal(jobs=2)


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(submitit_jobs, "POLL_S", 0.2)
    return tmp_path


def sweep_of(number, submit=LOCAL):
    jobs = []
    for index in range(number):
        run_dir = Path("runs/s") / f"run.seed={index}"
        config = Config(run=Run(dir=str(run_dir), num_steps=NUM_STEPS, seed=index))
        swept = f"run.seed={index}"
        jobs.append(Job(index, (swept,), {"run.seed": index}, ("train", swept), run_dir, config))
    return Sweep("train", Path("runs/s"), jobs, num_parallel=submit.jobs or 1, submit=Submission(submit))


def programs(monkeypatch, *texts):
    """What jobs run instead of ppctl, the last one for all others too."""
    monkeypatch.setattr(submitit_jobs, "job_command", lambda job: [*FAST, texts[min(job.index, len(texts) - 1)]])


def told(sweep):
    out = io.StringIO()
    with LiveTable(sweep, Console(file=out, width=200)) as table:
        outcomes, stop = run_jobs(sweep, table)
    return outcomes, stop, out.getvalue()


def stop_when(condition):
    """Asks this process to stop as soon as a condition holds."""

    def wait():
        until_s = time.monotonic() + 60
        while not condition() and time.monotonic() < until_s:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


COUNTS = """
import pathlib, time
with open("began", "a") as file: file.write("x")
until = time.monotonic() + 60
while not pathlib.Path("go").exists() and time.monotonic() < until: time.sleep(0.02)
print("said so")
"""


@pytest.mark.slow
def test_ends_and_outputs_of_local_jobs(monkeypatch, capfd):
    programs(
        monkeypatch,
        "print('good')",
        "import sys; sys.exit('ppctl: it is wrong.')",
        "import os; os.kill(os.getpid(), 9)",
    )
    sweep = sweep_of(3)
    assert run_sweep(sweep) == 1
    outcomes = json.loads(Path("runs/s/sweep.json").read_text())
    assert [(each["status"], each["exit_code"]) for each in outcomes] == [
        ("finished", 0),
        ("failed", 1),
        ("failed", 137),
    ]
    assert [each["error"] for each in outcomes] == [None, "it is wrong.", "was killed by SIGKILL"]
    assert [(job.run_dir / SUBMITTED_LOG).read_text() for job in sweep.jobs] == ["good\n", "ppctl: it is wrong.\n", ""]
    err = capfd.readouterr().err
    assert "note: Jobs ran side by side, which slows each of them" in err
    assert "job 0: run.seed=0: running as process " in err
    assert f"output in runs/s/run.seed=0/{SUBMITTED_LOG}" in err


@pytest.mark.filterwarnings("ignore:Exception ignored in. <function Popen.__del__")  # here no process ends with it
def test_jobs_go_on_without_the_sweep_which_finds_them_again(monkeypatch):
    programs(monkeypatch, COUNTS)
    stop_when(lambda: Path("began").exists())
    outcomes, stop, text = told(sweep_of(1))
    assert ([each.status for each in outcomes], stop) == (["running"], signal.SIGTERM)
    assert "SIGTERM: submitted jobs go on; the same line waits for them again, and this ends them: kill " in text
    threading.Timer(1.0, Path("go").touch).start()
    outcomes, stop, text = told(sweep_of(1))
    assert ([each.status for each in outcomes], stop) == (["finished"], None)
    assert "submitted before" in text
    assert Path("began").read_text() == "x"
    told(sweep_of(1))  # it has a result, so that it is one of the past
    assert Path("began").read_text() == "xx"


SAVES = """
import pathlib, signal, sys, time
def leave(number, frame):
    pathlib.Path("saved").write_text(str(number))
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, leave)
print("began", flush=True)
if not pathlib.Path("saved").exists(): time.sleep(30)
"""


@pytest.mark.full
def test_a_job_saves_before_the_end_of_its_time_and_is_started_again(monkeypatch):
    programs(monkeypatch, SAVES)
    outcomes, _, _ = told(sweep_of(1, replace(LOCAL, timeout_min=0.15, signal_delay_s=5)))
    assert [each.status for each in outcomes] == ["finished"]
    assert Path("saved").read_text() == str(int(signal.SIGTERM))
    assert Path("runs/s/run.seed=0", SUBMITTED_LOG).read_text() == "began\nbegan\n"


@pytest.mark.full
def test_a_job_that_never_gets_ready_in_its_time_fails_with_the_reason(monkeypatch):
    programs(monkeypatch, SAVES.replace('if not pathlib.Path("saved").exists(): ', ""))
    outcomes, _, _ = told(sweep_of(1, replace(LOCAL, timeout_min=0.15, signal_delay_s=5, max_num_timeout=0)))
    assert outcomes[0].status == "failed"
    assert "Job not requeued because: timed-out too many times" in outcomes[0].error


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"jobs": 0}, "hydra.launcher.jobs=0 must be a finite number of at least 1"),
        ({"timeout_min": 1, "signal_delay_s": 60}, "signal_delay_s=60 leaves nothing of the 60 s that a job has"),
    ],
)
def test_impossible_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        replace(LOCAL, **settings).check()


def test_without_slurm_nothing_is_written(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="needs Slurm's sbatch, which is not on this machine's PATH"):
        run_sweep(sweep_of(1, SubmititSlurm()))
    assert not Path("runs").exists()


# --- Slurm -----------------------------------------------------------------------------------------------------------

SLURM = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={top}/state
SlurmdSpoolDir={top}/spool
SlurmctldLogFile={top}/slurmctld.log
SlurmdLogFile={top}/slurmd.log
SlurmctldPidFile={top}/slurmctld.pid
SlurmdPidFile={top}/slurmd.pid
ReturnToService=2
SlurmdParameters=config_overrides
MpiDefault=none
NodeName={host} CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A Slurm of one node, as long as a test takes."""
    if shutil.which("slurmctld") is None or shutil.which("slurmd") is None:
        pytest.skip("Slurm is not installed (slurmctld, slurmd)")
    sockets = [socket.socket() for _ in range(2)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    top = tmp_path / "slurm"
    for name in ("state", "spool"):
        (top / name).mkdir(parents=True)
    conf = top / "slurm.conf"
    conf.write_text(SLURM.format(host=socket.gethostname().split(".")[0], ports=ports, user=getpass.getuser(), top=top))
    monkeypatch.setenv("SLURM_CONF", str(conf))
    daemons = []
    try:
        for name in ("slurmctld", "slurmd"):
            command = [name, "-D", "-f", str(conf)]
            daemons.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        until_s = time.monotonic() + 30
        while "idle" not in subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True).stdout:
            assert time.monotonic() < until_s, (top / "slurmctld.log").read_text()[-2000:]
            time.sleep(0.2)
        yield
    finally:
        for daemon in reversed(daemons):
            daemon.kill()
            daemon.wait()


@pytest.mark.slow
def test_slurm_runs_an_array_whose_jobs_go_on_without_the_sweep(slurm, monkeypatch):
    programs(monkeypatch, COUNTS, "import sys; sys.exit('ppctl: it is wrong.')")
    settings = SubmititSlurm(cpus_per_task=1)
    stop_when(lambda: Path("began").exists())
    outcomes, stop, text = told(sweep_of(2, settings))
    assert stop == signal.SIGTERM
    assert outcomes[0].status in ("queued", "running")
    assert "job 0: run.seed=0: queued as Slurm job 1_0" in text
    assert "this ends them: scancel 1_0" in text
    threading.Timer(2.0, Path("go").touch).start()
    outcomes, _, text = told(sweep_of(2, settings))
    assert [each.status for each in outcomes] == ["finished", "failed"]
    assert outcomes[1].error == "it is wrong."
    assert "job 0: run.seed=0: queued as Slurm job 1_0, submitted before" in text
    assert Path("began").read_text() == "x"


@pytest.mark.full
def test_a_job_that_slurm_drops_is_no_hang(slurm, monkeypatch):
    monkeypatch.setattr(submitit_jobs, "QUEUE_S", 1.0)
    monkeypatch.setattr(submitit_jobs, "GRACE_S", 2.0)
    programs(monkeypatch, "import time; time.sleep(60)")
    sweep = sweep_of(1, SubmititSlurm(additional_parameters={"hold": True}))
    cancel = threading.Timer(4.0, subprocess.run, args=(["scancel", "1"],))
    cancel.start()
    outcomes, _, _ = told(sweep)
    assert outcomes[0].error.startswith("Slurm job 1 has ended without a result (CANCELLED)")


@pytest.mark.full
def test_a_slurm_that_does_not_answer_is_told_once_and_results_still_count(slurm, monkeypatch, tmp_path):
    monkeypatch.setattr(submitit_jobs, "QUEUE_S", 0.2)
    programs(monkeypatch, "import time; time.sleep(2)")
    (tmp_path / "bin").mkdir()
    deaf = tmp_path / "bin/squeue"
    deaf.write_text("#!/bin/sh\necho it is down >&2\nexit 1\n")
    deaf.chmod(0o755)
    monkeypatch.setenv("PATH", f"{deaf.parent}:{os.environ['PATH']}")
    outcomes, _, text = told(sweep_of(1, SubmititSlurm()))
    assert [each.status for each in outcomes] == ["finished"]
    assert text.count("squeue does not say how jobs stand (it is down); waiting on") == 1


@pytest.mark.full
def test_what_slurm_refuses_is_said(slurm, monkeypatch):
    programs(monkeypatch, "")
    outcomes, _, _ = told(sweep_of(1, SubmititSlurm(partition="nowhere")))
    assert outcomes[0].status == "failed"
    assert "it cannot be submitted" in outcomes[0].error
    assert "nowhere" in outcomes[0].error or "partition" in outcomes[0].error


class Evil:
    def __reduce__(self):
        return os.mkdir, ("made",)


def test_a_record_of_a_job_leads_to_no_pickle_elsewhere(monkeypatch):
    sweep = sweep_of(1)
    (job,) = sweep.jobs
    job.run_dir.mkdir(parents=True)
    (sweep.directory / SUBMITIT).mkdir()
    (job.run_dir / SUBMITTED).write_text(json.dumps({"cluster": "local", "id": "../evil", "tasks": 1}))
    (sweep.directory / "evil_0_result.pkl").write_bytes(pickle.dumps(Evil()))
    jobs = submitit_jobs.SubmittedJobs(LOCAL, sweep, SimpleQueue())
    monkeypatch.setattr(jobs, "_states", lambda found: {})  # as of a queue that knows no such job
    try:
        assert jobs._submitted_before(job) is None
    finally:
        jobs.close()
    assert not Path("made").exists()
